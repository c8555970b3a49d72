"""The file format of the suffix store; who may write when is the store's business.

One line of JSON (what the file is, its version, whose ids it holds, a name of its own), then one
record per sequence: the number of ids, the CRC-32 of the ids begun with that number, and the ids,
all as 32-bit little-endian integers.
"""

from __future__ import annotations

import json
import os
import secrets
import struct
import sys
import zlib
from array import array
from collections.abc import Iterator
from typing import BinaryIO

_FORMAT = "ssd-suffix-store"
_VERSION = 1
_RECORD = struct.Struct("<II")
# A header is shorter; a first line longer than this is not ours.
_MAX_HEADER_BYTES = 4096


class DamagedFileError(Exception):
    """The file does not hold what it should; the message goes on after "because"."""


def write_header(file: BinaryIO, fingerprint: str) -> None:
    """Begin a new file, at the file's position."""
    fields = {
        "format": _FORMAT,
        "version": _VERSION,
        "fingerprint": fingerprint,
        # Tells this file from an older or newer one at the same path.
        "file_id": secrets.token_hex(8),
    }
    file.write(json.dumps(fields).encode() + b"\n")


def read_header(file: BinaryIO, fingerprint: str) -> str:
    """Read and check the header from the file's start; returns the file's own id.

    Raises:
      DamagedFileError: it is no such file, of another version, or with another fingerprint.
    """
    file.seek(0)
    try:
        fields = json.loads(file.readline(_MAX_HEADER_BYTES))
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict) or fields.get("format") != _FORMAT:
        raise DamagedFileError("it is not a suffix store")
    if fields.get("version") != _VERSION:
        raise DamagedFileError(f"it has version {fields.get('version')!r}, not {_VERSION}")
    if fields.get("fingerprint") != fingerprint:
        raise DamagedFileError("it belongs to another model or tokenizer")
    return str(fields.get("file_id"))


def write_record(file: BinaryIO, sequence: array[int]) -> None:
    """Write one sequence at the file's position."""
    payload = _swapped_if_big_endian(sequence).tobytes()
    file.write(_RECORD.pack(len(sequence), _checksum(len(sequence), payload)) + payload)


def whole_records_end(file: BinaryIO, start: int) -> int:
    """Where the last record ends that was written to its end, looking from a record's start on."""
    size = os.fstat(file.fileno()).st_size
    end = start
    while end + _RECORD.size <= size:
        file.seek(end)
        count, _ = _RECORD.unpack(file.read(_RECORD.size))
        following: int = end + _RECORD.size + 4 * count
        if following > size:
            break
        end = following
    return end


def read_records(file: BinaryIO, end: int, vocab_size: int) -> Iterator[array[int]]:
    """The sequences from the file's position up to ``end``, where a record must end.

    Raises:
      DamagedFileError: a record does not match its checksum, or has ids out of bounds.
    """
    while (at := file.tell()) < end:
        count, checksum = _RECORD.unpack(file.read(_RECORD.size))
        payload = file.read(4 * count)
        if _checksum(count, payload) != checksum:
            raise DamagedFileError(f"the record at byte {at} does not match its checksum")
        sequence = array("I")
        sequence.frombytes(payload)
        sequence = _swapped_if_big_endian(sequence)
        if not sequence or max(sequence) >= vocab_size:
            raise DamagedFileError(f"the record at byte {at} holds no ids of the vocabulary")
        yield sequence


def _checksum(count: int, payload: bytes) -> int:
    return zlib.crc32(payload, count)


def _swapped_if_big_endian(sequence: array[int]) -> array[int]:
    if sys.byteorder == "big":
        sequence = array("I", sequence)
        sequence.byteswap()
    return sequence
