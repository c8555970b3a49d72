"""transformers' own ``generate``: plain, with prompt lookup, with an assistant model."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ssd_integrations.errors import EngineError, ModelLoadError
from ssd_workers.bench.decoders import Answer, Messages
from ssd_workers.engine.openmp import release_threads

# What generate raises when a prompt or a pair of models does not suit it, or memory runs out.
_FAILURES = (RuntimeError, ValueError, IndexError, KeyError, TypeError, MemoryError)


@dataclass
class TransformersModel:
    """The model and tokenizer in a folder, loaded once for all the decoders that use them.

    In float32 with transformers' default attention on a CPU, elsewhere in ``dtype``.
    """

    folder: str
    device: str = "cpu"
    dtype: str = "float32"

    @cached_property
    def model(self) -> Any:
        """Loads the weights.

        Raises:
          ModelLoadError: transformers cannot load the folder.
        """
        import torch
        from transformers import AutoModelForCausalLM

        from ssd_workers.engine.quiet import no_foreign_bars

        try:
            with no_foreign_bars():
                model = AutoModelForCausalLM.from_pretrained(
                    self.folder, dtype=getattr(torch, self.dtype), trust_remote_code=False
                )
            return model.to(self.device).eval()
        except (OSError, RuntimeError, ValueError, KeyError) as error:
            raise ModelLoadError(f"transformers cannot load {self.folder}: {error}") from error

    @cached_property
    def tokenizer(self) -> Any:
        """Loads the tokenizer."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.folder, trust_remote_code=False)


class TransformersDecoder:
    """``generate``, greedy.

    Parameters:
      prompt_lookup: the longest draft looked up in the prompt; None does without.
      assistant: a draft model for assisted generation; None does without.
    """

    def __init__(
        self,
        name: str,
        target: TransformersModel,
        *,
        prompt_lookup: int | None = None,
        assistant: TransformersModel | None = None,
    ) -> None:
        self.name = name
        self._target = target
        self._prompt_lookup = prompt_lookup
        self._assistant = assistant

    def answer(self, messages: Messages, max_tokens: int) -> Answer:
        """Answer once.

        Raises:
          EngineError: ``generate`` failed.
        """
        try:
            return self._answer(messages, max_tokens)
        except _FAILURES as error:
            raise EngineError(
                f"transformers' generate failed: {type(error).__name__}: {error}"
            ) from error
        finally:
            # Else its team of threads would slow the other decoders down, and theirs this one.
            release_threads()

    def _answer(self, messages: Messages, max_tokens: int) -> Answer:
        import torch
        from transformers import GenerationConfig

        model, tokenizer = self._target.model, self._target.tokenizer
        own = model.generation_config
        greedy = GenerationConfig(
            do_sample=False,
            max_new_tokens=max_tokens,
            eos_token_id=own.eos_token_id,
            pad_token_id=own.pad_token_id,
            prompt_lookup_num_tokens=self._prompt_lookup,
        )
        extra = {} if self._assistant is None else {"assistant_model": self._assistant.model}
        clock = _Clock()
        start, cpu = time.perf_counter(), time.process_time()
        inputs = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).to(model.device)
        with torch.inference_mode(), _no_advice():
            output = model.generate(**inputs, generation_config=greedy, streamer=clock, **extra)
        ids = output[0, inputs["input_ids"].shape[1] :].tolist()
        text = tokenizer.decode(ids, skip_special_tokens=True)
        end = time.perf_counter()
        return Answer(
            time_to_first_token_s=(clock.first_at or end) - start,
            total_s=end - start,
            tokens=len(ids),
            first_tokens=min(clock.sizes[0], len(ids)) if clock.sizes else len(ids),
            steps=max(len(clock.sizes) - 1, 0),
            token_ids=tuple(ids),
            text=text,
            cpu_s=time.process_time() - cpu,
        )

    def start_round(self) -> None:
        """Nothing is learnt here."""

    def close(self) -> None:
        """The models are shared."""


@contextmanager
def _no_advice() -> Iterator[None]:
    """Without transformers' remarks on how it is called: they would break the progress bar."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


@dataclass
class _Clock:
    """A streamer for ``generate``: when the first new token comes, and how many at a time."""

    first_at: float | None = None
    sizes: list[int] = field(default_factory=list)
    _prompt_seen: bool = False

    def put(self, value: Any) -> None:
        """Called with the prompt, then with the new tokens of every pass."""
        if self._prompt_seen:
            self.first_at = self.first_at or time.perf_counter()
            self.sizes.append(value.numel())
        self._prompt_seen = True

    def end(self) -> None:
        """Called after the last token."""
