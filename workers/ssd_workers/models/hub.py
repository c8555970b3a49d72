"""Models and files from the Hugging Face hub, through huggingface_hub's own client and cache.

Code from a repository is never run: only weights, configuration and tokenizer files are fetched.
"""

from __future__ import annotations

import json
import os
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ssd_integrations.errors import DownloadError, ModelLoadError, ModelNotFoundError
from ssd_workers.models.cache import disk_errors, require_space, watch_growth
from ssd_workers.progress import Progress

# A hub that does not answer within this is treated as away: nobody waits long for a typo.
# The variable is huggingface_hub's own, for networks that need more.
_PATIENCE = "HF_HUB_ETAG_TIMEOUT"
_DEFAULT_PATIENCE_S = 2.0
_SETTINGS = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")


def cached_model(repo: str) -> Path | None:
    """The whole snapshot of ``repo`` in this machine's hub cache, looked up without any network."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(repo, "config.json")
    except HFValidationError as error:
        raise ModelNotFoundError(f"{repo!r} is no model: {error}") from error
    if not isinstance(config, str):
        return None
    folder = Path(config).parent
    return folder if not missing_weights(folder) else None


def missing_weights(folder: Path) -> list[str]:
    """What ``folder`` lacks to hold whole weights; empty when nothing is missing."""
    for index in (*folder.glob("*.safetensors.index.json"), *folder.glob("*.bin.index.json")):
        try:
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError) as error:
            raise ModelLoadError(f"{str(index)!r} is damaged: {error!r}.") from error
        return sorted(shard for shard in shards if not (folder / shard).is_file())
    if any(folder.glob("*.safetensors")) or any(folder.glob("pytorch_model*.bin")):
        return []
    return ["model.safetensors"]


def newest_model(repo: str, *, progress: Progress) -> Path:
    """Fetch ``repo`` into the hub's cache and give the folder of its newest snapshot.

    Where the hub is away, a whole snapshot in the cache will do; the progress says so.

    Raises:
      ModelNotFoundError: unknown, private or gated, not a transformers model, or the hub is away.
      DownloadError: the transfer failed on the way.
      DiskFullError: too little space.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import HF_HUB_CACHE

    answer = _ask_hub(repo)
    cached = cached_model(repo) if _is_away(answer) else None
    if cached is not None:
        progress(f"the hub is away, taking {repo} from the cache", 1, 1, "")
        return cached
    info = _info_in(answer, repo)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    wanted = _wanted_files(repo, sizes)
    total = sum(sizes[name] for name in wanted)
    blobs = Path(HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}" / "blobs"
    require_space(total, f"Model {repo!r}", where=Path(HF_HUB_CACHE))
    with watch_growth((blobs,), total, progress), _transfer_errors(repo, blobs):
        folder = snapshot_download(
            repo, revision=info.sha, allow_patterns=wanted, tqdm_class=_silent_bars()
        )
        # The commit was named above, so that nothing changes on the way; note it as the newest.
        reference = blobs.parent / "refs" / "main"
        reference.parent.mkdir(parents=True, exist_ok=True)
        reference.write_text(str(info.sha), encoding="utf-8")
    return Path(folder)


def download_file(repo: str, filename: str, folder: Path, *, size: int, progress: Progress) -> Path:
    """Fetch one file of ``repo`` into ``folder``; ``size`` in bytes is for the progress.

    Raises:
      DownloadError: the hub is away or does not have the file.
      DiskFullError: the disk became full.
    """
    from huggingface_hub import hf_hub_download

    answer = _ask_hub(repo)
    if isinstance(answer, Exception):
        raise DownloadError(f"For {repo!r}, {_why_away(answer)}.") from answer
    with watch_growth((folder,), size, progress), _transfer_errors(repo, folder):
        path = hf_hub_download(repo, filename, local_dir=folder, tqdm_class=_silent_bars())
    return Path(path)


def _wanted_files(repo: str, sizes: dict[str, int]) -> list[str]:
    top = [name for name in sizes if "/" not in name]
    weights = [name for name in top if name.endswith(".safetensors")]
    if not weights:
        weights = [name for name in top if Path(name).match("pytorch_model*.bin")]
    if "config.json" not in top or not weights:
        ggufs = [name for name in sizes if name.endswith(".gguf")]
        if ggufs:
            raise ModelNotFoundError(
                f"{repo!r} on the hub holds GGUF files only: {', '.join(ggufs[:5])}.",
                remedy=f"Fetch one (hf download {repo} FILE) and give its path as the model.",
            )
        raise ModelNotFoundError(
            f"{repo!r} on the hub is not a transformers model: it lacks config.json or weights."
        )
    settings = [name for name in top if any(Path(name).match(p) for p in _SETTINGS)]
    return settings + weights


def _ask_hub(repo: str) -> Any:
    """What the hub says about ``repo``, or the exception that asking ended with; quickly."""
    patience = _patience()
    answers: queue.Queue[Any] = queue.Queue()

    # On a thread of its own, because looking up a host name cannot be given a time limit.
    def ask() -> None:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HFValidationError

        try:
            answers.put(HfApi().model_info(repo, timeout=patience, files_metadata=True))
        except (_network_error(), HFValidationError, OSError) as error:
            answers.put(error)

    threading.Thread(target=ask, daemon=True).start()
    try:
        return answers.get(timeout=patience + 0.5)
    except queue.Empty:
        return TimeoutError(f"no answer within {patience:g} s ({_PATIENCE})")


def _info_in(answer: Any, repo: str) -> Any:
    if isinstance(answer, Exception):
        raise _not_found(repo, answer) from answer
    return answer


def _is_away(answer: Any) -> bool:
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    if isinstance(answer, HfHubHTTPError):
        return bool(answer.response.status_code >= 500)
    return isinstance(answer, Exception) and not isinstance(answer, HFValidationError)


def _patience() -> float:
    try:
        return float(os.environ.get(_PATIENCE, _DEFAULT_PATIENCE_S))
    except ValueError:
        return _DEFAULT_PATIENCE_S


def _not_found(repo: str, error: Exception) -> ModelNotFoundError:
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
    )

    if isinstance(error, GatedRepoError):
        return ModelNotFoundError(
            f"Model {repo!r} is gated on the hub.",
            remedy=f"Accept its terms at https://huggingface.co/{repo} and run: hf auth login",
        )
    if isinstance(error, RepositoryNotFoundError):
        return ModelNotFoundError(
            f"There is no model {repo!r}: no such folder or file, and the hub knows no such id "
            "(or it is private)."
        )
    if isinstance(error, HFValidationError):
        return ModelNotFoundError(f"{repo!r} is no model: {error}")
    return ModelNotFoundError(
        f"There is no model {repo!r}: no such folder or file, it is not in the hub's cache on this "
        f"machine, and {_why_away(error)}."
    )


def _why_away(error: Exception) -> str:
    from huggingface_hub.errors import OfflineModeIsEnabled

    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set"
    return f"the hub cannot be reached ({type(error).__name__}: {_first_line(error)})"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]


@contextmanager
def _transfer_errors(repo: str, folder: Path) -> Iterator[None]:
    from huggingface_hub.errors import LocalEntryNotFoundError

    with disk_errors(f"downloading {repo}", folder):
        try:
            yield
        # Some of these are OSErrors too, and none of them is about the disk.
        except (_network_error(), LocalEntryNotFoundError, ConnectionError) as error:
            raise DownloadError(
                f"Downloading {repo!r} from the hub failed: {_first_line(error)}",
                remedy="Try again: what has arrived is kept and the rest is fetched.",
            ) from error


def _network_error() -> type[Exception]:
    """The root of what the hub's HTTP client raises; which client that is varies by release."""
    from huggingface_hub.errors import HfHubHTTPError

    return next(kind for kind in HfHubHTTPError.__mro__ if kind.__name__ == "HTTPError")


def _silent_bars() -> type[Any]:
    """A bar class that draws nothing, in place of the hub's own bars."""
    from huggingface_hub import utils

    bars: Any = utils.tqdm  # type: ignore[attr-defined]

    class Silent(bars):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": True})

    return Silent
