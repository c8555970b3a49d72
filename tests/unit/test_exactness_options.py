"""Every drafter with every option that changes logits: the text is the autoregressive one."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import pytest

from ssd_integrations.protocol import FinishedEvent, SamplingParams, SpeculationParams
from ssd_workers.engine.drafters.base import Drafter
from ssd_workers.engine.drafters.hybrid import HybridDrafter
from ssd_workers.engine.drafters.ngram import NgramDrafter
from ssd_workers.engine.drafters.suffix import SuffixDrafter
from tests.engine_support import Job, assert_same_tokens, output_ids, run_batch
from tests.tiny import ARCHITECTURES, VOCAB_SIZE
from tests.unit.test_exactness import Pair

OPTIONS = {
    "plain": SamplingParams(),
    "penalties": SamplingParams(
        temperature=0.8, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3
    ),
    "bias": SamplingParams(temperature=0.6, logit_bias={7: 4.0, 11: -100.0}, min_tokens=12),
}


class Case:
    """One architecture: its models and the autoregressive answers, each computed once."""

    def __init__(self, arch: str, folder: Path) -> None:
        self.pair = Pair(arch, folder)
        self.plain = cache(self._plain)

    def _plain(self, option: str) -> list[tuple[Job, FinishedEvent]]:
        rng = random.Random(4)
        jobs = []
        for index in range(16):
            phrase = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(3, 9))]
            jobs.append(Job(phrase * rng.randint(1, 8), 24, OPTIONS[option], seed=index))
        return [(job, run_batch(self.pair.target, [job])[0]) for job in jobs]

    def drafter(self, name: str) -> Drafter:
        if name == "suffix":
            return SuffixDrafter()
        if name == "hybrid":
            return HybridDrafter(
                SuffixDrafter(), model=self.pair.drafter("model"), ngram=NgramDrafter()
            )
        return self.pair.drafter(name)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("count", [1, 4, 16])
@pytest.mark.parametrize("drafter", ["ngram", "suffix", "model", "hybrid"])
def test_text_is_autoregressive(case: Case, drafter: str, count: int, option: str) -> None:
    reference = case.plain(option)[:count]
    jobs = [job for job, _ in reference]
    drafting = case.drafter(drafter)
    # Twice: the second time a drafter that remembers knows the answers.
    for _ in range(2):
        got = run_batch(case.pair.target, jobs, drafting, max_num_seqs=16)
        for (job, expected), event in zip(reference, got, strict=True):
            assert_same_tokens(case.pair.target, job, expected, event)
    if drafter != "ngram":
        assert sum(event.speculation.num_accepted_tokens for event in got) > 0


def test_adaptive_lengths_change_nothing(case: Case) -> None:
    reference = case.plain("penalties")[:4]
    got = run_batch(
        case.pair.target,
        [job for job, _ in reference],
        case.drafter("hybrid"),
        speculation=SpeculationParams(adaptive=True),
    )
    for (job, expected), event in zip(reference, got, strict=True):
        assert_same_tokens(case.pair.target, job, expected, event)


@pytest.mark.parametrize("drafter", ["ngram", "model"])
def test_rejection_is_greedy_when_greedy_and_repeatable_when_seeded(
    case: Case, drafter: str
) -> None:
    rule = SpeculationParams(adaptive=False, acceptance="rejection")
    job, expected = case.plain("plain")[0]
    greedy = run_batch(case.pair.target, [job], case.drafter(drafter), speculation=rule)[0]
    assert_same_tokens(case.pair.target, job, expected, greedy)
    sampled = Job(job.prompt, 24, SamplingParams(temperature=0.9, top_k=20), seed=3)
    texts = [
        output_ids(
            run_batch(case.pair.target, [sampled], case.drafter(drafter), speculation=rule)[0]
        )
        for _ in range(2)
    ]
    assert texts[0] == texts[1]


def test_minimum_length_and_stop_ids(case: Case) -> None:
    job = case.plain("plain")[0][0]
    free = output_ids(run_batch(case.pair.target, [job])[0])
    stop = free[5]
    first = free.index(stop)
    cut = Job(job.prompt, 24, SamplingParams(stop_token_ids=(stop,)))
    event = run_batch(case.pair.target, [cut], NgramDrafter())[0]
    assert output_ids(event) == free[:first]
    assert event.finish_reason == "stop"
    assert event.usage.completion_tokens == first + 1
    longer = Job(job.prompt, 24, SamplingParams(stop_token_ids=(stop,), min_tokens=20))
    event = run_batch(case.pair.target, [longer], NgramDrafter())[0]
    assert event.usage.completion_tokens >= 20
