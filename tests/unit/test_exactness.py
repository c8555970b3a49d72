"""Exactness is the product: speculative output equals autoregressive output, token for token."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from ssd_integrations.protocol import SamplingParams
from ssd_workers.engine.drafters.base import Drafter
from ssd_workers.engine.drafters.model import ModelDrafter
from ssd_workers.engine.drafters.ngram import NgramDrafter
from ssd_workers.engine.loading import LoadedModel
from tests.engine_support import (
    Job,
    NoisyOracle,
    assert_same_tokens,
    load_tiny,
    output_ids,
    run_batch,
)
from tests.tiny import ARCHITECTURES, VOCAB_SIZE, make_tiny_model

GREEDY = SamplingParams()
SEEDED = SamplingParams(temperature=0.8, top_p=0.95)


class Pair:
    """A target and a draft model that is the target with a little noise on its weights."""

    def __init__(self, arch: str, folder: Path) -> None:
        # A narrow initialisation makes greedy text repeat itself, which is what n-grams need.
        self.path = make_tiny_model(folder / "target", arch)
        self.target = load_tiny(self.path)
        self.draft = load_tiny(self.path)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for weight in self.draft.runner.model.parameters():
                weight += 0.004 * torch.randn(weight.shape, generator=generator)

    def drafter(self, name: str) -> Drafter:
        if name == "ngram":
            return NgramDrafter()
        return ModelDrafter(self.draft.runner, self.draft.context_length, VOCAB_SIZE)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(request.param, tmp_path_factory.mktemp(request.param))


def jobs(count: int, sampling: SamplingParams) -> list[Job]:
    """Ragged prompts of 3 to 150 tokens with repetitions in them, ragged lengths."""
    rng = random.Random(count)
    made = []
    for index in range(count):
        phrase = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(3, 15))]
        prompt = phrase * rng.randint(1, 10)
        made.append(Job(prompt, rng.randint(20, 60), sampling, seed=100 + index))
    return made


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.parametrize("drafter", ["ngram", "model"])
def test_speculative_equals_autoregressive(
    pair: Pair, drafter: str, count: int, sampling: SamplingParams
) -> None:
    batch = jobs(count, sampling)
    # The reference runs every request alone and without a drafter.
    plain = [run_batch(pair.target, [job])[0] for job in batch]
    speculative = run_batch(pair.target, batch, pair.drafter(drafter))
    for job, expected, got in zip(batch, plain, speculative, strict=True):
        assert_same_tokens(pair.target, job, expected, got)
        assert got.finish_reason == expected.finish_reason
    if drafter == "model":
        assert sum(event.speculation.num_accepted_tokens for event in speculative) > 10 * count


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_every_accepted_count_in_ragged_batches(pair: Pair, sampling: SamplingParams) -> None:
    batch = jobs(6, sampling)
    plain = [run_batch(pair.target, [job])[0] for job in batch]
    answers = {
        f"r{i}": [*job.prompt, *output_ids(event)]
        for i, (job, event) in enumerate(zip(batch, plain, strict=True))
    }
    oracle = NoisyOracle(answers, error_rate=0.2, vocab_size=VOCAB_SIZE)
    # Fewer rows than requests: sequences join while others are in the middle.
    got = run_batch(pair.target, batch, oracle, num_draft_tokens=4, max_num_seqs=4)
    for job, expected, result in zip(batch, plain, got, strict=True):
        assert_same_tokens(pair.target, job, expected, result)
    histogram = [event.speculation.acceptance_histogram for event in got]
    seen = {k for counts in histogram for k, n in enumerate(counts) if n}
    assert seen == {0, 1, 2, 3, 4}


def test_repeating_text_is_accepted_by_ngrams(pair: Pair) -> None:
    """The n-gram path is exercised with accepted drafts, not only with misses."""
    start = [5, 6, 7, 8]
    answer = output_ids(run_batch(pair.target, [Job(start, 40)])[0])

    # The text to come stands in the prompt of a model that is told to repeat it.
    class Echo(NoisyOracle):
        name = "ngram"

    job = Job(start, 40)
    echo = Echo({"r0": [*start, *answer]}, error_rate=0.0, vocab_size=VOCAB_SIZE)
    event = run_batch(pair.target, [job], echo, num_draft_tokens=5)[0]
    assert output_ids(event) == answer
    assert event.speculation.mean_acceptance_length > 2


def test_greedy_equals_transformers_generate(pair: Pair) -> None:
    reference = AutoModelForCausalLM.from_pretrained(pair.path, dtype=torch.float32).eval()
    for job in jobs(3, GREEDY):
        with torch.no_grad():
            ids = reference.generate(
                torch.tensor([job.prompt]),
                attention_mask=torch.ones(1, len(job.prompt), dtype=torch.long),
                max_new_tokens=job.max_new_tokens,
                do_sample=False,
                eos_token_id=2,
                pad_token_id=0,
            )
        expected = ids[0, len(job.prompt) :].tolist()
        got = run_batch(pair.target, [job], NgramDrafter())[0]
        ours = output_ids(got)
        if expected and expected[-1] == 2:
            expected = expected[:-1]  # the end token has no text
        if ours != expected:
            fake = got.model_copy(update={"text": "".join(f"<{i}>" for i in expected)})
            assert_same_tokens(pair.target, job, fake, got)


def test_seed_decides_the_text_and_nothing_else(pair: Pair) -> None:
    job = Job([9, 8, 7, 6], 24, SEEDED, seed=1)
    other = Job([9, 8, 7, 6], 24, SEEDED, seed=2)
    one = output_ids(run_batch(pair.target, [job])[0])
    assert one == output_ids(run_batch(pair.target, [job, other], pair.drafter("model"))[0])
    assert one != output_ids(run_batch(pair.target, [other])[0])


def test_draft_context_shorter_than_the_targets(pair: Pair) -> None:
    job = Job([5, 6, 7] * 10, 40)
    short = ModelDrafter(pair.draft.runner, 33, VOCAB_SIZE)
    expected, got = run_batch(pair.target, [job])[0], run_batch(pair.target, [job], short)[0]
    assert_same_tokens(pair.target, job, expected, got)
    # 30 tokens of prompt and 3 more fit; after that there is no draft, and no failure.
    assert 0 < got.speculation.num_draft_tokens <= 2 + 1


def _rows(target: LoadedModel, prompt: list[int], chunks: list[int]) -> torch.Tensor:
    from ssd_workers.engine.runner import RowBlock

    cache, at, found = target.runner.new_cache(), 0, []
    for size in chunks:
        found.append(target.runner.forward([RowBlock(cache, prompt[at : at + size], size)]))
        at += size
    return torch.cat(found)


def test_rollback_leaves_no_trace(pair: Pair) -> None:
    from ssd_workers.engine.runner import RowBlock

    rng = random.Random(3)
    prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(140)]
    expected = _rows(pair.target, prompt, [140])[-1]
    runner, cache, at = pair.target.runner, pair.target.runner.new_cache(), 0
    while at < 140:
        good = prompt[at : at + rng.randint(1, 9)]
        bad = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(0, 70))]
        logits = runner.forward([RowBlock(cache, good + bad, len(good) + len(bad))])
        at += len(good)
        cache.truncate(at)
        last = logits[len(good) - 1]
    torch.testing.assert_close(last, expected, atol=1e-4, rtol=1e-4)
