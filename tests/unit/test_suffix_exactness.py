"""Suffix and hybrid drafts change the speed of a text, never the text."""

from __future__ import annotations

import random

import pytest
import torch

from ssd_integrations.protocol import FinishedEvent, SamplingParams
from ssd_workers.engine.drafters.base import Drafter
from ssd_workers.engine.drafters.hybrid import HybridDrafter
from ssd_workers.engine.drafters.model import ModelDrafter
from ssd_workers.engine.drafters.ngram import NgramDrafter
from ssd_workers.engine.drafters.suffix import SuffixDrafter
from ssd_workers.engine.loading import LoadedModel
from tests.engine_support import Job, assert_same_tokens, load_tiny, run_batch
from tests.tiny import ARCHITECTURES, VOCAB_SIZE, make_tiny_model

SAMPLINGS = {
    "greedy": SamplingParams(),
    "seeded": SamplingParams(temperature=0.8, top_p=0.95),
}


@pytest.fixture(scope="module", params=ARCHITECTURES)
def models(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[LoadedModel, LoadedModel]:
    """A target, and a draft model that is the target with a little noise on its weights."""
    path = make_tiny_model(tmp_path_factory.mktemp(request.param), request.param)
    target, draft = load_tiny(path), load_tiny(path)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in draft.runner.model.parameters():
            weight += 0.004 * torch.randn(weight.shape, generator=generator)
    return target, draft


def make_drafter(name: str, draft: LoadedModel) -> Drafter:
    if name == "suffix":
        return SuffixDrafter(depth=16)
    if name == "suffix+ngram":
        return HybridDrafter(SuffixDrafter(), ngram=NgramDrafter())
    model = ModelDrafter(draft.runner, draft.context_length, VOCAB_SIZE)
    return HybridDrafter(SuffixDrafter(), model=model)


def jobs(count: int, sampling: SamplingParams) -> list[Job]:
    """Ragged prompts of 3 to 60 tokens with repetitions in them, ragged lengths."""
    rng = random.Random(count)
    made = []
    for index in range(count):
        phrase = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(3, 15))]
        made.append(Job(phrase * rng.randint(1, 4), rng.randint(15, 40), sampling, 100 + index))
    return made


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("count", [1, 4, 8])
@pytest.mark.parametrize("name", ["suffix", "suffix+ngram", "suffix+model"])
def test_speculative_equals_autoregressive(
    models: tuple[LoadedModel, LoadedModel], name: str, count: int, sampling: str
) -> None:
    target, draft = models
    batch = jobs(count, SAMPLINGS[sampling])
    plain = [run_batch(target, [job])[0] for job in batch]
    drafter = make_drafter(name, draft)
    # The second time the answers are known: long drafts, many of them accepted.
    cold = run_batch(target, batch, drafter)
    warm = run_batch(target, batch, drafter, max_num_seqs=3)
    for results in (cold, warm):
        for job, expected, got in zip(batch, plain, results, strict=True):
            assert_same_tokens(target, job, expected, got)
            assert got.finish_reason == expected.finish_reason
            assert got.speculation.method == drafter.name
    assert accepted(warm) > 5 * count
    if name != "suffix+model":
        assert accepted(warm) > accepted(cold)


def accepted(results: list[FinishedEvent]) -> int:
    return sum(result.speculation.num_accepted_tokens for result in results)


def test_drafts_that_fail_in_the_middle(models: tuple[LoadedModel, LoadedModel]) -> None:
    """Answers of one seed as precedents for another: right for a while, then wrong."""
    target, _ = models
    sampling = SamplingParams(temperature=0.3)
    prompt = [5, 6, 7, 8]
    batch = [Job(prompt, 40, sampling, seed) for seed in range(8)]
    drafter = SuffixDrafter(factor=4.0, min_prob=0.01)
    plain = [run_batch(target, [job])[0] for job in batch]
    histogram = [0] * 9
    for job, expected in zip(batch, plain, strict=True):
        (got,) = run_batch(target, [job], drafter, num_draft_tokens=8)
        assert_same_tokens(target, job, expected, got)
        for count, steps in enumerate(got.speculation.acceptance_histogram):
            histogram[count] += steps
    assert drafter.num_remembered == 8
    assert histogram[0] > 0
    assert sum(histogram[1:8]) > 0
