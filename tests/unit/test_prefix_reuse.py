"""Prompts that begin like an earlier one: less to compute, the same text to the bit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from ssd_integrations.errors import EngineError
from ssd_integrations.protocol import FinishedEvent, SamplingParams
from ssd_workers.engine.config import EngineConfig
from ssd_workers.engine.drafters.base import Drafter
from ssd_workers.engine.drafters.model import ModelDrafter
from ssd_workers.engine.drafters.ngram import NgramDrafter
from ssd_workers.engine.drafters.suffix import SuffixDrafter
from ssd_workers.engine.int8 import cpu_is_exact
from ssd_workers.engine.kv_cache import BLOCK, GrowingCache
from ssd_workers.engine.loading import LoadedModel, load_model
from ssd_workers.engine.memory import CacheMemory
from ssd_workers.engine.prefix_cache import PrefixCache
from ssd_workers.engine.runner import RowBlock
from ssd_workers.engine.service import EngineService
from ssd_workers.models.store import resolve_model
from ssd_workers.progress import no_progress
from tests.engine_support import (
    Job,
    assert_same_tokens,
    load_tiny,
    make_engine,
    make_sequence,
    output_ids,
    run_batch,
)
from tests.fixed_support import static
from tests.tiny import VOCAB_SIZE, make_tiny_model
from tests.unit.service_support import finish, request

MANY = 2**26
DRAFTERS = ("off", "ngram", "suffix", "model")
SAMPLINGS = {"greedy": SamplingParams(), "seeded": SamplingParams(temperature=0.8, top_p=0.95)}


@dataclass
class Models:
    """A target, and the same with a little noise as draft model."""

    target: LoadedModel
    draft: LoadedModel

    def drafter(self, name: str) -> Drafter | None:
        if name == "off":
            return None
        if name == "model":
            return ModelDrafter(self.draft.runner, self.draft.context_length, VOCAB_SIZE)
        return NgramDrafter() if name == "ngram" else SuffixDrafter()

    def check(self, job: Job, expected: FinishedEvent, got: FinishedEvent) -> None:
        if self.target.dtype == "int8":
            assert output_ids(got) == output_ids(expected)
        else:
            assert_same_tokens(self.target, job, expected, got)


@pytest.fixture(scope="module", params=["llama float32", "gemma3 float32", "llama int8"])
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Models:
    arch, dtype = request.param.split()
    path = make_tiny_model(tmp_path_factory.mktemp(arch), arch)
    draft = load_tiny(path)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in draft.runner.model.parameters():
            weight += 0.004 * torch.randn(weight.shape, generator=generator)
    if dtype == "float32":
        return Models(load_tiny(path), draft)
    return Models(load_int8(path, tmp_path_factory), draft)


@pytest.fixture(scope="module")
def int8_target(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_int8(make_tiny_model(tmp_path_factory.mktemp("int8")), tmp_path_factory)


def load_int8(path: Path, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    if not cpu_is_exact():
        pytest.skip("this processor has no exact int8 products (VNNI or AMX)")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSD_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        return load_model(resolve_model(str(path)), "int8", "cpu", no_progress)


def some_tokens(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(count)]


def with_prefixes(target: LoadedModel, nbytes: int = MANY) -> CacheMemory:
    return CacheMemory(target.runner, prefixes=nbytes)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_text_with_a_hit_is_the_text_without(
    models: Models, drafter: str, sampling: str
) -> None:
    system = some_tokens(170, seed=0)
    jobs = [
        Job([*system, *some_tokens(10 + i, seed=i)], 40, SAMPLINGS[sampling], seed=i)
        for i in (1, 2, 3)
    ]
    plain = [run_batch(models.target, [job])[0] for job in jobs]
    engine = make_engine(models.target, with_prefixes(models.target))
    helper = models.drafter(drafter)
    (first,) = run_batch(models.target, jobs[:1], helper, engine=engine)
    others = run_batch(models.target, jobs[1:], helper, engine=engine)
    for job, expected, got in zip(jobs, plain, [first, *others], strict=True):
        models.check(job, expected, got)
    assert [event.usage.cached_tokens for event in [first, *others]] == [0, 128, 128]
    # The next turn of the first conversation: its answer is known as well.
    said = [*jobs[0].prompt, *output_ids(first)]
    turn = Job([*said, *some_tokens(5, seed=9)], 30, SAMPLINGS[sampling], seed=4)
    (cold,) = run_batch(models.target, [turn])
    (warm,) = run_batch(models.target, [turn], helper, engine=engine)
    models.check(turn, cold, warm)
    assert warm.usage.cached_tokens == (len(said) - 1) // BLOCK * BLOCK > 160
    assert warm.usage.prompt_tokens == len(turn.prompt)


def test_logits_after_a_hit_have_the_same_bits(int8_target: LoadedModel) -> None:
    runner = int8_target.runner
    tokens = some_tokens(230, seed=5)
    cold = runner.new_cache()
    assert isinstance(cold, GrowingCache)
    expected = runner.forward([RowBlock(cold, tokens, len(tokens))])
    prefixes = PrefixCache(MANY)
    prefixes.store(tokens, cold, MANY)
    for begun in (0, 10, 64, 100):
        warm = runner.new_cache()
        assert isinstance(warm, GrowingCache)
        if begun:
            runner.forward([RowBlock(warm, tokens[:begun], 0)])
        assert prefixes.fill(tokens, warm) == 192 - begun
        got = runner.forward([RowBlock(warm, tokens[192:], len(tokens) - 192)])
        assert torch.equal(got, expected[192:])


def test_bits_do_not_depend_on_the_chunks(int8_target: LoadedModel) -> None:
    runner, rng = int8_target.runner, random.Random(0)
    tokens = some_tokens(230, seed=6)
    whole = runner.forward([RowBlock(runner.new_cache(), tokens, len(tokens))])
    for largest in (1, 7, 60, 130):
        cache, pieces = runner.new_cache(), []
        while cache.length < len(tokens):
            chunk = tokens[cache.length :][: rng.randint(1, largest)]
            pieces.append(runner.forward([RowBlock(cache, chunk, len(chunk))]))
        assert torch.equal(torch.cat(pieces), whole)


def test_two_that_begin_alike_at_once_share_the_work(models: Models) -> None:
    system = some_tokens(140, seed=0)
    jobs = [Job([*system, *some_tokens(9, seed=i)], 12) for i in range(3)]
    plain = [run_batch(models.target, [job])[0] for job in jobs]
    engine = make_engine(models.target, with_prefixes(models.target))
    with counted_rows(models.target) as rows:
        together = run_batch(models.target, jobs, engine=engine)
    for job, expected, got in zip(jobs, plain, together, strict=True):
        models.check(job, expected, got)
    assert [event.usage.cached_tokens for event in together] == [0, 128, 128]
    # One prompt, two rests of prompts and at most 11 more tokens for each.
    assert sum(rows) <= 149 + 2 * (149 - 128) + 3 * 11


@contextmanager
def counted_rows(model: LoadedModel) -> Iterator[list[int]]:
    """Notes the rows of every forward of ``model``."""
    runner: Any = model.runner
    original, rows = runner.forward, []

    def forward(blocks: list[RowBlock]) -> torch.Tensor:
        rows.append(sum(len(block.token_ids) for block in blocks))
        logits: torch.Tensor = original(blocks)
        return logits

    runner.forward = forward
    try:
        yield rows
    finally:
        del runner.forward


def test_what_does_not_fit_any_more_is_computed_again(models: Models) -> None:
    block = models.target.runner.bytes_per_token * BLOCK
    memory = with_prefixes(models.target, 3 * block)
    engine = make_engine(models.target, memory)
    jobs = [Job(some_tokens(150 + i, seed=i), 20) for i in range(3)]
    plain = [run_batch(models.target, [job])[0] for job in jobs]
    cached = []
    for index in (0, 0, 1, 0, 2, 2):
        (got,) = run_batch(models.target, [jobs[index]], engine=engine)
        models.check(jobs[index], plain[index], got)
        cached.append(got.usage.cached_tokens)
        assert memory.prefixes is not None
        assert memory.prefixes.nbytes <= 3 * block
    # The second job's two blocks leave one of the first's.
    assert cached == [0, 128, 0, 64, 0, 128]


def test_a_sequence_that_is_cancelled_or_fails_leaves_nothing_wrong(models: Models) -> None:
    memory = with_prefixes(models.target)
    engine = make_engine(models.target, memory)
    job = Job(some_tokens(150, seed=1), 20)
    (expected,) = run_batch(models.target, [job])
    for ending in ("cancelled", "failed"):
        events: list[Any] = []
        sequence = make_sequence(models.target, job, events.append)
        engine.add(sequence)
        for _ in range(3):
            engine.step()
        sequence.cancelled = ending == "cancelled"
        if ending == "failed":
            engine.fail(sequence, EngineError("on purpose"))
        engine.step()
        assert not engine.sequences
        assert sequence.cache is None
        assert events[-1].type == ("finished" if ending == "cancelled" else "failed")
        (got,) = run_batch(models.target, [job], engine=engine)
        models.check(job, expected, got)
        assert got.usage.cached_tokens == 128


def test_a_long_prompt_is_read_by_the_draft_model_in_chunks(models: Models) -> None:
    job = Job(some_tokens(20, seed=3) * 20, 60)
    (expected,) = run_batch(models.target, [job])
    with counted_rows(models.draft) as rows:
        (got,) = run_batch(models.target, [job, Job([5, 6, 7], 60)], models.drafter("model"))[:1]
    models.check(job, expected, got)
    assert sum(rows) > 400
    assert max(rows) <= 256 + 64
    assert got.speculation.num_accepted_tokens > 0


def test_models_and_steps_for_which_prefixes_are_not_kept(tmp_path: Path) -> None:
    target = load_tiny(make_tiny_model(tmp_path / "plain"))
    fixed = static(target)
    engine = make_engine(fixed, with_prefixes(fixed))
    job = Job(some_tokens(150, seed=1), 10)
    (plain,) = run_batch(target, [job])
    for _ in range(2):
        (got,) = run_batch(fixed, [job], engine=engine)
        assert_same_tokens(target, job, plain, got)
        assert got.usage.cached_tokens == 0
    assert target.runner.reuses_prefixes
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    stretched = load_tiny(make_tiny_model(tmp_path / "stretched", rope_parameters=rope))
    assert not stretched.runner.reuses_prefixes
    assert with_prefixes(stretched).prefixes is None


@pytest.fixture(scope="module")
def fresh(roomy_model: Path) -> Iterator[EngineService]:
    with EngineService(EngineConfig(model=str(roomy_model))) as started:
        yield started


def test_a_service_tells_what_it_found(fresh: EngineService, roomy_model: Path) -> None:
    prompt = "The router restarts when you hold the reset button for ten seconds. " * 8
    cold = finish(fresh, request(fresh, prompt=prompt))
    warm = finish(fresh, request(fresh, prompt=prompt))
    assert cold.usage.prompt_tokens > 80
    assert cold.usage.cached_tokens == 0
    assert warm.usage.cached_tokens == (cold.usage.prompt_tokens - 1) // BLOCK * BLOCK
    with EngineService(EngineConfig(model=str(roomy_model), prefix_cache_mib=0)) as without:
        for _ in range(2):
            again = finish(without, request(without, prompt=prompt))
            assert again.usage.cached_tokens == 0
        assert again.text == cold.text
