"""From the name of a model to a folder that can be loaded.

A name is, in this order: ``demo``; a folder with ``config.json``; a GGUF file; the name of a model
in the cache; the id of a model on the Hugging Face hub. To load a folder that is called ``demo``,
write ``./demo``.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from ssd_integrations.cache_folder import cache_dir
from ssd_integrations.errors import InvalidRequestError, ModelLoadError, ModelNotFoundError
from ssd_workers.models import hub
from ssd_workers.models.cache import (
    Manifest,
    complete_manifest,
    disk_errors,
    entry_dir,
    models_dir,
    write_manifest,
)
from ssd_workers.models.demo import DEMO, GGUF_NAME, ensure_demo
from ssd_workers.models.gguf_store import ensure_gguf
from ssd_workers.progress import Progress, no_progress

__all__ = ["ModelSource", "cache_dir", "gguf_path", "pull_model", "resolve_model"]

_ENTRY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_POSSIBLE = (
    "Give demo, a folder with config.json, a GGUF file, a name from `ssd models list`, "
    "or a hub id such as Qwen/Qwen2.5-0.5B-Instruct."
)
# Files beside the weights that change what a model does.
_SETTINGS = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True)
class ModelSource:
    """A model that is ready to be loaded.

    ``name`` is what was asked for, ``path`` the folder to load, ``is_local`` whether that is a
    folder on this machine, and ``fingerprint`` a key for caches: it changes when the weights do.
    """

    name: str
    path: str
    is_local: bool
    fingerprint: str


def resolve_model(name: str, *, progress: Progress = no_progress) -> ModelSource:
    """Find the model called ``name``, fetching or converting it when that is still to be done.

    Code that comes with a model is never run.

    Raises:
      ModelNotFoundError: there is no such model; comes quickly, before anything is loaded.
      DownloadError: fetching it failed.
      DiskFullError: there is too little space for it.
      ModelLoadError: it is damaged, or could not be converted.
      UnsupportedModelError: a GGUF file of an architecture that cannot be converted.
    """
    return _resolve(name, from_dir=None, refresh=False, progress=progress)


def pull_model(
    name: str, *, from_dir: Path | None = None, progress: Progress = no_progress
) -> ModelSource:
    """Like :func:`resolve_model`, but a hub id is brought up to date even if it is cached.

    ``from_dir`` is a folder with the demo model's packages, for machines without a network.

    Raises:
      InvalidRequestError: ``from_dir`` was given for another model than the demo model.
    """
    if from_dir is not None and name != DEMO.name:
        raise InvalidRequestError(
            f"--from-dir holds the packages of the model {DEMO.name!r}, but the model is {name!r}.",
            remedy=f"Leave it out, or pull {DEMO.name!r}.",
        )
    return _resolve(name, from_dir=from_dir, refresh=True, progress=progress)


def gguf_path(name: str) -> Path:
    """The GGUF file of the model ``name``, which must be complete in the cache or a GGUF file.

    Raises:
      ModelNotFoundError: there is no such model, or it has no GGUF file.
    """
    manifest = complete_manifest(entry_dir(name)) if _ENTRY.fullmatch(name) else None
    if manifest is not None and manifest.kind == "demo":
        return entry_dir(name) / GGUF_NAME
    path = Path(manifest.source if manifest is not None else name).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return path
    raise ModelNotFoundError(
        f"There is no GGUF file of model {name!r}.", remedy=f"Run: ssd models pull {name}"
    )


def _resolve(name: str, *, from_dir: Path | None, refresh: bool, progress: Progress) -> ModelSource:
    if not name.strip() or "\0" in name:
        raise ModelNotFoundError(f"{name!r} is no model name.", remedy=_POSSIBLE)
    if name == DEMO.name:
        return _source(name, ensure_demo(progress=progress, from_dir=from_dir))
    path = Path(name).expanduser()
    if path.is_dir():
        return _folder(name, path)
    if path.exists():
        return _source(name, ensure_gguf(path, progress=progress))
    if _ENTRY.fullmatch(name):
        manifest = complete_manifest(entry_dir(name))
        if manifest is not None and manifest.kind == "gguf":
            return _source(name, manifest)
    if not _HUB_ID.fullmatch(name) or name.endswith(".gguf"):
        raise ModelNotFoundError(
            f"There is no file or folder {name!r}.{_hint(name)}", remedy=_POSSIBLE
        )
    return _hub_model(name, refresh=refresh, progress=progress)


def _source(name: str, manifest: Manifest) -> ModelSource:
    folder = entry_dir(manifest.name) / manifest.root
    return ModelSource(name, str(folder), True, manifest.fingerprint)


def _folder(name: str, path: Path) -> ModelSource:
    if not (path / "config.json").is_file():
        found = sorted(item.name for item in path.iterdir())
        ggufs = [item for item in found if item.endswith(".gguf")]
        if ggufs:
            raise ModelNotFoundError(
                f"The folder {name!r} has no config.json, but GGUF files.",
                remedy=f"Give the file itself: {path / ggufs[0]}",
            )
        what = f"has no config.json (it holds {', '.join(found[:5])})" if found else "is empty"
        raise ModelNotFoundError(f"The folder {name!r} {what}.", remedy=_POSSIBLE)
    missing = hub.missing_weights(path)
    if missing:
        raise ModelLoadError(
            f"The folder {name!r} lacks weights: {', '.join(missing[:5])}.",
            remedy="Save or copy the model again, with its weights.",
        )
    return ModelSource(name, str(path), True, _folder_fingerprint(path))


def _folder_fingerprint(path: Path) -> str:
    digest = hashlib.sha256(str(path.resolve()).encode())
    weights = [*path.glob("*.safetensors"), *path.glob("*.bin"), *path.glob("*.index.json")]
    for file in sorted([*weights, *(path / name for name in _SETTINGS)]):
        if file.is_file():
            state = file.stat()
            digest.update(f"{file.name}\0{state.st_size}\0{state.st_mtime_ns}\0".encode())
    return digest.hexdigest()[:32]


def _hub_model(repo: str, *, refresh: bool, progress: Progress) -> ModelSource:
    folder = None if refresh else hub.cached_model(repo)
    if folder is None:
        try:
            folder = hub.newest_model(repo, progress=progress)
        except ModelNotFoundError as error:
            default = error.remedy == ModelNotFoundError.default_remedy
            raise ModelNotFoundError(
                f"{error.message}{_hint(repo)}", remedy=_POSSIBLE if default else error.remedy
            ) from error
        _record(repo, folder)
    return ModelSource(repo, str(folder), True, _hub_fingerprint(repo, folder))


def _hub_fingerprint(repo: str, folder: Path) -> str:
    # The folder of a snapshot is named after its commit.
    return hashlib.sha256(f"{repo}\0{folder.name}".encode()).hexdigest()[:32]


def _record(repo: str, folder: Path) -> None:
    """Note a fetched hub model, so that it appears in the list; the weights stay with the hub's."""
    entry = entry_dir(f"hub--{repo.replace('/', '--')}")
    manifest = Manifest(
        name=entry.name,
        kind="hub",
        source=repo,
        root=str(folder),
        fingerprint=_hub_fingerprint(repo, folder),
        files={},
    )
    with disk_errors("noting the model in the cache", entry):
        entry.mkdir(parents=True, exist_ok=True)
        write_manifest(entry, manifest)


def _hint(name: str) -> str:
    known = [DEMO.name]
    if models_dir().is_dir():
        known += [item.name for item in models_dir().iterdir() if not item.name.startswith(".")]
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    return f" Did you mean {close[0]!r}?" if close else ""
