"""Which models and options steps of fixed shapes take, and what they give on a device."""

from __future__ import annotations

import gc
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from ssd_integrations.backends.local import LocalBackend
from ssd_integrations.errors import InvalidRequestError, UnsupportedModelError
from ssd_integrations.protocol import (
    FinishedEvent,
    SpeculationParams,
    build_request,
    build_sampling,
)
from ssd_workers.engine.attention import ATTENTION_NAME
from ssd_workers.engine.config import DecodeStep, build_engine_config
from ssd_workers.engine.drafters.model import ModelDrafter
from ssd_workers.engine.fixed_runner import make_runner
from ssd_workers.engine.loading import load_engine_models, load_model
from ssd_workers.engine.runner import RowBlock
from ssd_workers.models.store import resolve_model
from ssd_workers.progress import no_progress
from tests.engine_support import Job, assert_same_tokens, load_tiny, run_batch
from tests.fixed_support import CPU, fixed_runner, recorded, static
from tests.tiny import ARCHITECTURES, VOCAB_SIZE, make_tiny_model, tiny_config


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


class LeavesTheGraph(nn.Module):
    """A layer that torch.compile cannot follow."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    @torch.compiler.disable
    def forward(self, states: torch.Tensor) -> Any:
        return self.inner(states)


def test_a_model_that_cannot_be_compiled_is_refused(tmp_path: Path) -> None:
    model = load_tiny(make_tiny_model(tmp_path)).runner.model
    model.model.layers[1].mlp = LeavesTheGraph(model.model.layers[1].mlp)
    runner = make_runner(model, CPU, "packed", "compile")
    with pytest.raises(UnsupportedModelError, match="fixed shapes") as caught:
        runner.check_supported("tiny")
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


def test_memory_is_free_as_soon_as_the_runner_is(tmp_path: Path) -> None:
    runner = fixed_runner(recorded(load_tiny(make_tiny_model(tmp_path))))
    runner.warm_up()
    weights = weakref.ref(runner.model)
    gc.disable()
    try:
        del runner
        assert weights() is None
    finally:
        gc.enable()


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
def test_compiled_steps(tmp_path: Path) -> None:
    exact_on("cpu", "compile", make_tiny_model(tmp_path, "gemma3"))


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
