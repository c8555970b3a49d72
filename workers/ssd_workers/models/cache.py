"""The cache folder: where it is, who may build in it, and how a build becomes visible.

Layout::

    <cache_dir>/models/<entry>/     one model; complete once manifest.json is there
    <cache_dir>/models/.tmp-...     a build in progress, or what a killed build left behind
    <cache_dir>/locks/<entry>.lock  held by the one process that builds or removes <entry>
    <cache_dir>/int8/<fingerprint>  quantised weights that the engine derives from a model
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import filelock
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ssd_integrations.cache_folder import cache_dir
from ssd_integrations.errors import DiskFullError, ModelLoadError
from ssd_workers.progress import Progress

MANIFEST_NAME = "manifest.json"
# Bumped when the converter writes something else than before, so that old results are redone.
CONVERSION_VERSION = 1
# What a file system needs beyond the bytes of the files (metadata, block rounding).
_SPACE_MARGIN = 64 * 1024**2
_LOCK_POLL_S = 0.5
_WATCH_S = 0.5


def models_dir() -> Path:
    """The folder that holds one folder per model."""
    return cache_dir() / "models"


def entry_dir(entry: str) -> Path:
    """The folder of one model in the cache."""
    return models_dir() / entry


def int8_dir(fingerprint: str) -> Path:
    """The folder of the quantised weights of the model with this fingerprint."""
    return cache_dir() / "int8" / fingerprint


class Manifest(BaseModel):
    """What a finished model consists of; written last, so its presence means complete.

    ``files`` maps paths relative to the entry's folder to sizes in bytes. ``root`` is the folder
    that transformers loads: relative to the entry for converted models, absolute for hub ones.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    kind: Literal["demo", "gguf", "hub"]
    source: str
    root: str
    fingerprint: str = Field(pattern=r"^[0-9a-z-]{8,64}$")
    gguf_sha256: str | None = None
    gguf_bytes: int | None = None
    files: dict[str, int]
    conversion: int = CONVERSION_VERSION

    def missing_files(self, folder: Path) -> list[str]:
        """The files of this manifest that are absent from ``folder`` or of another size."""
        return [name for name, size in self.files.items() if _size_or_none(folder / name) != size]


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of the entry in ``folder``; None when there is none or it is unreadable."""
    try:
        return Manifest.model_validate_json((folder / MANIFEST_NAME).read_bytes())
    except (OSError, ValidationError):
        return None


def complete_manifest(folder: Path) -> Manifest | None:
    """The manifest in ``folder`` if everything it lists is there and up to date, else None."""
    manifest = read_manifest(folder)
    if manifest is None or manifest.conversion != CONVERSION_VERSION:
        return None
    return None if manifest.missing_files(folder) else manifest


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Put ``manifest`` into ``folder`` in one step that survives a power cut."""
    temporary = folder / f".{MANIFEST_NAME}.tmp"
    with temporary.open("w", encoding="utf-8") as file:
        file.write(manifest.model_dump_json(indent=2))
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(folder / MANIFEST_NAME)
    fsync_folder(folder)


def file_sizes(folder: Path, *, below: Path) -> dict[str, int]:
    """Path relative to ``below`` -> bytes, for every file in ``folder``."""
    return {
        path.relative_to(below).as_posix(): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below ``folder``; what vanishes meanwhile counts as zero."""
    # os.walk, unlike Path.rglob, passes over folders that vanish while it looks.
    return sum(
        _size_or_none(Path(place, name)) or 0
        for place, _, names in os.walk(folder)
        for name in names
    )


def _size_or_none(path: Path) -> int | None:
    try:
        return path.stat().st_size if path.is_file() else None
    except OSError:
        return None


@contextlib.contextmanager
def entry_lock(entry: str, progress: Progress) -> Iterator[None]:
    """Hold the right to build or remove ``entry``, waiting while another process has it.

    The kernel frees the lock when its holder dies, so a killed build never blocks the next one.
    """
    folder = cache_dir() / "locks"
    lock = filelock.FileLock(folder / f"{entry}.lock")
    started, waiting = time.monotonic(), f"waiting for another process that prepares {entry}"
    with disk_errors("locking the model cache", folder):
        folder.mkdir(parents=True, exist_ok=True)
        while not lock.is_locked:
            try:
                lock.acquire(timeout=_LOCK_POLL_S)
            except filelock.Timeout:
                progress(waiting, time.monotonic() - started, 0.0, "s")
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def build_folder(entry: str) -> Iterator[Path]:
    """A fresh folder on the cache's file system, removed at the end with what is left in it.

    Call with the entry's lock held: whatever other builds of this entry left is removed first.
    """
    prefix = f".tmp-{entry}-"
    with disk_errors("creating a folder for the build", models_dir()):
        models_dir().mkdir(parents=True, exist_ok=True)
        remove_stale_builds(entry)
        folder = models_dir() / f"{prefix}{secrets.token_hex(4)}"
        folder.mkdir()
    try:
        yield folder
    finally:
        remove_tree(folder)


def remove_stale_builds(entry: str) -> None:
    """Remove what killed builds of ``entry`` left behind; call with the entry's lock held."""
    prefix = f".tmp-{entry}-"
    if models_dir().is_dir():
        for stale in models_dir().iterdir():
            if stale.name.startswith(prefix):
                remove_tree(stale)


def remove_tree(folder: Path) -> None:
    """Remove ``folder`` (never what a link points to), even while a dying child writes into it."""
    if folder.is_symlink():
        folder.unlink()
        return
    for attempt in range(5):
        try:
            shutil.rmtree(folder)
            return
        except FileNotFoundError:
            return
        except OSError:
            if attempt == 4:
                raise
            time.sleep(0.2 * (attempt + 1))


def publish(folder: Path, target: Path) -> None:
    """Move the finished ``folder`` to ``target`` in one step, after its bytes are on the disk."""
    mode = folder.stat().st_mode & 0o666
    for path in folder.rglob("*"):
        if path.is_file():
            # Some writers make files that only their owner reads; the folder's mode is the umask's.
            path.chmod(mode)
            fsync_file(path)
    fsync_folder(folder)
    remove_tree(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    folder.replace(target)
    fsync_folder(target.parent)


def fsync_file(path: Path) -> None:
    """Wait until the bytes of ``path`` are on the disk."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def fsync_folder(folder: Path) -> None:
    """Wait until the names in ``folder`` are on the disk, where the system can do that."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def watch_growth(folders: Sequence[Path], total: int, progress: Progress) -> Iterator[None]:
    """Report how ``folders`` grow towards ``total`` bytes while something else fills them."""
    stop = threading.Event()
    furthest = 0

    def report() -> None:
        # What is moved from one folder to the other is missing for a moment: never step back.
        nonlocal furthest
        furthest = max(furthest, min(sum(map(folder_bytes, folders)), total))
        progress("download", furthest, total, "B")

    def watch() -> None:
        while not stop.wait(_WATCH_S):
            report()

    report()
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    progress("download", total, total, "B")


def require_space(needed: int, what: str, *, where: Path | None = None) -> None:
    """Fail early when the disk of ``where`` (by default the cache) lacks ``needed`` bytes.

    Raises:
      DiskFullError: says how much is needed and how much is free.
    """
    place = where if where is not None else cache_dir()
    folder = place
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < needed + _SPACE_MARGIN:
        raise DiskFullError(
            f"{what} needs {format_bytes(needed + _SPACE_MARGIN)} of free space in {place}, "
            f"but only {format_bytes(free)} is free."
        )


@contextlib.contextmanager
def disk_errors(doing: str, where: Path) -> Iterator[None]:
    """Turn the operating system's disk errors into this project's errors.

    Raises:
      DiskFullError: the disk or the quota is full.
      ModelLoadError: the folder cannot be written or read.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFullError(f"The disk became full while {doing} ({where}).") from error
        raise ModelLoadError(
            f"{doing[0].upper()}{doing[1:]} failed: {error}.",
            remedy="Check the permissions of the folder, or set SSD_CACHE_DIR to another one.",
        ) from error


def format_bytes(count: float) -> str:
    """``count`` for people: decimal units, as disk tools print them."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit in ("B", "kB") else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
