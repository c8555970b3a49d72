"""Outputs of finished requests on disk, so that the next start drafts from them."""

from __future__ import annotations

import hashlib
import logging
import os
from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import filelock

from ssd_integrations.errors import EngineError, InvalidRequestError
from ssd_workers.engine.drafters.suffix_file import (
    DamagedFileError,
    read_header,
    read_records,
    whole_records_end,
    write_header,
    write_record,
)

logger = logging.getLogger(__name__)

_LOAD_WAIT_S = 10.0
_FLUSH_WAIT_S = 5.0


def store_fingerprint(model_fingerprint: str, vocabulary: Mapping[str, int]) -> str:
    """What a store's ids belong to: a model's weights and its tokenizer's token -> id table."""
    digest = hashlib.sha256(model_fingerprint.encode())
    for token, index in sorted(vocabulary.items()):
        digest.update(f"\0{index}\0{token}".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


class SuffixStore:
    """A file of token sequences that belongs to one model and tokenizer.

    **Privacy:** the file holds what the model wrote, as token ids, which anybody with the
    tokenizer can read as text. So nothing is stored unless a path is given, and only the user who
    runs the process may read the file (mode 0600). Removing the file forgets everything.

    Several processes may share a file: each loads it once and appends its own outputs under a
    lock (``<path>.lock``). The file is bounded: past twice ``max_tokens`` it is rewritten, in one
    step, with the newest ``max_tokens``. A write that was interrupted costs its own record only.
    A file that is damaged, or belongs to another model, tokenizer or program, is renamed to
    ``<path>.set-aside-N`` with a warning, and a new one is begun.

    Parameters:
      path: the file; its folder is made if missing.
      fingerprint: what the ids belong to (:func:`store_fingerprint`).
      vocab_size: every id must be below it.
      max_tokens: how many tokens are kept.

    Raises:
      InvalidRequestError: ``max_tokens`` or ``vocab_size`` is not positive.
    """

    def __init__(
        self, path: Path | str, fingerprint: str, *, vocab_size: int, max_tokens: int = 250_000
    ) -> None:
        if max_tokens < 1 or vocab_size < 1:
            raise InvalidRequestError(
                f"A suffix store with max_tokens={max_tokens} and vocab_size={vocab_size} would "
                "hold nothing.",
                remedy="Give positive numbers, or no store.",
            )
        self.path = Path(path).expanduser().absolute()
        self._fingerprint = fingerprint
        self._vocab_size = vocab_size
        self._max_tokens = max_tokens
        self._lock = filelock.FileLock(f"{self.path}.lock", mode=0o600)
        self._pending: deque[array[int]] = deque()
        # The id of the file last written to, and up to where it was seen to be whole.
        self._whole: tuple[str, int] = ("", 0)
        self._disabled = False

    def load(self) -> list[list[int]]:
        """The stored sequences, oldest first, at most ``max_tokens`` tokens of the newest.

        Raises:
          InvalidRequestError: the file or its folder cannot be read or written.
          EngineError: another process has held the lock for 10 seconds.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self._lock.acquire(timeout=_LOAD_WAIT_S):
                return [sequence.tolist() for sequence in self._load_locked()]
        except filelock.Timeout as error:
            raise EngineError(
                f"The suffix store {self.path} was locked for {_LOAD_WAIT_S:g} s.",
                remedy="End the process that holds it, or give another path.",
            ) from error
        except OSError as error:
            raise InvalidRequestError(
                f"The suffix store {self.path} cannot be used: {error}.",
                remedy="Give a file in a folder that you can write to, or none.",
            ) from error

    def append(self, sequence: Sequence[int]) -> None:
        """Add a sequence; never waits for another process, and never fails.

        While the lock is taken sequences are held back, for the next call or :meth:`flush`. After
        an error of the disk, of which a warning tells, nothing more is stored.
        """
        if self._disabled or not sequence:
            return
        self._pending.append(array("I", sequence[-self._max_tokens :]))
        while sum(map(len, self._pending)) > self._max_tokens:
            self._pending.popleft()
        self._write_pending(0)

    def flush(self) -> None:
        """Write what is held back, waiting up to 5 seconds for the lock."""
        if self._pending and not self._write_pending(_FLUSH_WAIT_S):
            logger.warning(
                "%d outputs were not stored: %s was locked for %g s.",
                len(self._pending), self.path, _FLUSH_WAIT_S,
            )  # fmt: skip

    def _write_pending(self, wait_s: float) -> bool:
        """Whether nothing is held back any more."""
        try:
            with self._lock.acquire(timeout=wait_s):
                self._append_locked()
        except filelock.Timeout:
            return False
        except (OSError, DamagedFileError) as error:
            # Drafts are a matter of speed: the requests go on, without a store.
            logger.warning("Nothing more is stored in %s, because %s.", self.path, error)
            self._disabled = True
        self._pending.clear()
        return True

    # ---- with the lock held --------------------------------------------------------------

    def _load_locked(self) -> Iterable[array[int]]:
        kept: deque[array[int]] = deque()
        total = 0
        try:
            with self.path.open("rb") as file:
                if _size(file) == 0:
                    return []
                read_header(file, self._fingerprint)
                start = file.tell()
                end = whole_records_end(file, start)
                file.seek(start)
                for sequence in read_records(file, end, self._vocab_size):
                    kept.append(sequence)
                    total += len(sequence)
                    while total > self._max_tokens:
                        total -= len(kept.popleft())
                if end < _size(file):
                    logger.warning(
                        "The last record of the suffix store %s was not written to its end; "
                        "it is left out.",
                        self.path,
                    )
        except FileNotFoundError:
            return []
        except DamagedFileError as error:
            self._set_aside(error)
            return []
        return kept

    def _set_aside(self, reason: DamagedFileError) -> None:
        aside = _free_name(self.path)
        self.path.replace(aside)
        logger.warning(
            "The suffix store %s is not used, because %s. It is now %s; a new one is begun.",
            self.path, reason, aside.name,
        )  # fmt: skip

    def _append_locked(self) -> None:
        with _open_private(self.path, "r+b") as file:
            if _size(file) == 0:
                write_header(file, self._fingerprint)
                file.flush()
            file_id = read_header(file, self._fingerprint)
            # Other processes may have appended since, or died while they did.
            known_id, known_end = self._whole
            end = whole_records_end(file, known_end if known_id == file_id else file.tell())
            file.seek(end)
            file.truncate()
            for sequence in self._pending:
                write_record(file, sequence)
            self._whole = (file_id, file.tell())
        if self._whole[1] > 2 * 4 * self._max_tokens:
            self._compact()

    def _compact(self) -> None:
        """Rewrite the file with the newest ``max_tokens`` tokens, in one step."""
        kept = self._load_locked()
        scratch = self.path.with_name(f"{self.path.name}.tmp")
        with _open_private(scratch, "wb") as file:
            write_header(file, self._fingerprint)
            for sequence in kept:
                write_record(file, sequence)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(self.path)


def _size(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_size


def _open_private(path: Path, mode: str) -> BinaryIO:
    """Open for reading and writing, made if missing, for nobody but this user."""
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0)
    handle = os.open(path, flags | (os.O_TRUNC if mode == "wb" else 0), 0o600)
    if os.name == "posix":
        os.fchmod(handle, 0o600)  # Another program may have made it before.
    return os.fdopen(handle, mode)  # type: ignore[return-value]


def _free_name(path: Path) -> Path:
    number = 1
    while (aside := path.with_name(f"{path.name}.set-aside-{number}")).exists():
        number += 1
    return aside
