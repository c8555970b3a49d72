"""Structured output in the engine: the same tokens for every drafter, and always a whole text."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ssd_integrations.protocol import (
    DeltaEvent,
    FailedEvent,
    FinishedEvent,
    SamplingParams,
    SpeculationParams,
    StructuredOutput,
)
from ssd_workers.engine import grammar
from ssd_workers.engine.drafters.base import Drafter
from ssd_workers.engine.drafters.hybrid import HybridDrafter
from ssd_workers.engine.drafters.ngram import NgramDrafter
from ssd_workers.engine.drafters.suffix import SuffixDrafter
from ssd_workers.engine.int8 import cpu_is_exact
from ssd_workers.engine.loading import LoadedModel, load_model
from ssd_workers.models.store import resolve_model
from ssd_workers.progress import no_progress
from tests.engine_support import (
    Job,
    NoisyOracle,
    make_engine,
    make_sequence,
    output_ids,
    run_batch,
    run_to_end,
)
from tests.fixed_support import static
from tests.json_schema import conforms
from tests.structures import PERSON, PHONE, PHONE_PATTERN, SCHEMAS, SUM_GRAMMAR
from tests.tiny import VOCAB_SIZE, make_tiny_model
from tests.unit.test_exactness import Pair

STRUCTURES = {"schema": PERSON, "regex": PHONE}
SAMPLINGS = {"greedy": SamplingParams(), "seeded": SamplingParams(temperature=0.8)}
REJECTION = SpeculationParams(adaptive=False, acceptance="rejection")
DRAFTERS = ["ngram", "suffix", "model", "hybrid"]
ROOM = 160


def jobs(structure: StructuredOutput, sampling: SamplingParams, count: int = 4) -> list[Job]:
    """Ragged prompts of 3 to 70 tokens."""
    rng = random.Random(7)
    made = []
    for index in range(count):
        phrase = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(3, 9))]
        prompt = phrase * rng.randint(1, 8)
        made.append(Job(prompt, ROOM, sampling, seed=50 + index, structure=structure))
    return made


class Case:
    """One architecture: its models and the autoregressive answers, each computed once."""

    def __init__(self, arch: str, folder: Path) -> None:
        self.pair = Pair(arch, folder)
        self.target = self.pair.target
        self.plain = cache(self._plain)

    def _plain(self, structure: str, sampling: str) -> list[tuple[Job, FinishedEvent]]:
        batch = jobs(STRUCTURES[structure], SAMPLINGS[sampling])
        return [(job, run_batch(self.target, [job])[0]) for job in batch]

    def drafter(self, name: str) -> Drafter:
        if name == "suffix":
            return SuffixDrafter()
        if name == "hybrid":
            return HybridDrafter(
                SuffixDrafter(), model=self.pair.drafter("model"), ngram=NgramDrafter()
            )
        return self.pair.drafter(name)

    def text(self, event: FinishedEvent) -> str:
        return text_of(self.target, event)


def text_of(target: LoadedModel, event: FinishedEvent) -> str:
    text: str = target.tokenizer.decode(output_ids(event))
    return text


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case("llama", tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_speculative_equals_autoregressive(
    case: Case, drafter: str, structure: str, sampling: str, count: int
) -> None:
    reference = case.plain(structure, sampling)[:count]
    batch = [job for job, _ in reference]
    drafting = case.drafter(drafter)
    # Twice: the second time a drafter that remembers knows the answers.
    for _ in range(2):
        got = run_batch(case.target, batch, drafting)
        for (_, expected), event in zip(reference, got, strict=True):
            assert output_ids(event) == output_ids(expected)
            assert event.finish_reason == expected.finish_reason == "stop"
            assert event.usage == expected.usage
    assert sum(event.speculation.num_accepted_tokens for event in got) > 0


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_every_accepted_count_and_every_error_of_a_draft(case: Case, sampling: str) -> None:
    reference = case.plain("schema", sampling)
    answers = {
        f"r{i}": [*job.prompt, *output_ids(event)] for i, (job, event) in enumerate(reference)
    }
    oracle = NoisyOracle(answers, error_rate=0.3, vocab_size=VOCAB_SIZE)
    got = run_batch(case.target, [job for job, _ in reference], oracle, max_num_seqs=3)
    for (_, expected), event in zip(reference, got, strict=True):
        assert output_ids(event) == output_ids(expected)


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_answers_satisfy_their_schema(case: Case, name: str, temperature: float) -> None:
    schema = SCHEMAS[name]
    sampling = SamplingParams(temperature=temperature)
    batch = jobs(StructuredOutput(json_schema=schema), sampling, count=6)
    for event in run_batch(case.target, batch, case.drafter("model")):
        text = case.text(event)
        value = json.loads(text)
        assert conforms(value, schema), text
        assert json.loads(json.dumps(value)) == value
        assert event.finish_reason == "stop"


@pytest.mark.parametrize(
    ("structure", "pattern"),
    [
        (PHONE, PHONE_PATTERN),
        (StructuredOutput(choice=("yes", "no", "not sure, 1/2")), "yes|no|not sure, 1/2"),
        (StructuredOutput(grammar=SUM_GRAMMAR), r"[1-9]\d?(\+[1-9]\d?){1,3}"),
    ],
    ids=["regex", "choice", "grammar"],
)
def test_answers_match(llama: Case, structure: StructuredOutput, pattern: str) -> None:
    batch = jobs(structure, SamplingParams(temperature=1.2), count=8)
    texts = [llama.text(event) for event in run_batch(llama.target, batch, NgramDrafter())]
    assert all(re.fullmatch(pattern, text) for text in texts), texts
    assert len(set(texts)) > 1


def test_penalties_bias_and_log_probabilities_go_with_it(llama: Case) -> None:
    brace = llama.target.tokenizer.encode("{")[0]
    sampling = SamplingParams(
        temperature=0.7, repetition_penalty=1.3, frequency_penalty=0.5, logit_bias={brace: -100.0},
        logprobs=1,
    )  # fmt: skip
    batch = jobs(PERSON, sampling)
    plain = [run_batch(llama.target, [job])[0] for job in batch]
    for expected, event in zip(
        plain, run_batch(llama.target, batch, llama.drafter("hybrid")), strict=True
    ):
        assert output_ids(event) == output_ids(expected)
        assert conforms(json.loads(llama.text(event)), SCHEMAS["person"])


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_rejection_is_greedy_when_greedy_repeatable_and_whole(case: Case, drafter: str) -> None:
    for job, expected in case.plain("schema", "greedy")[:2]:
        event = run_batch(case.target, [job], case.drafter(drafter), speculation=REJECTION)[0]
        assert output_ids(event) == output_ids(expected)
    batch = jobs(PERSON, SamplingParams(temperature=0.9))
    first, second = (
        run_batch(case.target, batch, case.drafter(drafter), speculation=REJECTION)
        for _ in range(2)
    )
    assert [output_ids(e) for e in first] == [output_ids(e) for e in second]
    assert all(conforms(json.loads(case.text(e)), SCHEMAS["person"]) for e in first)


@pytest.mark.parametrize("drafter", ["suffix", "model"])
def test_the_rejection_rule_draws_from_the_masked_law(llama: Case, drafter: str) -> None:
    structure = StructuredOutput(regex="[ab][cd][ef]")
    sampling = SamplingParams(temperature=2.0)

    def law(drafting: Drafter | None, speculation: SpeculationParams) -> Counter[str]:
        batch = [Job([9, 8, 7], 8, sampling, seed=seed, structure=structure) for seed in range(600)]
        events = run_batch(llama.target, batch, drafting, max_num_seqs=50, speculation=speculation)
        return Counter(llama.text(event) for event in events)

    plain = law(None, SpeculationParams())
    drawn = law(llama.drafter(drafter), REJECTION)
    distance = sum(abs(plain[text] - drawn[text]) for text in plain | drawn) / 1200
    # Two samples of 600 from one law over eight texts are this far apart once in 10000 times.
    assert distance < 0.12, (plain, drawn)


@pytest.mark.skipif(not cpu_is_exact(), reason="this processor has no exact int8 products")
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_int8(
    sampling: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSD_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
    path = make_tiny_model(tmp_path_factory.mktemp("int8"), "qwen3")
    target = load_model(resolve_model(str(path)), "int8", "cpu", no_progress)
    batch = [job for kind in STRUCTURES.values() for job in jobs(kind, SAMPLINGS[sampling], 2)]
    plain = [run_batch(target, [job])[0] for job in batch]
    hybrid = HybridDrafter(SuffixDrafter(), ngram=NgramDrafter())
    for _ in range(2):
        for expected, event in zip(plain, run_batch(target, batch, hybrid), strict=True):
            assert output_ids(event) == output_ids(expected)
    assert conforms(json.loads(text_of(target, plain[0])), SCHEMAS["person"])


def test_steps_of_fixed_shapes(llama: Case) -> None:
    reference = llama.plain("schema", "seeded")
    target = static(llama.target)
    got = run_batch(target, [job for job, _ in reference], NgramDrafter())
    assert [output_ids(e) for e in got] == [output_ids(e) for _, e in reference]


def test_forced_tokens_are_drafted_and_accepted(llama: Case) -> None:
    structure = StructuredOutput(regex="[ab]" + "0123456789" * 3)
    event = run_batch(llama.target, jobs(structure, SamplingParams(), 1), NgramDrafter())[0]
    stats = event.speculation
    assert stats.num_accepted_tokens == stats.num_draft_tokens >= 24
    assert stats.num_spec_steps <= 7
    # The rejection rule has no distribution for them: there the drafter has to find them.
    drawn = jobs(structure, SamplingParams(temperature=0.9), 1)
    rejecting = run_batch(llama.target, drawn, NgramDrafter(), speculation=REJECTION)[0]
    assert rejecting.speculation.num_spec_steps >= 9
    # Without a drafter there are no drafts at all: the baseline stays the baseline.
    plain = run_batch(llama.target, jobs(structure, SamplingParams(), 1))[0]
    assert plain.speculation.num_draft_tokens == 0


def test_token_limit(llama: Case) -> None:
    job, whole = llama.plain("schema", "greedy")[0]
    needed = len(output_ids(whole))
    assert whole.usage.completion_tokens == needed + 1  # the end is a token too

    def limited(limit: int) -> list[Any]:
        short = Job(job.prompt, limit, job.sampling, job.seed, job.structure)
        drafters = (None, NgramDrafter(), llama.drafter("model"))
        return [run_to_end(llama.target, [short], drafter)[0] for drafter in drafters]

    for event in limited(needed):
        assert isinstance(event, FinishedEvent)
        assert event.finish_reason == "stop"
        assert output_ids(event) == output_ids(whole)
    for limit in (1, 5, needed - 1):
        for event in limited(limit):
            assert isinstance(event, FailedEvent)
            assert event.error.code == "incomplete_structure"
            assert "max_tokens" in event.error.remedy
            assert not event.error.retryable


def test_other_rows_do_not_notice(llama: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows without a grammar, and rows whose neighbour fails, are what they are alone."""
    structured = llama.plain("schema", "seeded")
    free = [Job([5, 6, 7] * 4, 40, SAMPLINGS["seeded"], seed=3), Job([9, 4], 30, SamplingParams())]
    alone = [run_batch(llama.target, [job])[0] for job in free]
    too_short = Job([8, 8, 9], 4, structure=PERSON)
    broken = Job([3, 4, 5], 40, structure=StructuredOutput(regex="[0-9]{30}"))
    give_up = grammar.GrammarState.advance

    def advance(state: grammar.GrammarState, tokens: list[int], reason: Any) -> Any:
        if state._kind == "regex":
            state._give_up()
        return give_up(state, tokens, reason)

    monkeypatch.setattr(grammar.GrammarState, "advance", advance)
    batch = [free[0], too_short, *(job for job, _ in structured), broken, free[1]]
    events = run_to_end(llama.target, batch, llama.drafter("hybrid"))
    codes = [e.error.code if isinstance(e, FailedEvent) else None for e in events]
    assert codes == [None, "incomplete_structure", *[None] * 4, "invalid_structure", None]
    expected = [alone[0], *(event for _, event in structured), alone[1]]
    finished = [event for event in events if isinstance(event, FinishedEvent)]
    assert [output_ids(e) for e in finished] == [output_ids(e) for e in expected]


def test_what_is_streamed_of_an_incomplete_answer_does_not_depend_on_drafts(llama: Case) -> None:
    """A choice of several tokens, cut off: drafted whole, or written token by token."""
    structure = StructuredOutput(choice=("0123456789" * 3,))
    streams = []
    for drafter in (None, NgramDrafter(), llama.drafter("model")):
        tokens: list[int] = []
        failures: list[str] = []

        def on_event(
            event: Any, tokens: list[int] = tokens, failures: list[str] = failures
        ) -> None:
            if isinstance(event, DeltaEvent):
                tokens.extend(event.token_ids)
            elif isinstance(event, FailedEvent):
                failures.append(event.error.code)

        job = Job([5, 6, 7], 5, SamplingParams(), 0, structure)
        engine = make_engine(llama.target)
        engine.add(make_sequence(llama.target, job, on_event, drafter=drafter))
        while engine.has_work:
            engine.step()
        assert failures == ["incomplete_structure"]
        streams.append(tokens)
    assert len(streams[0]) == 5
    assert streams[1] == streams[2] == streams[0]
