"""The measurement behind the demo's table: the same prompts through several decoders.

Every decoder is timed alike, on the wall clock of its caller: from handing over the messages
(templating and tokenising included) to the first piece of text, and to the end. Decoders take
turns on each prompt, so that a slow spell of the machine hits all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Protocol, cast

from ssd_integrations.backends.base import Backend
from ssd_integrations.errors import EngineError
from ssd_integrations.protocol import (
    DeltaEvent,
    Event,
    FinishedEvent,
    SpeculationMode,
    build_request,
    build_sampling,
    build_speculation,
)


@dataclass(frozen=True)
class Task:
    """One prompt: chat messages as role and content, and the longest answer in tokens."""

    name: str
    messages: tuple[dict[str, str], ...]
    max_tokens: int


@dataclass(frozen=True)
class Sample:
    """One timed answer. ``tokens`` counts the end-of-sequence token, for every decoder."""

    decoder: str
    task: str
    time_to_first_token_s: float
    total_s: float
    tokens: int
    token_ids: tuple[int, ...]
    text: str
    acceptance_length: float | None = None

    @property
    def tokens_per_second(self) -> float:
        """Over the whole call, the time to the first token included."""
        return self.tokens / self.total_s


class Decoder(Protocol):
    """Something that answers a task greedily and says how long it took."""

    name: str

    def run(self, task: Task) -> Sample:
        """Answer ``task`` once."""
        ...


class EngineDecoder:
    """This project's engine with one way of drafting."""

    def __init__(self, name: str, backend: Backend, model: str, speculation: SpeculationMode):
        self.name = name
        self._backend = backend
        self._model = model
        self._speculation = build_speculation(mode=speculation)

    def run(self, task: Task) -> Sample:
        """Answer ``task`` once; raises the backend's errors."""
        start = time.perf_counter()
        first = None
        ids: list[int] = []
        finished: FinishedEvent | None = None
        request = build_request(
            model=self._model,
            messages=task.messages,
            sampling=build_sampling(max_tokens=task.max_tokens),
            speculation=self._speculation,
        )
        events = cast(Generator[Event, None, None], self._backend.generate(request))
        with closing(events):
            for event in events:
                if isinstance(event, DeltaEvent):
                    first = first if first is not None else time.perf_counter()
                    ids += event.token_ids
                elif isinstance(event, FinishedEvent):
                    finished = event
        end = time.perf_counter()
        if finished is None:
            raise EngineError(f"The engine ended task {task.name!r} without a result.")
        return Sample(
            decoder=self.name,
            task=task.name,
            time_to_first_token_s=(first if first is not None else end) - start,
            total_s=end - start,
            tokens=finished.usage.completion_tokens,
            token_ids=tuple(ids),
            text=finished.text,
            acceptance_length=finished.speculation.mean_acceptance_length,
        )


class TransformersDecoder:
    """transformers' own ``generate``, greedy, in float32 with its default attention."""

    def __init__(self, name: str, folder: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.name = name
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def run(self, task: Task) -> Sample:
        """Answer ``task`` once."""
        import torch
        from transformers import GenerationConfig

        start = time.perf_counter()
        clock = _FirstToken()
        inputs = self._tokenizer.apply_chat_template(
            list(task.messages), add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        own = self._model.generation_config
        greedy = GenerationConfig(
            do_sample=False,
            max_new_tokens=task.max_tokens,
            eos_token_id=own.eos_token_id,
            pad_token_id=own.pad_token_id,
        )
        with torch.inference_mode():
            output = self._model.generate(**inputs, generation_config=greedy, streamer=clock)
        ids = output[0, inputs["input_ids"].shape[1] :].tolist()
        text = self._tokenizer.decode(ids, skip_special_tokens=True)
        end = time.perf_counter()
        return Sample(
            decoder=self.name,
            task=task.name,
            time_to_first_token_s=(clock.first or end) - start,
            total_s=end - start,
            tokens=len(ids),
            token_ids=tuple(ids),
            text=text,
        )


class _FirstToken:
    """A streamer for ``generate`` that notes when the first new token comes."""

    def __init__(self) -> None:
        self.first: float | None = None
        self._prompt_seen = False

    def put(self, value: Any) -> None:
        """Called with the prompt, then with every new token."""
        del value
        if self._prompt_seen and self.first is None:
            self.first = time.perf_counter()
        self._prompt_seen = True

    def end(self) -> None:
        """Called after the last token."""


@dataclass(frozen=True)
class Row:
    """One line of the table: medians over prompts and rounds."""

    decoder: str
    time_to_first_token_s: float
    tokens_per_second: float
    acceptance_length: float | None
    speed_up: float


@dataclass
class Comparison:
    """All samples of a run, in the order taken; the first decoder is the reference."""

    decoders: list[str]
    samples: list[Sample] = field(default_factory=list)

    def rows(self) -> list[Row]:
        """The table."""
        table = []
        reference = 0.0
        for name in self.decoders:
            mine = [sample for sample in self.samples if sample.decoder == name]
            speed = median(sample.tokens_per_second for sample in mine)
            reference = reference or speed
            lengths = [s.acceptance_length for s in mine if s.acceptance_length is not None]
            table.append(
                Row(
                    decoder=name,
                    time_to_first_token_s=median(s.time_to_first_token_s for s in mine),
                    tokens_per_second=speed,
                    acceptance_length=median(lengths) if lengths else None,
                    speed_up=speed / reference,
                )
            )
        return table

    def require_same_text(self, one: str, other: str) -> int:
        """Check that two decoders wrote the same tokens for every task and in every round.

        Returns:
          The number of tokens compared.

        Raises:
          EngineError: names the task and the first token that differs.
        """
        compared = 0
        baseline = {s.task: s for s in self.samples if s.decoder == one}
        for sample in self.samples:
            expected = baseline[sample.task]
            if sample.decoder not in (one, other) or sample is expected:
                continue
            if (sample.token_ids, sample.text) != (expected.token_ids, expected.text):
                pairs = zip(sample.token_ids, expected.token_ids, strict=False)
                place = next((i for i, (a, b) in enumerate(pairs) if a != b), "the end")
                raise EngineError(
                    f"{sample.decoder} and {expected.decoder} differ in {sample.task!r} at "
                    f"token {place}: speculation changed the text.",
                    remedy="This is a defect: report it with the output of `ssd doctor`.",
                )
            compared += sample.tokens
        return compared


def compare(
    decoders: Sequence[Decoder],
    tasks: Sequence[Task],
    rounds: int,
    on_sample: Callable[[int, int], None],
) -> Comparison:
    """Run every decoder on every task, ``rounds`` times, taking turns.

    Each decoder first answers with four untimed tokens, to page its weights in. ``on_sample``
    is told how many of how many answers are done.
    """
    result = Comparison([decoder.name for decoder in decoders])
    total = rounds * len(tasks) * len(decoders)
    on_sample(0, total)
    for decoder in decoders:
        decoder.run(Task("warm-up", tasks[0].messages, 4))
    for _ in range(rounds):
        for task in tasks:
            for decoder in decoders:
                result.samples.append(decoder.run(task))
                on_sample(len(result.samples), total)
    return result
