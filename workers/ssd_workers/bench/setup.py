"""From the options of a run to decoders that are loaded, and to its conditions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ssd_integrations.backends import open_backend
from ssd_integrations.backends.base import Backend
from ssd_integrations.backends.local import LocalBackend
from ssd_integrations.errors import InvalidRequestError
from ssd_integrations.protocol import build_speculation
from ssd_workers.bench.decoders import Decoder, DrafterSets, EngineDecoder
from ssd_workers.bench.llama_cpp import LlamaCppDecoder
from ssd_workers.bench.modes import Mode
from ssd_workers.bench.transformers_decoder import TransformersDecoder, TransformersModel
from ssd_workers.engine.config import build_engine_config
from ssd_workers.models.store import ModelSource, gguf_path, resolve_model
from ssd_workers.progress import Progress, no_progress

PROMPT_LOOKUP_TOKENS = 5
_LLAMA_CONTEXT = 8192
_DEFAULT_SEQUENCES = 8

# Rough needs, in bytes per parameter: int8 weights packed for the processor, the embedding in
# float32, and what decoding works with; and some room for everything else.
_INT8_BYTES = 1.5
_ROOM = 1_000_000_000


@dataclass(frozen=True)
class Options:
    """What is to be compared. ``None`` leaves a choice to the engine."""

    model: str
    modes: tuple[Mode, ...]
    draft_model: str | None = None
    dtype: str | None = None
    device: str | None = None
    decode_step: str | None = None
    num_threads: int | None = None
    num_draft_tokens: int | None = None
    requests: int = 1

    def engine_options(self) -> dict[str, Any]:
        """Keyword arguments of a local engine."""
        wanted = {
            "draft_model": self.draft_model,
            "dtype": self.dtype,
            "device": self.device,
            "decode_step": self.decode_step,
            "num_threads": self.num_threads,
            "num_draft_tokens": self.num_draft_tokens,
            "max_num_seqs": max(self.requests, _DEFAULT_SEQUENCES),
            # A mode must not find the prompt in memory that another one has just read.
            "prefix_cache_mib": 0,
        }
        return {name: value for name, value in wanted.items() if value is not None}

    def check(self) -> None:
        """Refuse what can be seen to fail before anything is loaded.

        Raises:
          InvalidRequestError: an engine option is out of bounds, ``requests`` are to run at once
            in modes that cannot, or a mode would be helped by the answers of another one.
        """
        build_engine_config(model=self.model, **self.engine_options())
        remembering = [mode.name for mode in self.modes if mode.remembers]
        if remembering and not issubclass(LocalBackend, DrafterSets):
            raise InvalidRequestError(
                f"The mode {remembering[0]!r} cannot be measured with this engine: it would find "
                "the answers of the other modes and of earlier rounds in its memory.",
                remedy="Leave the mode out.",
            )
        if self.requests > 1 and not self.concurrent():
            raise InvalidRequestError(
                f"--concurrency {self.requests} needs a mode of this project's engine.",
                remedy="Add ar, ngram or auto to --modes.",
            )

    def concurrent(self) -> list[str]:
        """The names of the modes that also answer several requests at once."""
        return [mode.name for mode in self.modes if mode.is_ours] if self.requests > 1 else []

    def uses(self, runtime: str) -> bool:
        """Whether a mode of that runtime takes part."""
        return any(mode.runtime == runtime for mode in self.modes)


@dataclass
class Bench:
    """Loaded decoders in the order of their modes, and what they run on."""

    decoders: list[Decoder]
    facts: dict[str, Any] = field(default_factory=dict)


@contextmanager
def open_bench(options: Options, progress: Progress = no_progress) -> Iterator[Bench]:
    """Find the models, check that they fit into memory, load them, and free them at the end.

    Raises:
      ModelNotFoundError: a model is not there, or llama.cpp is to run one without a GGUF file.
      InvalidRequestError: there is too little memory for all modes together.
      SSDError: loading failed.
    """
    import torch

    source = resolve_model(options.model, progress=progress)
    draft = None
    if options.draft_model is not None:
        draft = resolve_model(options.draft_model, progress=progress)
    gguf = gguf_path(options.model) if options.uses("llama-cpp") else None
    _check_memory(options, source, gguf)
    if options.num_threads is not None:
        torch.set_num_threads(options.num_threads)
    with ExitStack() as stack:
        loader = _Loader(options, source, draft, gguf, progress, stack)
        decoders = [stack.enter_context(closing(loader.decoder(m))) for m in options.modes]
        yield Bench(decoders, loader.facts())


@dataclass
class _Loader:
    """Loads every model once, however many modes use it."""

    options: Options
    source: ModelSource
    draft: ModelSource | None
    gguf: Path | None
    progress: Progress
    stack: ExitStack

    def decoder(self, mode: Mode) -> Decoder:
        """The decoder for ``mode``, loaded."""
        if mode.runtime == "transformers":
            return self._transformers(mode)
        if mode.runtime == "llama-cpp":
            return self._llama_cpp(mode)
        backend = self.float32_engine if mode.float32 else self.engine
        speculation = build_speculation(mode=mode.speculation)
        return EngineDecoder(mode.name, backend, self.options.model, speculation)

    @cached_property
    def engine(self) -> Backend:
        """Our engine as the options ask for it."""
        return self._open({})

    @cached_property
    def float32_engine(self) -> Backend:
        """Our engine without quantisation and without a draft model."""
        return self._open({"dtype": "float32", "draft_model": None})

    def facts(self) -> dict[str, Any]:
        """What was loaded, and how."""
        import torch

        facts: dict[str, Any] = {
            "threads": torch.get_num_threads(),
            "model": self.options.model,
            "model_fingerprint": self.source.fingerprint,
            "draft_model": self.options.draft_model,
            "decode_step": self.options.decode_step or "eager",
        }
        if "engine" in vars(self):
            (info,) = self.engine.models()
            facts |= {"dtype": info.dtype, "device": info.device}
        if self.options.uses("transformers"):
            facts["transformers_dtype"] = self.library.dtype
            facts["prompt_lookup_num_tokens"] = PROMPT_LOOKUP_TOKENS
        if self.gguf is not None:
            from ssd_workers.bench.llama_cpp import build_facts

            facts |= {"gguf": self.gguf.name, "llama_cpp_build": build_facts()}
        return facts

    @cached_property
    def library(self) -> TransformersModel:
        """The target as transformers loads it."""
        return self._library(self.source)

    @cached_property
    def library_draft(self) -> TransformersModel:
        """The draft model as transformers loads it."""
        assert self.draft is not None  # parse_modes has seen to it
        return self._library(self.draft)

    def _open(self, changes: dict[str, Any]) -> Backend:
        wanted = {**self.options.engine_options(), **changes}
        backend = open_backend(model=self.options.model, progress=self.progress, **wanted)
        self.stack.enter_context(closing(backend))
        backend.models()
        return backend

    def _library(self, source: ModelSource) -> TransformersModel:
        device = _device(self.options.device)
        dtype = "float32" if device == "cpu" else "bfloat16"
        library = TransformersModel(source.path, device, dtype)
        self.progress("load model for transformers", 0, 1, "models")
        _ = library.model
        self.progress("load model for transformers", 1, 1, "models")
        return library

    def _transformers(self, mode: Mode) -> Decoder:
        return TransformersDecoder(
            mode.name,
            self.library,
            prompt_lookup=PROMPT_LOOKUP_TOKENS if mode.lookup else None,
            assistant=self.library_draft if mode.needs_draft_model else None,
        )

    def _llama_cpp(self, mode: Mode) -> Decoder:
        import torch

        assert self.gguf is not None
        self.progress("load model for llama.cpp", 0, 1, "models")
        decoder = LlamaCppDecoder(
            mode.name,
            self.gguf,
            threads=self.options.num_threads or torch.get_num_threads(),
            context=_LLAMA_CONTEXT,
            lookup=mode.lookup,
        )
        self.progress("load model for llama.cpp", 1, 1, "models")
        return decoder


def _device(wanted: str | None) -> str:
    import torch

    if wanted in (None, "auto"):
        return "cuda" if torch.cuda.is_available() else "cpu"
    assert wanted is not None
    return wanted


def _check_memory(options: Options, source: ModelSource, gguf: Path | None) -> None:
    if _device(options.device) != "cpu":
        return
    import psutil

    parameters = _parameters(Path(source.path))
    needs = {"room to work": float(_ROOM)}
    if options.uses("transformers"):
        needs["transformers"] = 4.0 * parameters
    if any(mode.float32 for mode in options.modes):
        needs["ar-float32"] = 4.0 * parameters
    if any(mode.is_ours and not mode.float32 for mode in options.modes):
        quantised = options.dtype == "int8" or (options.dtype is None and source.name == "demo")
        needs["this engine"] = (_INT8_BYTES if quantised else 4.0) * parameters
    if gguf is not None:
        servers = sum(mode.runtime == "llama-cpp" for mode in options.modes)
        needs["llama.cpp"] = float(gguf.stat().st_size * servers)
    available = psutil.virtual_memory().available
    if sum(needs.values()) > available:
        parts = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in needs.items())
        raise InvalidRequestError(
            f"These modes need about {sum(needs.values()) / 1e9:.1f} GB of memory together "
            f"({parts}), and {available / 1e9:.1f} GB are available.",
            remedy="Leave some modes out, or free memory.",
        )


def _parameters(folder: Path) -> float:
    """About how many parameters the weights in ``folder`` hold."""
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    dtype = config.get("dtype") or config.get("torch_dtype")
    return size / (4 if dtype in (None, "float32") else 2)
