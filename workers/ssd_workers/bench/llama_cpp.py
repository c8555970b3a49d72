"""llama.cpp on the model's own GGUF file, in this process, through the wheel ``xllamacpp``."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from ssd_integrations.errors import EngineError, ModelLoadError
from ssd_workers.bench.decoders import Answer, Messages

_QUIET = -1


class LlamaCppDecoder:
    """llama.cpp's server, greedy, one slot, without its cache of earlier prompts.

    Parameters:
      gguf: the model file.
      threads: for prompts and for single tokens alike.
      context: tokens that prompt and answer have room for.
      lookup: draft with llama.cpp's own n-gram lookup (``ngram-simple`` with its defaults).
    """

    def __init__(
        self, name: str, gguf: Path, *, threads: int, context: int, lookup: bool = False
    ) -> None:
        import xllamacpp

        self.name = name
        params = xllamacpp.CommonParams()
        params.model.path = str(gguf)
        params.n_ctx = context
        params.n_parallel = 1
        params.cpuparams.n_threads = threads
        params.cpuparams_batch.n_threads = threads
        params.sampling.temp = 0.0
        params.verbosity = _QUIET
        if lookup:
            kinds = xllamacpp.common_speculative_type
            params.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
        try:
            self._server: Any = xllamacpp.Server(params)
        except RuntimeError as error:
            raise ModelLoadError(f"llama.cpp cannot load {gguf}: {error}") from error

    def answer(self, messages: Messages, max_tokens: int) -> Answer:
        """Answer once.

        Raises:
          EngineError: llama.cpp refused the request.
        """
        stream = _Stream()
        request = {
            "messages": list(messages),
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "top_k": 1,
            "stream": True,
            "stream_options": {"include_usage": True},
            "cache_prompt": False,
        }
        start, cpu = time.perf_counter(), time.process_time()
        try:
            self._server.handle_chat_completions(request, stream.take)
        except (RuntimeError, ValueError) as error:
            raise EngineError(f"llama.cpp failed: {error}") from error
        end = time.perf_counter()
        cpu_s = time.process_time() - cpu
        usage, timings = stream.finished()
        tokens = int(usage["completion_tokens"])
        return Answer(
            time_to_first_token_s=(stream.first_at or end) - start,
            total_s=end - start,
            tokens=tokens,
            # The prompt's pass never drafts: one token comes of it.
            first_tokens=min(1, tokens) if stream.first_at is not None else tokens,
            steps=max(tokens - 1 - int(timings.get("draft_n_accepted", 0)), 0),
            token_ids=(),
            text="".join(stream.pieces),
            cpu_s=cpu_s,
        )

    def start_round(self) -> None:
        """Its lookup reads the running conversation only."""

    def close(self) -> None:
        """Stop the server and free its copy of the weights."""
        self._server = None


class _Stream:
    """The chunks of one answer, as llama.cpp hands them over."""

    def __init__(self) -> None:
        self.first_at: float | None = None
        self.pieces: list[str] = []
        self._last: dict[str, Any] = {}
        self._error: Any = None
        self._lock = threading.Lock()

    def take(self, chunk: dict[str, Any]) -> None:
        """Called with every chunk, on a thread of llama.cpp's."""
        with self._lock:
            if "error" in chunk or "choices" not in chunk:
                self._error = chunk.get("error", chunk)
                return
            for choice in chunk["choices"]:
                piece = choice.get("delta", {}).get("content")
                if piece:
                    self.first_at = self.first_at or time.perf_counter()
                    self.pieces.append(piece)
            if "usage" in chunk:
                self._last = chunk

    def finished(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Token counts and timings of the last chunk.

        Raises:
          EngineError: llama.cpp reported an error, or ended without a result.
        """
        with self._lock:
            if self._error is not None:
                raise EngineError(f"llama.cpp refused the request: {self._error}")
            if not self._last:
                raise EngineError("llama.cpp ended the answer without a result.")
            return self._last["usage"], self._last.get("timings", {})


def build_facts() -> str:
    """How the wheel was built: the processor abilities that its products use."""
    import xllamacpp

    facts: str = xllamacpp.get_system_info()
    return facts.strip(" |")
