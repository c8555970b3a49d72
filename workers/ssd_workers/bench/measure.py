"""The run: decoders take turns on every prompt, round after round.

A slow spell of the machine so hits all of them. A decoder that fails on a prompt has a failure
there, never a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

from ssd_integrations.errors import EngineError, SSDError
from ssd_workers.bench.decoders import Answer, Decoder
from ssd_workers.bench.suites import Item

OnSample = Callable[[int, int], None]

_WARM_UP_TOKENS = 4
# Conversations that a decoder gets at a time when it answers several at once, for each that runs:
# enough to keep it busy, few enough that the decoders still take turns.
_BATCH_FACTOR = 4


@dataclass(frozen=True)
class Sample:
    """One conversation, answered by one decoder: an answer for each turn, or an error."""

    decoder: str
    item: str
    category: str
    round: int
    answers: tuple[Answer, ...]
    error: str | None = None

    @property
    def tokens(self) -> int:
        """New tokens of all turns."""
        return sum(answer.tokens for answer in self.answers)

    @property
    def total_s(self) -> float:
        """Seconds of all turns, from end to end."""
        return sum(answer.total_s for answer in self.answers)

    @property
    def texts(self) -> tuple[tuple[tuple[int, ...], str], ...]:
        """What was written, in tokens and in characters."""
        return tuple((answer.token_ids, answer.text) for answer in self.answers)


@dataclass(frozen=True)
class Batch:
    """Conversations answered ``requests`` at a time, and the seconds that all of them took."""

    decoder: str
    round: int
    requests: int
    wall_s: float
    samples: tuple[Sample, ...]


@dataclass
class Results:
    """Everything that was measured, in the order taken."""

    decoders: list[str]
    samples: list[Sample] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)
    interrupted: bool = False

    def of(self, decoder: str) -> list[Sample]:
        """The samples of one decoder, failures included."""
        return [sample for sample in self.samples if sample.decoder == decoder]

    def require_answers(self) -> None:
        """Raise EngineError with the first failure, if there is one."""
        for sample in self.samples:
            if sample.error is not None:
                raise EngineError(f"{sample.decoder} failed on {sample.item!r}: {sample.error}")


def run(
    decoders: Sequence[Decoder],
    items: Sequence[Item],
    *,
    rounds: int,
    max_tokens: int | None = None,
    concurrent: Sequence[Decoder] = (),
    requests: int = 1,
    on_sample: OnSample | None = None,
) -> Results:
    """Let every decoder answer every item, ``rounds`` times, taking turns.

    Each first answers with a few untimed tokens, to page its weights in. Who begins changes from
    item to item. An interrupt ends the run early and keeps what there is.

    Parameters:
      max_tokens: a limit below the items' own.
      concurrent: decoders that afterwards, in every round, answer all items again with
        ``requests`` of them at once.
      on_sample: told how many of how many conversations are done.
    """
    results = Results([decoder.name for decoder in decoders])
    total = rounds * len(items) * (len(decoders) + len(concurrent))
    tell = _Counter(on_sample, total)
    try:
        for decoder in decoders:
            # What fails here fails again below, where it is counted.
            with suppress(SSDError):
                first = [{"role": "user", "content": items[0].user_turns[0]}]
                decoder.answer(first, _WARM_UP_TOKENS)
        for number in range(rounds):
            _one_round(results, decoders, items, number, max_tokens, tell)
            _one_concurrent_round(results, concurrent, items, number, max_tokens, requests, tell)
    except KeyboardInterrupt:
        results.interrupted = True
    return results


def _one_round(
    results: Results,
    decoders: Sequence[Decoder],
    items: Sequence[Item],
    number: int,
    max_tokens: int | None,
    tell: _Counter,
) -> None:
    for decoder in decoders:
        decoder.start_round()
    for index, item in enumerate(items):
        for decoder in _rotated(decoders, index):
            results.samples.append(_converse(decoder, item, number, max_tokens))
            tell(1)


def _one_concurrent_round(
    results: Results,
    decoders: Sequence[Decoder],
    items: Sequence[Item],
    number: int,
    max_tokens: int | None,
    requests: int,
    tell: _Counter,
) -> None:
    for decoder in decoders:
        decoder.start_round()
    size = requests * _BATCH_FACTOR
    for index, start in enumerate(range(0, len(items), size)):
        for decoder in _rotated(decoders, index):
            chunk = items[start : start + size]
            results.batches.append(_answer_at_once(decoder, chunk, number, max_tokens, requests))
            tell(len(chunk))


def _answer_at_once(
    decoder: Decoder, items: Sequence[Item], number: int, max_tokens: int | None, requests: int
) -> Batch:
    begin = time.perf_counter()
    pool = ThreadPoolExecutor(requests, thread_name_prefix="ssd-bench")
    try:
        done = tuple(pool.map(lambda item: _converse(decoder, item, number, max_tokens), items))
    finally:
        # After an interrupt only those that run are waited for.
        pool.shutdown(cancel_futures=True)
    return Batch(decoder.name, number, requests, time.perf_counter() - begin, done)


def _rotated(decoders: Sequence[Decoder], by: int) -> list[Decoder]:
    shift = by % len(decoders) if decoders else 0
    return [*decoders[shift:], *decoders[:shift]]


def _converse(decoder: Decoder, item: Item, number: int, max_tokens: int | None) -> Sample:
    """Answer the user's turns one after the other, each with the decoder's earlier answers."""
    limit = item.max_tokens if max_tokens is None else min(item.max_tokens, max_tokens)
    messages = [] if item.system is None else [{"role": "system", "content": item.system}]
    answers: list[Answer] = []
    error = None
    try:
        for turn in item.user_turns:
            messages.append({"role": "user", "content": turn})
            answers.append(decoder.answer(messages, limit))
            messages.append({"role": "assistant", "content": answers[-1].text})
    except SSDError as failure:
        # Turns that were answered before it do not count: a failed conversation has no times.
        answers, error = [], str(failure)
    return Sample(decoder.name, item.id, item.category, number, tuple(answers), error)


class _Counter:
    def __init__(self, on_sample: OnSample | None, total: int) -> None:
        self._on_sample = on_sample
        self._done = 0
        self._total = total
        self(0)

    def __call__(self, more: int) -> None:
        self._done += more
        if self._on_sample is not None:
            self._on_sample(self._done, self._total)
