"""A user's GGUF file: converted once, then kept in the cache under the file's fingerprint."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from ssd_workers.models.cache import (
    CONVERSION_VERSION,
    Manifest,
    build_folder,
    complete_manifest,
    disk_errors,
    entry_dir,
    entry_lock,
    file_sizes,
    models_dir,
    publish,
    read_manifest,
    remove_tree,
    require_space,
    write_manifest,
)
from ssd_workers.models.convert import convert_gguf
from ssd_workers.models.gguf import read_header, sha256_of
from ssd_workers.progress import Progress


def ensure_gguf(path: Path, *, progress: Progress) -> Manifest:
    """The manifest of the converted GGUF file ``path``, which is converted if it is not yet.

    Raises:
      ModelNotFoundError: not a GGUF file.
      UnsupportedModelError: an architecture that transformers cannot read from GGUF.
      ModelLoadError: the file is damaged, or memory ran out.
      DiskFullError: too little space, found up front or on the way.
    """
    header = read_header(path)
    path = path.resolve()
    state = path.stat()
    identity = f"{path}\0{state.st_size}\0{state.st_mtime_ns}\0{CONVERSION_VERSION}"
    fingerprint = hashlib.sha256(identity.encode()).hexdigest()[:32]
    entry = f"gguf-{_slug(path.stem)}-{fingerprint[:12]}"
    folder = entry_dir(entry)
    found = complete_manifest(folder)
    if found is not None:
        return found
    with entry_lock(entry, progress):
        found = complete_manifest(folder)
        if found is not None:
            return found
        require_space(header.float32_bytes, f"Converting {path.name}")
        with build_folder(entry) as scratch, disk_errors("converting the model", folder):
            convert_gguf(path, scratch, header, progress=progress)
            digest = sha256_of(path, lambda done: progress("verify", done, state.st_size, "B"))
            manifest = Manifest(
                name=entry,
                kind="gguf",
                source=str(path),
                root=".",
                fingerprint=fingerprint,
                gguf_sha256=digest,
                gguf_bytes=state.st_size,
                files=file_sizes(scratch, below=scratch),
            )
            write_manifest(scratch, manifest)
            publish(scratch, folder)
    _remove_older(path, entry, progress)
    return manifest


def _remove_older(path: Path, entry: str, progress: Progress) -> None:
    """Remove what was converted from earlier contents of the same file."""
    for folder in models_dir().iterdir():
        manifest = read_manifest(folder)
        if manifest is not None and manifest.source == str(path) and folder.name != entry:
            with entry_lock(folder.name, progress):
                remove_tree(folder)


def _slug(stem: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem)[:60].strip("-.") or "model"
