"""Every architecture: the logits are transformers' own, the text is the autoregressive one."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from ssd_integrations.protocol import FinishedEvent, SamplingParams
from ssd_workers.engine.drafters.base import Drafter
from ssd_workers.engine.drafters.hybrid import HybridDrafter
from ssd_workers.engine.drafters.model import ModelDrafter
from ssd_workers.engine.drafters.ngram import NgramDrafter
from ssd_workers.engine.drafters.suffix import SuffixDrafter
from ssd_workers.engine.int8 import cpu_is_exact
from ssd_workers.engine.loading import LoadedModel, load_model
from ssd_workers.engine.runner import RowBlock
from ssd_workers.models.store import resolve_model
from ssd_workers.progress import no_progress
from tests.architectures import DECODED, FURTHER, MIXTURES, WINDOW, make_model
from tests.engine_support import Job, assert_same_tokens, output_ids, run_batch
from tests.tiny import VOCAB_SIZE

SAMPLING = {"greedy": SamplingParams(), "seeded": SamplingParams(temperature=0.8)}
LENGTH = 150  # beyond every window and two blocks of keys

needs_int8 = pytest.mark.skipif(
    not cpu_is_exact(), reason="this processor has no exact int8 products (VNNI or AMX)"
)


def load(path: Path, dtype: str) -> LoadedModel:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSD_CACHE_DIR", str(path / "cache"))
        source = resolve_model(str(path))
        return load_model(source, dtype, "cpu", no_progress)  # type: ignore[arg-type]


class Case:
    """One architecture: its models in both precisions and autoregressive answers, each made once.

    The draft model is the target with a little noise on its weights.
    """

    def __init__(self, arch: str, folder: Path) -> None:
        self.arch = arch
        self.path = make_model(folder / "target", arch)
        self.target = cache(self._target)
        self.draft = cache(self._draft)
        self.plain = cache(self._plain)

    def _target(self, dtype: str) -> LoadedModel:
        return load(self.path, dtype)

    def _draft(self) -> LoadedModel:
        draft = load(self.path, "float32")
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for weight in draft.runner.model.parameters():
                weight += 0.004 * torch.randn(weight.shape, generator=generator)
        return draft

    def _plain(self, dtype: str, sampling: str, index: int) -> tuple[Job, FinishedEvent]:
        rng = random.Random(index)
        phrase = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(3, 9))]
        # Ragged, some beyond the window, and one across a block of keys.
        prompt = phrase * (rng.randint(1, 6) if index else 10)
        job = Job(prompt, 12, SAMPLING[sampling], seed=index)
        return job, run_batch(self.target(dtype), [job])[0]

    def drafter(self, name: str) -> Drafter:
        if name == "ngram":
            return NgramDrafter()
        if name == "suffix":
            return SuffixDrafter()
        draft = self.draft()
        model = ModelDrafter(draft.runner, draft.context_length, VOCAB_SIZE)
        if name == "model":
            return model
        return HybridDrafter(SuffixDrafter(), model=model, ngram=NgramDrafter())

    def check(self, dtype: str, drafter: str, count: int, sampling: str) -> None:
        """Decode ``count`` jobs together, twice, and compare each with itself alone."""
        target = self.target(dtype)
        reference = [self.plain(dtype, sampling, index) for index in range(count)]
        drafting = self.drafter(drafter)
        # The second time a drafter that remembers knows the answers.
        for _ in range(2 if drafter in ("suffix", "hybrid") else 1):
            got = run_batch(target, [job for job, _ in reference], drafting, max_num_seqs=16)
            for (job, expected), event in zip(reference, got, strict=True):
                if dtype == "int8" or target.runner.ranks:
                    assert output_ids(event) == output_ids(expected)
                else:
                    assert_same_tokens(target, job, expected, event)
        if drafter == "hybrid" or (drafter == "model" and dtype == "float32"):
            assert sum(event.speculation.num_accepted_tokens for event in got) > 0


@pytest.fixture(scope="module", params=DECODED)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module", params=FURTHER)
def further(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp(request.param))


def check_logits(case: Case) -> None:
    reference = AutoModelForCausalLM.from_pretrained(case.path, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(7)
    prompt = torch.randint(3, VOCAB_SIZE, (LENGTH,), generator=generator)
    assert LENGTH > 2 * WINDOW
    with torch.no_grad():
        expected = reference(input_ids=prompt[None]).logits[0]
        written = reference.generate(
            prompt[None],
            attention_mask=torch.ones(1, LENGTH, dtype=torch.long),
            max_new_tokens=8,
            do_sample=False,
        )
    runner = case.target("float32").runner
    cache, other, found = runner.new_cache(), runner.new_cache(), []
    for part in prompt.split([5, 1, 40, 20, 9, LENGTH - 75]):
        # Beside another sequence, and with tokens behind them that are rejected.
        blocks = [
            RowBlock(other, [7, 8, 9], 0),
            RowBlock(cache, [*part.tolist(), 9, 8, 7], len(part) + 3),
        ]
        end = cache.length + len(part)
        found.append(runner.forward(blocks)[:-3])
        cache.truncate(end)
    torch.testing.assert_close(torch.cat(found), expected, atol=2e-3, rtol=1e-3)
    ours = run_batch(case.target("float32"), [Job(prompt.tolist(), 8)])[0]
    ids = [token for token in written[0, LENGTH:].tolist() if token != 2]  # the end has no text
    fake = ours.model_copy(update={"text": "".join(f"<{token}>" for token in ids)})
    assert_same_tokens(case.target("float32"), Job(prompt.tolist(), 8), fake, ours)


def check_rows(case: Case, dtype: str) -> None:
    """Bit for bit: rows of ragged sequences together, in other chunks than alone."""
    rng = random.Random(0)
    runner = case.target(dtype).runner
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(n)] for n in (5, 40, 70)]
    alone = []
    for prompt in prompts:
        cache = runner.new_cache()
        alone.append(torch.cat([runner.forward([RowBlock(cache, [t], 1)]) for t in prompt]))
    caches = [runner.new_cache() for _ in prompts]
    together: list[list[torch.Tensor]] = [[] for _ in prompts]
    while any(c.length < len(p) for c, p in zip(caches, prompts, strict=True)):
        sizes = [
            min(rng.randint(1, 30), len(p) - c.length) for c, p in zip(caches, prompts, strict=True)
        ]
        live = [i for i, size in enumerate(sizes) if size > 0]
        blocks = [
            RowBlock(caches[i], prompts[i][caches[i].length :][: sizes[i]], sizes[i]) for i in live
        ]
        pieces = runner.forward(blocks).split([sizes[i] for i in live])
        for i, piece in zip(live, pieces, strict=True):
            together[i].append(piece)
    for expected, pieces in zip(alone, together, strict=True):
        assert torch.equal(torch.cat(pieces), expected)


def test_logits_are_those_of_transformers(case: Case) -> None:
    check_logits(case)


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("drafter", ["ngram", "hybrid"])
def test_speculative_equals_autoregressive(case: Case, drafter: str, sampling: str) -> None:
    case.check("float32", drafter, 4, sampling)


@needs_int8
def test_int8_rows_do_not_depend_on_their_neighbours(case: Case) -> None:
    check_rows(case, "int8")


@needs_int8
@pytest.mark.parametrize("sampling", SAMPLING)
def test_int8_speculative_equals_autoregressive(case: Case, sampling: str) -> None:
    case.check("int8", "hybrid", 4, sampling)


@needs_int8
def test_int8_is_close_to_float(case: Case) -> None:
    prompt = list(range(10, 50))
    logits = [
        runner.forward([RowBlock(runner.new_cache(), prompt, len(prompt))])
        for runner in (case.target("int8").runner, case.target("float32").runner)
    ]
    apart = (logits[0] - logits[1]).norm(dim=1) / logits[1].norm(dim=1)
    # A rounded value may send a row to another expert; most rows are close all the same.
    assert apart.median() < 0.15


@pytest.mark.parametrize("arch", MIXTURES)
@pytest.mark.parametrize("threads", [1, 3])
def test_rows_of_mixtures_are_exact_in_float(arch: str, threads: int, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check_rows(Case(arch, tmp_path), "float32")
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("count", [1, 4, 16])
@pytest.mark.parametrize("drafter", ["ngram", "suffix", "model", "hybrid"])
@pytest.mark.parametrize("dtype", ["float32", pytest.param("int8", marks=needs_int8)])
def test_every_drafter_and_batch(
    case: Case, dtype: str, drafter: str, count: int, sampling: str
) -> None:
    case.check(dtype, drafter, count, sampling)


@pytest.mark.slow
def test_logits_of_further_architectures(further: Case) -> None:
    check_logits(further)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("drafter", ["ngram", "hybrid"])
@pytest.mark.parametrize("dtype", ["float32", pytest.param("int8", marks=needs_int8)])
def test_further_architectures(further: Case, dtype: str, drafter: str, sampling: str) -> None:
    further.check(dtype, drafter, 4, sampling)


@pytest.mark.slow
@needs_int8
def test_int8_rows_of_further_architectures(further: Case) -> None:
    check_rows(further, "int8")
