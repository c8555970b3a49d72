"""Decoding steps of fixed shapes write what the others write, whoever joins, leaves or grows."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Gemma2Config

from ssd_integrations.backends.local import LocalBackend
from ssd_integrations.errors import InvalidRequestError, UnsupportedModelError
from ssd_integrations.protocol import (
    FinishedEvent,
    SamplingParams,
    SpeculationParams,
    build_request,
    build_sampling,
)
from ssd_workers.engine.attention import ATTENTION_NAME
from ssd_workers.engine.config import DecodeStep, build_engine_config
from ssd_workers.engine.drafters.model import ModelDrafter
from ssd_workers.engine.drafters.selection import DrafterSelection
from ssd_workers.engine.fixed_runner import (
    MAX_STEP_ROWS,
    ROW_BUCKETS,
    FixedShapeRunner,
    make_runner,
)
from ssd_workers.engine.loading import LoadedModel, load_engine_models, load_model
from ssd_workers.engine.runner import ModelRunner, RowBlock
from ssd_workers.engine.slots import MIN_CAPACITY
from ssd_workers.engine.step_executors import EagerSteps, GraphSteps
from ssd_workers.models.store import resolve_model
from ssd_workers.progress import no_progress
from tests.engine_support import (
    Job,
    NoisyOracle,
    assert_same_tokens,
    load_tiny,
    output_ids,
    run_batch,
)
from tests.graph_recorder import CpuRecorder
from tests.tiny import ARCHITECTURES, VOCAB_SIZE, make_tiny_model, make_tokenizer, tiny_config

CPU = torch.device("cpu")
GREEDY = SamplingParams()
SEEDED = SamplingParams(temperature=0.8, top_p=0.95)
MODES = ("off", "ngram", "suffix", "model", "hybrid")


def recorded(model: LoadedModel) -> LoadedModel:
    """``model`` with every step of fixed shapes recorded once and played back."""
    runner = FixedShapeRunner(
        model.runner.model,
        CPU,
        "packed",
        lambda step, device: GraphSteps(step, device, CpuRecorder(device)),
    )
    runner.check_supported("tiny")
    return replace(model, runner=runner)


def static(model: LoadedModel) -> LoadedModel:
    """``model`` with steps of fixed shapes, one operation after the other."""
    runner = make_runner(model.runner.model, CPU, "packed", "static")
    runner.check_supported("tiny")
    return replace(model, runner=runner)


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


def fixed_runner(model: LoadedModel) -> FixedShapeRunner:
    assert isinstance(model.runner, FixedShapeRunner)
    return model.runner


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


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_fixed_step_stays_on_its_device(arch: str) -> None:
    """On the meta device a tensor left on the CPU, or read by the CPU, is an error."""
    config = tiny_config(arch)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME)
    device = torch.device("meta")
    runner = make_runner(model.to(device).eval(), device, "packed", "static")
    runner.check_supported("meta")
    caches = [runner.new_cache(), runner.new_cache()]
    for sizes in ([100, 20], [9, 1], [1, 9]):
        blocks = [RowBlock(c, [1] * n, n) for c, n in zip(caches, sizes, strict=True)]
        logits = runner.forward(blocks)
        assert logits.shape == (sum(sizes), VOCAB_SIZE)
        assert logits.device == device


class WaitsForTheDevice(nn.Module):
    """A layer that looks at its input from Python, as experts' routers may."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, states: torch.Tensor) -> Any:
        return self.inner(states) if states.sum().item() < torch.inf else states


def test_a_model_that_waits_for_the_device_is_refused(tmp_path: Path) -> None:
    model = load_tiny(make_tiny_model(tmp_path))
    layer = model.runner.model.model.layers[1]
    layer.mlp = WaitsForTheDevice(layer.mlp)
    static(model)
    with pytest.raises(UnsupportedModelError, match="not permitted when a graph is") as caught:
        recorded(model)
    assert "decode_step='eager'" in caught.value.remedy


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decode_step": "fast"}, "fast"),
        ({"decode_step": "graphs", "device_map": "auto"}, "device_map=auto"),
        ({"decode_step": "static", "dtype": "int8"}, "dtype='int8'"),
    ],
)
def test_options_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        LocalBackend(model="m", **options)


def test_options_refused_before_loading(tmp_path: Path) -> None:
    source = resolve_model(str(make_tiny_model(tmp_path)))
    with pytest.raises(InvalidRequestError, match="CUDA graphs") as caught:
        load_model(source, "float32", "cpu", no_progress, decode_step="graphs")
    assert "device='cuda'" in caught.value.remedy
    with pytest.raises(InvalidRequestError, match="one device"):
        load_model(
            source, "float32", "cpu", no_progress, decode_step="static", device_map={"": "cpu"}
        )


def backend_texts(path: Path, **options: Any) -> list[str]:
    backend = LocalBackend(model=str(path), dtype="float32", device="cpu", **options)
    texts = []
    try:
        for mode in ("off", "ngram", "model"):
            request = build_request(
                model=str(path),
                prompt="The router restarts, the router",
                sampling=build_sampling(max_tokens=24),
                speculation=SpeculationParams(mode=mode),
            )
            *_, last = backend.generate(request)
            assert isinstance(last, FinishedEvent)
            texts.append(last.text)
    finally:
        backend.close()
    return texts


def test_the_option_reaches_target_and_draft(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path)
    config = build_engine_config(model=str(path), draft_model=str(path), decode_step="static",
                                 dtype="float32", device="cpu", max_num_seqs=2)  # fmt: skip
    for model in load_engine_models(config, no_progress):
        assert model is not None
        assert fixed_runner(model)._pool.num_slots == 2
    expected = backend_texts(path, draft_model=str(path))
    assert backend_texts(path, draft_model=str(path), decode_step="static") == expected


def exact_on(device: str, decode_step: DecodeStep, path: Path, dtype: str = "float32") -> None:
    """Plain text of ``decode_step`` equals eager text, and drafts do not change it."""
    models = [
        load_model(resolve_model(str(path)), dtype, device, no_progress, decode_step=step)  # type: ignore[arg-type]
        for step in ("eager", decode_step)
    ]
    batch = [Job([5, 6, 7] * 10, 20), Job([9, 8], 12)]
    plain = [run_batch(models[0], [job])[0] for job in batch]
    drafter = ModelDrafter(models[1].runner, 512, VOCAB_SIZE)
    for events in (run_batch(models[1], batch), run_batch(models[1], batch, drafter)):
        for job, expected, got in zip(batch, plain, events, strict=True):
            assert_same_tokens(models[0], job, expected, got)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_compiled_steps(tmp_path: Path, arch: str) -> None:
    exact_on("cpu", "compile", make_tiny_model(tmp_path, arch))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("decode_step", ["static", "graphs"])
def test_on_a_gpu(tmp_path: Path, arch: str, decode_step: DecodeStep) -> None:
    exact_on("cuda", decode_step, make_tiny_model(tmp_path, arch))


def test_slots_are_free_once_requests_are_cancelled(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path, eos_token_id=None)
    backend = LocalBackend(
        model=str(path), dtype="float32", device="cpu", decode_step="static", draft_model=str(path)
    )
    try:
        request = build_request(
            model=str(path), prompt="The router", sampling=build_sampling(max_tokens=400)
        )
        events = backend.generate(request)
        next(events)
        next(events)
        assert backend.cancel(request.request_id)
        *_, last = events
        assert isinstance(last, FinishedEvent)
        assert last.finish_reason == "cancelled"
        engine = backend._service()._engine
        assert engine is not None
        pool, deadline = fixed_runner(engine._target)._pool, time.monotonic() + 10
        while pool._live() and time.monotonic() < deadline:  # the engine's thread ends its step
            time.sleep(0.02)
        assert not pool._live()
    finally:
        backend.close()
