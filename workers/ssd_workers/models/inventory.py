"""What is in the cache: listing, finding and removing models."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ssd_integrations.cache_folder import cache_dir
from ssd_integrations.errors import ModelNotFoundError
from ssd_workers.models.cache import (
    Manifest,
    complete_manifest,
    disk_errors,
    entry_dir,
    entry_lock,
    folder_bytes,
    int8_dir,
    models_dir,
    read_manifest,
    remove_stale_builds,
    remove_tree,
)
from ssd_workers.models.demo import DEMO, GGUF_NAME, fingerprint_of
from ssd_workers.models.gguf import sha256_of
from ssd_workers.progress import Progress, no_progress

Kind = Literal["demo", "gguf", "hub", "unknown"]
State = Literal["complete", "partial"]


@dataclass(frozen=True)
class StoredModel:
    """One model of the cache.

    ``size`` is in bytes: the model's own files, plus ``derived`` for the quantised weights that
    the engine keeps for it. ``path`` is the folder to load, once the state is complete.
    """

    name: str
    kind: Kind
    source: str
    size: int
    derived: int
    state: State
    path: Path


def list_models() -> list[StoredModel]:
    """Every model in the cache, whole or not; what is being built right now is not one."""
    if not models_dir().is_dir():
        return []
    folders = sorted(item for item in models_dir().iterdir() if not item.name.startswith("."))
    return [_describe(folder) for folder in folders if folder.is_dir()]


def find_model(name: str) -> StoredModel:
    """The cached model of this name, or the one made from the file or hub id ``name``.

    Raises:
      ModelNotFoundError: names what there is.
    """
    models = list_models()
    wanted = {name, str(Path(name).expanduser().resolve())}
    for model in models:
        if model.name in wanted or model.source in wanted:
            return model
    names = ", ".join(model.name for model in models)
    content = f"it holds {names}" if names else "it is empty"
    raise ModelNotFoundError(
        f"There is no model {name!r} in the cache {cache_dir()}; {content}.",
        remedy=f"See `ssd models list`, or fetch it: ssd models pull {shlex.quote(name)}",
    )


def verify_model(model: StoredModel, *, progress: Progress = no_progress) -> bool:
    """Whether the GGUF file of ``model`` still has the sha256 of its manifest, if it has one."""
    manifest = complete_manifest(entry_dir(model.name))
    if manifest is None:
        return False
    kept = entry_dir(model.name) / GGUF_NAME
    if manifest.gguf_sha256 is None or not kept.is_file():
        return True
    size = kept.stat().st_size
    digest = sha256_of(kept, lambda done: progress(f"verify {model.name}", done, size, "B"))
    return digest == manifest.gguf_sha256


def remove_model(name: str, *, progress: Progress = no_progress) -> StoredModel:
    """Remove a model and what the engine derived from it; only ever inside the cache folder.

    The weights of a hub model stay in the hub's own cache, which other programs use too.

    Raises:
      ModelNotFoundError: the cache has no such model.
      ModelLoadError: the files cannot be removed.
    """
    # The folder comes from the listing, never from the name, so no name leads outside.
    model = find_model(name)
    folder = entry_dir(model.name)
    with entry_lock(model.name, progress), disk_errors("removing the model", folder):
        derived = _derived_dir(model.name, read_manifest(folder))
        # First the manifest: a removal that is interrupted leaves a partial model, not a wrong one.
        if not folder.is_symlink():
            (folder / "manifest.json").unlink(missing_ok=True)
        remove_tree(folder)
        remove_stale_builds(model.name)
        if derived is not None:
            remove_tree(derived)
    return model


def _describe(folder: Path) -> StoredModel:
    manifest = read_manifest(folder)
    whole = complete_manifest(folder) is not None
    if manifest is not None and manifest.kind == "hub":
        whole = whole and Path(manifest.root).is_dir()
    derived = _derived_dir(folder.name, manifest)
    return StoredModel(
        name=folder.name,
        kind=_kind(folder.name, manifest),
        source=_source(folder.name, manifest),
        size=_size(folder, manifest),
        derived=folder_bytes(derived) if derived is not None else 0,
        state="complete" if whole else "partial",
        path=(folder / manifest.root) if manifest is not None else folder,
    )


def _size(folder: Path, manifest: Manifest | None) -> int:
    if manifest is not None and manifest.kind == "hub":
        return folder_bytes(Path(manifest.root))
    return folder_bytes(folder)


def _kind(name: str, manifest: Manifest | None) -> Kind:
    if manifest is not None:
        return manifest.kind
    return "demo" if name == DEMO.name else "unknown"


def _source(name: str, manifest: Manifest | None) -> str:
    if manifest is not None:
        return manifest.source
    return DEMO.title if name == DEMO.name else ""


def _derived_dir(name: str, manifest: Manifest | None) -> Path | None:
    """Where the engine keeps the quantised weights of this model."""
    if manifest is not None:
        fingerprint = manifest.fingerprint
    elif name == DEMO.name:
        fingerprint = fingerprint_of(DEMO)
    else:
        return None
    return int8_dir(fingerprint)
