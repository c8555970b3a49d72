"""GGUF files: what their header says, and their conversion to a folder that transformers loads."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ssd_integrations.errors import ModelLoadError, ModelNotFoundError, UnsupportedModelError
from ssd_workers.models.cache import disk_errors

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_CHUNK = 4 * 1024**2
# Value type -> struct code, for the types of fixed size.
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
# A header is a few MB of vocabulary; anything that claims more is damaged or hostile.
_MAX_STRING = 64 * 1024**2
_MAX_ITEMS = 16 * 1024**2


@dataclass(frozen=True)
class GgufHeader:
    """What the file says about itself.

    ``scalars`` holds the metadata that are single numbers or strings; ``elements`` counts the
    weights of all tensors; ``data_end`` is the smallest size that a whole file can have, in bytes.
    """

    architecture: str
    scalars: dict[str, Any]
    tensors: int
    elements: int
    data_end: int

    @property
    def float32_bytes(self) -> int:
        """Size of the weights once they are ordinary float32 numbers."""
        return 4 * self.elements


class _Reader:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def scalar(self, code: str) -> Any:
        size = struct.calcsize("<" + code)
        data = self._file.read(size)
        if len(data) != size:
            raise ValueError("the file ends inside its header")
        return struct.unpack("<" + code, data)[0]

    def text(self) -> str:
        length = self._bounded(self.scalar("Q"), _MAX_STRING, "a string")
        data = self._file.read(length)
        if len(data) != length:
            raise ValueError("the file ends inside its header")
        return data.decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        """A scalar or string; an array is skipped and gives None."""
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            raise ValueError(f"metadata of unknown type {kind}")
        item, count = self.scalar("I"), self.count()
        if item in _SCALARS:
            self._file.seek(count * struct.calcsize("<" + _SCALARS[item]), 1)
        else:
            for _ in range(count):
                self.value(item)
        return None

    def count(self) -> int:
        return self._bounded(self.scalar("Q"), _MAX_ITEMS, "a list")

    @staticmethod
    def _bounded(value: int, limit: int, what: str) -> int:
        if value > limit:
            raise ValueError(f"{what} of {value} items in the header")
        return value


def read_header(path: Path) -> GgufHeader:
    """Parse the header of the GGUF file ``path`` without reading its weights.

    Raises:
      ModelNotFoundError: there is no such file, or it is not a GGUF file.
      ModelLoadError: the file is damaged or cut off.
      UnsupportedModelError: the file is one part of a split model.
    """
    if not path.is_file():
        raise ModelNotFoundError(f"There is no file {str(path)!r}.")
    with disk_errors("reading the GGUF file", path), path.open("rb") as file:
        magic = file.read(4)
        if magic != _MAGIC:
            raise ModelNotFoundError(
                f"{str(path)!r} is not a GGUF file: it starts with {magic!r} instead of {_MAGIC!r}."
            )
        try:
            header = _parse(_Reader(file), file)
        except (ValueError, RecursionError, KeyError) as error:
            raise _damaged(path, str(error)) from error
    size = path.stat().st_size
    if size < header.data_end:
        raise _damaged(path, f"it has {size} bytes, but its tensors need {header.data_end}")
    parts = header.scalars.get("split.count", 0)
    if parts > 1:
        raise UnsupportedModelError(
            f"{str(path)!r} is one of {parts} parts of a split GGUF model.",
            remedy="Join the parts first: llama-gguf-split --merge FIRST_PART WHOLE.gguf",
        )
    return header


def _damaged(path: Path, why: str) -> ModelLoadError:
    return ModelLoadError(
        f"The GGUF file {str(path)!r} is damaged: {why}.", remedy="Fetch the file again."
    )


def _parse(reader: _Reader, file: BinaryIO) -> GgufHeader:
    from gguf.constants import GGML_QUANT_SIZES

    version = reader.scalar("I")
    if version not in _VERSIONS:
        raise ValueError(f"version {version}, but only {_VERSIONS} are known")
    tensors, keys = reader.count(), reader.count()
    scalars: dict[str, Any] = {}
    for _ in range(keys):
        name = reader.text()
        value = reader.value(reader.scalar("I"))
        if value is not None:
            scalars[name] = value
    elements, end = 0, 0
    for _ in range(tensors):
        reader.text()
        shape = [reader.scalar("Q") for _ in range(reader.scalar("I"))]
        block, block_bytes = GGML_QUANT_SIZES[reader.scalar("I")]
        count = math.prod(shape)
        elements += count
        end = max(end, reader.scalar("Q") + count // block * block_bytes)
    alignment = int(scalars.get("general.alignment", 32))
    start = -(-file.tell() // alignment) * alignment
    if "general.architecture" not in scalars:
        raise ValueError("it names no architecture")
    return GgufHeader(
        architecture=str(scalars["general.architecture"]),
        scalars=scalars,
        tensors=tensors,
        elements=elements,
        data_end=start + end,
    )


def sha256_of(path: Path, on_bytes: Callable[[int], None]) -> str:
    """The hex sha256 of ``path``; ``on_bytes`` is told how many bytes are read so far."""
    digest, done = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            done += len(chunk)
            on_bytes(done)
    return digest.hexdigest()
