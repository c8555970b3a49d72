"""Random requests for benchmarks/random_load.py, and what may be said of their answers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ssd_integrations.protocol import (
    DeltaEvent,
    Event,
    FinishedEvent,
    GenerationRequest,
    Message,
    ModelInfo,
    SamplingParams,
    SpeculationMode,
    SpeculationParams,
    StartedEvent,
)

Fate = Literal["finish", "cancel", "leave", "deadline", "impatient", "too long"]
"""What becomes of a request: read to its end; cancelled; left in the middle; given too little
time to decode, or to wait for a row; or refused since it does not fit."""

_SENTENCES = (
    "The router restarts when the reset button is held .",
    "Revenue rose in the north , and fell in the south .",
    "Grüße aus Köln ! 안녕하세요 라우터를 다시 시작해 주세요 . ¿ Qué tal ? 🙂",
)
_WORDS = " ".join(_SENTENCES).split()
_FATES: tuple[Fate, ...] = ("finish", "cancel", "leave", "deadline", "impatient", "too long")
_WEIGHTS = (70, 9, 9, 5, 4, 3)


@dataclass(frozen=True)
class Case:
    """A request, what becomes of it, and after how many events; ``asynchronous``: on a loop."""

    request: GenerationRequest
    fate: Fate
    after_events: int
    asynchronous: bool

    @property
    def has_one_text(self) -> bool:
        """Whether plain decoding must give the same text."""
        sampling, speculation = self.request.sampling, self.request.speculation
        if sampling.temperature == 0.0:
            return True
        return sampling.seed is not None and speculation.acceptance == "coupled"


class CaseMaker:
    """Random cases for one model.

    Parameters:
      info: the model that is served.
      modes: the drafters that are there.
      rng: where the randomness comes from.
    """

    def __init__(self, info: ModelInfo, modes: Sequence[SpeculationMode], rng: random.Random):
        self._info = info
        self._modes = modes
        self._rng = rng

    def make(self) -> Case:
        """The next case."""
        rng = self._rng
        fate = rng.choices(_FATES, _WEIGHTS)[0]
        fields: dict[str, Any] = {
            "model": self._info.name,
            "sampling": self._sampling(fate),
            "speculation": SpeculationParams(
                mode=rng.choice(self._modes),
                num_draft_tokens=rng.choice([None, None, 1, 3, 8, 16]),
                adaptive=rng.random() < 0.5,
                acceptance="rejection" if rng.random() < 0.2 else "coupled",
            ),
        }
        if fate == "deadline":
            fields["timeout_s"] = rng.uniform(0.001, 0.2)
        if fate == "impatient":
            fields["queue_timeout_s"] = rng.uniform(0.001, 0.05)
        words = self._words(fate)
        if self._info.has_chat_template and rng.random() < 0.5:
            half = len(words) // 2
            fields["messages"] = (
                Message(role="system", content=" ".join(words[:half])),
                Message(role="user", content=" ".join(words[half:])),
            )
        else:
            fields["prompt"] = " ".join(words)
        return Case(
            GenerationRequest(**fields), fate, rng.choice([0, 1, 2, 5, 20]), rng.random() < 0.2
        )

    def _words(self, fate: Fate) -> list[str]:
        rng, context = self._rng, self._info.context_length
        # Most are short, some are longer than a prefill chunk; about 3 tokens a word.
        count = context + 1 if fate == "too long" else int((context / 5) ** rng.random())
        words = [rng.choice(_WORDS)]
        while len(words) < count:
            if len(words) > 8 and rng.random() < 0.2:
                at = rng.randrange(len(words) - 4)
                words += words[at : at + rng.randint(2, 8)]  # something to copy from
            else:
                words.append(rng.choice(_WORDS) if rng.random() < 0.5 else f"w{rng.randrange(99)}")
        return words[: max(count, 1)]

    def _sampling(self, fate: Fate) -> SamplingParams:
        rng, vocab = self._rng, self._info.vocab_size
        most = max(1, self._info.context_length // 8)
        max_tokens = most if fate in ("cancel", "leave", "deadline") else rng.randint(1, most)
        fields: dict[str, Any] = {"max_tokens": max_tokens}

        def maybe(name: str, value: Any, chance: float = 0.15) -> None:
            if rng.random() < chance:
                fields[name] = value

        if rng.random() < 0.5:
            fields["temperature"] = rng.choice([0.3, 0.8, 1.0, 1.5])
            maybe("seed", rng.randrange(2**63), 0.7)
            maybe("top_p", rng.uniform(0.1, 1.0), 0.3)
            maybe("top_k", rng.randint(1, vocab), 0.3)
            maybe("min_p", rng.uniform(0.0, 0.3), 0.3)
        maybe("repetition_penalty", rng.uniform(0.8, 1.5))
        maybe("presence_penalty", rng.uniform(-1.0, 1.0))
        maybe("frequency_penalty", rng.uniform(-0.5, 1.0))
        maybe("logit_bias", {rng.randrange(vocab): rng.uniform(-10, 10) for _ in range(5)})
        maybe("min_tokens", rng.randint(1, max_tokens))
        maybe("stop", tuple(rng.sample(["e", "w1", " the", "\n", ".", "🙂", "라우"], 2)))
        maybe("stop_token_ids", tuple(rng.randrange(vocab) for _ in range(3)))
        maybe("ignore_eos", True)
        maybe("logprobs", rng.randint(0, 20))
        return SamplingParams(**fields)


def stream_faults(request: GenerationRequest, events: Sequence[Event]) -> list[str]:
    """What is wrong with the events of a request that ended."""
    faults = []
    last = events[-1]
    if not isinstance(last, FinishedEvent):
        return [f"the stream ended with {last.type}"]
    deltas = [event for event in events if isinstance(event, DeltaEvent)]
    started = [i for i, event in enumerate(events) if isinstance(event, StartedEvent)]
    tokens = [token for delta in deltas for token in delta.token_ids]
    sampling, stats = request.sampling, last.speculation
    if last.finish_reason != "cancelled" and started != [0]:
        faults.append(f"started events at {started}")
    if any(isinstance(event, FinishedEvent) for event in events[:-1]):
        faults.append("events after the end")
    if "".join(delta.text for delta in deltas) != last.text:
        faults.append("the deltas' text is not the whole text")
    if len(tokens) != last.usage.completion_tokens:
        faults.append(f"{len(tokens)} token ids, but usage says {last.usage.completion_tokens}")
    if sampling.max_tokens is not None and len(tokens) > sampling.max_tokens:
        faults.append(f"{len(tokens)} tokens of at most {sampling.max_tokens}")
    if last.finish_reason == "length" and len(tokens) != sampling.max_tokens:
        faults.append(f"ended for length after {len(tokens)} of {sampling.max_tokens} tokens")
    for stop in sampling.stop:
        if stop in last.text:
            faults.append(f"stop string {stop!r} is in the text")
    if sampling.logprobs is not None:
        given = [entry for delta in deltas for entry in delta.logprobs or ()]
        if [entry.token_id for entry in given] != tokens:
            faults.append("log-probabilities do not belong to the tokens")
    if sum(stats.acceptance_histogram) != stats.num_spec_steps:
        faults.append(f"statistics do not add up: {stats}")
    if stats.num_accepted_tokens > stats.num_draft_tokens:
        faults.append(f"more drafts accepted than made: {stats}")
    return faults
