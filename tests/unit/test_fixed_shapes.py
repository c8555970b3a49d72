"""Decoding steps of fixed shapes write what the others write, whoever joins, leaves or grows."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config

from ssd_integrations.protocol import (
    SamplingParams,
)
from ssd_workers.engine.drafters.selection import DrafterSelection
from ssd_workers.engine.fixed_runner import (
    MAX_STEP_ROWS,
    ROW_BUCKETS,
    FixedShapeRunner,
)
from ssd_workers.engine.loading import LoadedModel
from ssd_workers.engine.runner import ModelRunner, RowBlock
from ssd_workers.engine.slots import MIN_CAPACITY
from ssd_workers.engine.step_executors import EagerSteps, GraphSteps
from tests.engine_support import (
    Job,
    NoisyOracle,
    assert_same_tokens,
    load_tiny,
    output_ids,
    run_batch,
)
from tests.fixed_support import CPU, fixed_runner, recorded, static
from tests.graph_recorder import CpuRecorder
from tests.tiny import ARCHITECTURES, VOCAB_SIZE, make_tiny_model, make_tokenizer

GREEDY = SamplingParams()
SEEDED = SamplingParams(temperature=0.8, top_p=0.95)
MODES = ("off", "ngram", "suffix", "model", "hybrid")


class Trio:
    """One model behind the eager runner and two of fixed shapes, with a draft model."""

    def __init__(self, arch: str, folder: Path) -> None:
        path = make_tiny_model(folder / "target", arch)
        self.eager = load_tiny(path)
        self.fixed = {"static": static(self.eager), "recorded": recorded(self.eager)}
        draft = load_tiny(path)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for weight in draft.runner.model.parameters():
                weight += 0.004 * torch.randn(weight.shape, generator=generator)
        self.drafts = {"static": static(draft), "recorded": recorded(draft)}


@pytest.fixture(scope="module", params=ARCHITECTURES)
def trio(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trio:
    return Trio(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_tiny(make_tiny_model(tmp_path_factory.mktemp("llama")))


def jobs(count: int, sampling: SamplingParams) -> list[Job]:
    """Ragged prompts of 3 to 150 tokens with repetitions in them, ragged lengths."""
    rng = random.Random(count)
    made = []
    for index in range(count):
        phrase = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(3, 15))]
        prompt = phrase * rng.randint(1, 10)
        made.append(Job(prompt, rng.randint(20, 40), sampling, seed=100 + index))
    return made


@pytest.mark.parametrize("kind", ["static", "recorded"])
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("count", [1, 8])
def test_every_drafter_writes_what_eager_decoding_writes(
    trio: Trio, count: int, sampling: SamplingParams, kind: str
) -> None:
    batch = jobs(count, sampling)
    plain = [run_batch(trio.eager, [job])[0] for job in batch]
    drafters = DrafterSelection(trio.fixed[kind], trio.drafts[kind], None)
    accepted = 0
    for mode in MODES:
        drafter = drafters.pick(mode)  # type: ignore[arg-type]
        events = run_batch(trio.fixed[kind], batch, drafter, num_draft_tokens=8)
        for job, expected, got in zip(batch, plain, events, strict=True):
            assert_same_tokens(trio.eager, job, expected, got)
            assert got.finish_reason == expected.finish_reason
            accepted += got.speculation.num_accepted_tokens
    assert accepted > 10 * count


def test_sequences_join_and_leave(trio: Trio) -> None:
    batch = jobs(12, GREEDY)
    plain = [run_batch(trio.eager, [job])[0] for job in batch]
    answers = {f"r{i}": [*batch[i].prompt, *output_ids(plain[i])] for i in range(len(batch))}
    oracle = NoisyOracle(answers, 0.2, VOCAB_SIZE)
    target = trio.fixed["recorded"]
    got = run_batch(target, batch, oracle, num_draft_tokens=4, max_num_seqs=3)
    for job, expected, event in zip(batch, plain, got, strict=True):
        assert_same_tokens(trio.eager, job, expected, event)
    histogram = [event.speculation.acceptance_histogram for event in got]
    assert {k for counts in histogram for k, n in enumerate(counts) if n} == {0, 1, 2, 3, 4}
    assert not fixed_runner(target)._pool._live()
    assert fixed_runner(target)._pool.num_slots == 8


def ragged(runner: ModelRunner, steps: list[list[int]]) -> torch.Tensor:
    """Logits of forwards of three sequences; ``steps`` are their rows, 0 for not taking part."""
    generator = torch.Generator().manual_seed(3)
    caches = [runner.new_cache() for _ in steps[0]]
    found = []
    for sizes in steps:
        blocks = [
            RowBlock(cache, torch.randint(0, 390, (size,), generator=generator).tolist(), size)
            for cache, size in zip(caches, sizes, strict=True)
            if size
        ]
        found.append(runner.forward(blocks))
    return torch.cat(found)


def test_logits_agree_and_rejected_rows_are_forgotten(trio: Trio) -> None:
    steps = [[90, 20, 1], [9, 9, 3], [0, 17, 1], [1, 0, 5], [1, 40, 70], [2, 1, 2]]
    expected = ragged(trio.eager.runner, steps)
    for target in trio.fixed.values():
        runner = target.runner
        torch.testing.assert_close(ragged(runner, steps), expected, atol=2e-4, rtol=2e-4)
        cache = runner.new_cache()
        runner.forward([RowBlock(cache, [7] * 20, 0)])
        first = runner.forward([RowBlock(cache, [5, 6, 8], 3)])
        cache.truncate(20)
        runner.forward([RowBlock(cache, [9] * 9, 9)])
        cache.truncate(20)
        torch.testing.assert_close(runner.forward([RowBlock(cache, [5, 6, 8], 3)]), first)


def test_kept_rows_only(llama: LoadedModel) -> None:
    runner = static(llama).runner
    caches = [runner.new_cache(), runner.new_cache()]
    whole = runner.forward([RowBlock(caches[0], [5, 6, 7], 3), RowBlock(caches[1], [8], 1)])
    for cache in caches:
        cache.truncate(0)
    part = runner.forward([RowBlock(caches[0], [5, 6, 7], 1), RowBlock(caches[1], [8], 0)])
    torch.testing.assert_close(part, whole[2:3])
    none = runner.forward([RowBlock(caches[0], [9], 0)])
    assert none.shape == (0, VOCAB_SIZE)
    assert [cache.length for cache in caches] == [4, 1]


@pytest.mark.parametrize("kind", [static, recorded])
def test_buffers_grow_in_the_middle_of_sequences(
    llama: LoadedModel, kind: Callable[[LoadedModel], LoadedModel]
) -> None:
    target = kind(llama)
    batch = [Job([5, 6, 7] * 80, 60), Job([9, 8] * 20, 60), Job([3] * 250, 30)]
    plain = [run_batch(llama, [job])[0] for job in batch]
    pool = fixed_runner(target)._pool
    assert pool.capacity == MIN_CAPACITY
    for job, expected, got in zip(batch, plain, run_batch(target, batch), strict=True):
        assert_same_tokens(llama, job, expected, got)
    assert pool.capacity == 2 * MIN_CAPACITY
    assert pool.version == 1


def test_more_sequences_than_slots(llama: LoadedModel) -> None:
    target = recorded(llama)
    batch = jobs(11, GREEDY)
    plain = [run_batch(llama, [job])[0] for job in batch]
    got = run_batch(target, batch, max_num_seqs=11)
    for job, expected, event in zip(batch, plain, got, strict=True):
        assert_same_tokens(llama, job, expected, event)
    assert fixed_runner(target)._pool.num_slots == 16


def test_gaps_are_closed_so_that_few_sequences_take_few_slots(llama: LoadedModel) -> None:
    runner = fixed_runner(static(llama))
    alone = llama.runner.new_cache()
    caches = [runner.new_cache() for _ in range(5)]
    for i, cache in enumerate(caches):
        runner.forward([RowBlock(cache, [i + 5] * 30, 0)])
    llama.runner.forward([RowBlock(alone, [9] * 30, 0)])
    last = caches.pop()
    assert last.slot == 4
    caches.clear()
    del cache
    logits = runner.forward([RowBlock(last, [7, 8], 2)])
    assert last.slot == 0
    expected = llama.runner.forward([RowBlock(alone, [7, 8], 2)])
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=2e-4)


def test_a_slot_forgets_what_was_not_finite(llama: LoadedModel) -> None:
    """Else a weight of zero times NaN would reach the next sequence."""
    runner = fixed_runner(recorded(llama))
    cache = runner.new_cache()
    runner.forward([RowBlock(cache, [5] * 30, 0)])
    for buffer in (*runner._pool.keys.values(), *runner._pool.values.values()):
        buffer[cache.slot].fill_(torch.nan)
    del cache
    cache = runner.new_cache()
    assert cache.slot == 0
    for rows in (3, 30, 3):
        assert runner.forward([RowBlock(cache, [5] * rows, rows)]).isfinite().all()


def test_positions_end_where_the_model_ends(tmp_path: Path) -> None:
    """Padding rows have positions that the model can embed, also beside the last ones."""
    eager = load_tiny(make_tiny_model(tmp_path, "gpt2", n_positions=64))
    batch = [Job([5, 6] * 10, 44), Job([5, 6], 30)]
    plain = [run_batch(eager, [job])[0] for job in batch]
    answers = {f"r{i}": [*batch[i].prompt, *output_ids(plain[i])] for i in range(2)}
    oracle = NoisyOracle(answers, 0.1, VOCAB_SIZE)
    for job, expected, got in zip(
        batch, plain, run_batch(static(eager), batch, oracle, num_draft_tokens=8), strict=True
    ):
        assert_same_tokens(eager, job, expected, got)
    assert len(output_ids(plain[0])) > 30


class Seen(EagerSteps):
    """Notes the shapes that are run."""

    shapes: set[tuple[int, ...]]

    def run(self, inputs: torch.Tensor, num_keys: int) -> torch.Tensor:
        self.shapes.add((*inputs.shape[1:], num_keys))
        return super().run(inputs, num_keys)


def test_there_are_few_shapes_and_large_steps_have_none(llama: LoadedModel) -> None:
    Seen.shapes = set()
    runner = FixedShapeRunner(llama.runner.model, CPU, "packed", Seen, max_num_seqs=64)
    runner.check_supported("tiny")
    assert {(1, 1, MIN_CAPACITY)} == Seen.shapes
    runner.warm_up()
    expected = {(slots, rows, MIN_CAPACITY) for slots in (1, 2, 4, 8) for rows in ROW_BUCKETS}
    assert expected == Seen.shapes
    rng = random.Random(0)
    for _ in range(60):
        caches = [runner.new_cache() for _ in range(rng.randint(1, 8))]
        blocks = [RowBlock(c, [5] * rng.randint(1, ROW_BUCKETS[-1]), 1) for c in caches]
        assert len(runner.forward(blocks)) == len(blocks)
        del caches, blocks
    assert expected == Seen.shapes
    cache = runner.new_cache()
    runner.forward([RowBlock(cache, [5] * (ROW_BUCKETS[-1] + 1), 1)])
    caches = [runner.new_cache() for _ in range(MAX_STEP_ROWS // ROW_BUCKETS[-1] + 1)]
    runner.forward([RowBlock(c, [5] * ROW_BUCKETS[-1], 1) for c in caches])
    assert expected == Seen.shapes


def test_one_recording_for_a_shape(llama: LoadedModel) -> None:
    recorder = CpuRecorder(CPU)
    runner = FixedShapeRunner(
        llama.runner.model, CPU, "packed", lambda step, device: GraphSteps(step, device, recorder)
    )
    runner.check_supported("tiny")
    cache = runner.new_cache()
    for _ in range(4):
        runner.forward([RowBlock(cache, [5, 6], 2)])
    assert recorder.recordings == 2  # the check's and this one
    runner.forward([RowBlock(cache, [5] * 300, 0)])  # other buffers: graphs made anew
    runner.forward([RowBlock(cache, [5, 6], 2)])
    assert recorder.recordings == 3


def test_capped_scores(tmp_path: Path) -> None:
    config = Gemma2Config(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, sliding_window=16,
        initializer_range=0.3, attn_logit_softcapping=2.0, query_pre_attn_scalar=16,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    eager = load_tiny(tmp_path)
    steps = [[40, 20, 1], [9, 9, 3], [1, 1, 1]]
    expected = ragged(eager.runner, steps)
    for kind in (static, recorded):
        got = ragged(kind(eager).runner, steps)
        torch.testing.assert_close(got, expected, atol=2e-4, rtol=2e-4)
