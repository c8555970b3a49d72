"""The run and its figures: who takes turns when, what failures do, rates, ratios and spreads."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from ssd_integrations.errors import EngineError, InvalidRequestError
from ssd_integrations.protocol import (
    DeltaEvent,
    Event,
    FinishedEvent,
    GenerationRequest,
    ModelInfo,
    SpeculationStats,
    Timing,
    Usage,
    build_speculation,
)
from ssd_workers.bench.decoders import Answer, EngineDecoder, Messages
from ssd_workers.bench.measure import Results, Sample, run
from ssd_workers.bench.modes import MODES, Mode, parse_modes
from ssd_workers.bench.suites import Item
from ssd_workers.bench.summary import factors, same_texts, summarise

Log = list[tuple[str, str]]


class Scripted:
    """Answers at once with its own turn numbers, fails on a word, and keeps a log."""

    def __init__(self, name: str, log: Log, *, fails_on: str = "", speed: float = 1.0) -> None:
        self.name = name
        self._log = log
        self._fails_on = fails_on
        self._speed = speed
        self.seen: list[list[dict[str, str]]] = []
        self.rounds = 0

    def answer(self, messages: Messages, max_tokens: int) -> Answer:
        last = messages[-1]["content"]
        self._log.append((self.name, last))
        self.seen.append([dict(message) for message in messages])
        if self._fails_on and self._fails_on in last:
            raise EngineError(f"no answer to {last!r}")
        return answer(max_tokens, decode_s=(max_tokens - 1) / self._speed, text=f"re {last}")

    def start_round(self) -> None:
        self.rounds += 1
        self._log.append((self.name, "start of round"))

    def close(self) -> None:
        raise AssertionError("whoever opened a decoder closes it, not the run")


def answer(
    tokens: int, *, decode_s: float, first_s: float = 0.5, steps: int | None = None, text: str = "x"
) -> Answer:
    return Answer(
        time_to_first_token_s=first_s,
        total_s=first_s + decode_s,
        tokens=tokens,
        first_tokens=1,
        steps=tokens - 1 if steps is None else steps,
        token_ids=tuple(range(tokens)),
        text=text,
        cpu_s=2.0,
    )


def item(name: str, *turns: str, category: str = "c", max_tokens: int = 11) -> Item:
    messages = [{"role": "user", "content": turn} for turn in turns or (name,)]
    return Item.model_validate(
        {
            "id": name, "category": category, "language": "en", "messages": messages,
            "max_tokens": max_tokens,
        }
    )  # fmt: skip


def sample(decoder: str, name: str, *answers: Answer, number: int = 0, error: str = "") -> Sample:
    return Sample(decoder, name, "c", number, answers, error or None)


def test_decoders_take_turns_and_who_begins_changes() -> None:
    log: Log = []
    decoders = [Scripted(name, log) for name in "abc"]
    told: list[tuple[int, int]] = []
    run(
        decoders,
        [item("one"), item("two")],
        rounds=2,
        on_sample=lambda *now: told.append(now),
    )
    answers = [entry for entry in log if entry[1] != "start of round"]
    assert answers[:3] == [("a", "one"), ("b", "one"), ("c", "one")]  # untimed, to warm up
    turns = [("a", "one"), ("b", "one"), ("c", "one"), ("b", "two"), ("c", "two"), ("a", "two")]
    assert answers[3:] == turns * 2
    assert [decoder.rounds for decoder in decoders] == [2, 2, 2]
    assert told == [(done, 12) for done in range(13)]


def test_a_conversation_carries_the_decoders_own_answers() -> None:
    decoder = Scripted("a", [])
    results = run([decoder], [item("talk", "first", "second")], rounds=1, max_tokens=5)
    assert decoder.seen[-1] == [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "re first"},
        {"role": "user", "content": "second"},
    ]
    (only,) = results.samples
    assert [a.tokens for a in only.answers] == [5, 5]
    assert only.tokens == 10


def test_a_failed_turn_is_a_failure_without_a_time() -> None:
    log: Log = []
    decoders = [Scripted("transformers", log), Scripted("ar", log, fails_on="bad")]
    results = run(decoders, [item("good"), item("talk", "fine", "bad")], rounds=2)
    summary = summarise(results)
    assert summary["ar"].failures == 2
    assert summary["ar"].errors == [f"no answer to 'bad' {EngineError.default_remedy}"]
    assert summary["ar"].answers == 2
    assert summary["ar"].tokens == 22
    assert summary["transformers"].failures == 0
    assert summary["transformers"].answers == 6
    # Only what both answered is compared.
    assert summary["ar"].speedup == pytest.approx(1.0)


def test_a_mode_that_always_fails_has_no_figures() -> None:
    log: Log = []
    results = run(
        [Scripted("ar", log), Scripted("ngram", log, fails_on="one")], [item("one")], rounds=1
    )
    broken = summarise(results)["ngram"]
    assert broken.failures == 1
    assert broken.tokens_per_second is None
    assert broken.speedup is None
    assert broken.time_to_first_token_s is None
    assert broken.cpu_seconds_per_1000_tokens is None


def test_rates_are_totals_of_a_round_and_the_median_of_rounds() -> None:
    def pair(number: int, seconds: float) -> list[Sample]:
        return [
            sample("ar", "long", answer(101, decode_s=10 * seconds), number=number),
            sample("ar", "short", answer(11, decode_s=2 * seconds), number=number),
        ]

    samples = [*pair(0, 1.0), *pair(1, 2.0), *pair(2, 10.0)]
    summary = summarise(Results(["ar"], samples))["ar"]
    assert summary.tokens_per_second == pytest.approx(110 / 24)
    # Six single rates: 10 and 5, 5 and 2.5, 1 and 0.5.
    assert summary.tokens_per_second_iqr == pytest.approx([1.375, 5.0])
    assert summary.time_to_first_token_s == 0.5
    assert summary.end_to_end_tokens_per_second == pytest.approx(112 / 25)
    assert summary.cpu_seconds_per_1000_tokens == pytest.approx(1000 * 12 / 336)
    assert summary.gpu_seconds_per_1000_tokens is None
    assert summarise(Results(["ar"], samples), on_gpu=True)["ar"].gpu_seconds_per_1000_tokens


def test_tokens_of_the_first_piece_do_not_count_as_decoded() -> None:
    block = Answer(1.0, 3.0, 9, 5, 2, (), "x")
    summary = summarise(Results(["ar"], [sample("ar", "a", block)]))["ar"]
    assert summary.tokens_per_second == 2.0
    assert summary.mean_acceptance_length == 2.0
    alone = Answer(1.0, 1.0, 5, 5, 0, (), "x")
    assert summarise(Results(["ar"], [sample("ar", "a", alone)]))["ar"].tokens_per_second is None


def test_the_speedup_is_over_transformers_or_else_over_ar() -> None:
    samples = [
        sample("ngram", "a", answer(21, decode_s=2.0, steps=10)),
        sample("ar", "a", answer(21, decode_s=4.0)),
        sample("transformers", "a", answer(21, decode_s=20.0)),
    ]
    both = summarise(Results(["ngram", "ar", "transformers"], samples))
    assert both["ngram"].speedup == pytest.approx(10.0)
    assert both["ngram"].speedup_over_ar == pytest.approx(2.0)
    assert both["ngram"].mean_acceptance_length == 2.0
    assert both["transformers"].speedup == 1.0
    ours = summarise(Results(["ngram", "ar"], samples[:2]))
    assert ours["ngram"].speedup == pytest.approx(2.0)
    assert summarise(Results(["ngram"], samples[:1]))["ngram"].speedup is None
    split = factors(
        Results(["ngram", "ar", "transformers"], samples), [MODES["ngram"], MODES["ar"]]
    )
    assert split == {
        "quantisation": None,
        "engine_and_quantisation": pytest.approx(5.0),
        "speculation": pytest.approx(2.0),
        "best_drafter": "ngram",
    }


def test_texts_are_compared_in_tokens_alone_and_in_batches() -> None:
    log: Log = []
    decoders = [Scripted("ar", log), Scripted("ngram", log)]
    items = [item("one"), item("two")]
    results = run(decoders, items, rounds=1, concurrent=decoders, requests=2)
    same = same_texts(results, ["ar", "ngram"])
    assert (same.conversations_compared, same.tokens_compared, same.different) == (6, 66, 0)
    changed = Answer(0.1, 1.0, 3, 1, 2, (0, 7, 2), "x")
    results.samples.append(sample("ngram", "one", changed))
    other = same_texts(results, ["ar", "ngram"])
    assert other.different == 1
    assert other.first_difference == "ngram and ar differ on 'one' in answer 1 at token 1"
    assert same_texts(results, ["ar"]).different == 0


def test_so_many_requests_run_at_once() -> None:
    class Counting(Scripted):
        running = 0
        most = 0
        lock = threading.Lock()

        def answer(self, messages: Messages, max_tokens: int) -> Answer:
            with self.lock:
                self.running += 1
                self.most = max(self.most, self.running)
            time.sleep(0.02)
            with self.lock:
                self.running -= 1
            return super().answer(messages, max_tokens)

    decoder = Counting("ar", [])
    items = [item(f"i{n}") for n in range(14)]
    results = run([decoder], items, rounds=1, concurrent=[decoder], requests=3)
    assert decoder.most == 3
    assert [len(batch.samples) for batch in results.batches] == [12, 2]
    found = summarise(results)["ar"].concurrent
    assert found is not None
    assert found["requests"] == 3
    assert found["failures"] == 0
    wall = sum(batch.wall_s for batch in results.batches)
    assert found["tokens_per_second"] == pytest.approx(14 * 11 / wall)
    alone = sum(s.total_s for s in results.samples)
    assert found["ratio_to_one_at_a_time"] == pytest.approx((14 * 11 / wall) / (14 * 11 / alone))


def test_an_interrupt_keeps_what_was_measured() -> None:
    class Impatient(Scripted):
        def answer(self, messages: Messages, max_tokens: int) -> Answer:
            if messages[-1]["content"] == "three":
                raise KeyboardInterrupt
            return super().answer(messages, max_tokens)

    results = run([Impatient("ar", [])], [item(n) for n in ("one", "two", "three")], rounds=1)
    assert results.interrupted
    assert [s.item for s in results.samples] == ["one", "two"]


def test_every_decoder_has_its_own_drafters_fresh_in_each_round() -> None:
    class Backend:
        def __init__(self) -> None:
            self.log: list[tuple[str, bool] | str] = []

        def use_drafters(self, name: str, *, fresh: bool) -> None:
            self.log.append((name, fresh))

        def generate(self, request: GenerationRequest) -> Iterator[Event]:
            self.log.append(request.speculation.mode)
            yield DeltaEvent(request_id=request.request_id, text="x", token_ids=(1,))
            yield finished_event(request.request_id)

    backend: Any = Backend()
    decoders = [
        EngineDecoder("one", backend, "m", build_speculation(mode="ngram")),
        EngineDecoder("two", backend, "m", build_speculation(mode="auto")),
    ]
    run(decoders, [item("hello")], rounds=1)
    assert backend.log[-6:] == [
        ("one", True), ("two", True), ("one", False), "ngram", ("two", False), "auto"
    ]  # fmt: skip


def finished_event(request_id: str) -> FinishedEvent:
    return FinishedEvent(
        request_id=request_id,
        text="x",
        finish_reason="length",
        usage=Usage(prompt_tokens=1, completion_tokens=1, total_tokens=2),
        speculation=SpeculationStats(method="ngram"),
        timing=Timing(
            queue_s=0, time_to_first_token_s=0, decode_s=0, total_s=0, tokens_per_second=0
        ),
        model=ModelInfo(
            name="m", architecture="a", context_length=9, vocab_size=9, dtype="float32",
            device="cpu",
        ),
    )  # fmt: skip


def test_what_the_engine_cannot_draft_is_the_protocols_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(MODES, "telepathy", Mode("telepathy", "engine", "telepathy"))
    with pytest.raises(InvalidRequestError, match="mode='telepathy'"):
        parse_modes("ar,telepathy", draft_model=None)
