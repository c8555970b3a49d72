"""A row's activations and int8 logits have the same bits alone, in any batch, on any threads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN

from ssd_workers.engine.fused_layers import FusedFeedForward
from ssd_workers.engine.int8 import cpu_is_exact
from ssd_workers.engine.loading import load_model
from ssd_workers.engine.row_exact import RowExactActivation
from ssd_workers.engine.runner import RowBlock
from ssd_workers.models.store import resolve_model
from ssd_workers.progress import no_progress
from tests.tiny import VOCAB_SIZE, make_tiny_model


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_pytorch_tanh", "gelu_new", "sigmoid"])
@pytest.mark.parametrize("width", [77, 4864, 8960])
def test_activations_are_row_exact(threads: int, name: str, width: int) -> None:
    torch.manual_seed(0)
    exact = RowExactActivation(ACT2FN[name])
    # Half of a fused product, as an int8 model hands it over: rows with gaps between them.
    fused = torch.randn(1, 40, 2 * width) * 4
    for x in (fused[..., :width], fused[..., :width].contiguous()):
        alone = torch.cat([exact(x[:, i : i + 1]) for i in range(40)], dim=1)
        torch.testing.assert_close(alone, ACT2FN[name](x))
        for rows in (2, 9, 11, 23, 40):
            assert torch.equal(exact(x[:, :rows]), alone[:, :rows])


@pytest.mark.skipif(not cpu_is_exact(), reason="this processor has no exact int8 products")
@pytest.mark.parametrize(
    ("arch", "fused", "options"),
    [
        ("llama", False, {"hidden_act": "gelu", "intermediate_size": 128}),
        ("llama", True, {"hidden_act": "silu", "intermediate_size": 1100}),
        ("gemma3", True, {"intermediate_size": 77}),
        ("qwen3", False, {"hidden_act": "sigmoid", "intermediate_size": 4864, "hidden_size": 60}),
        ("gpt2", False, {"activation_function": "gelu", "n_inner": 4870}),
    ],
)
def test_logits_are_row_exact(
    threads: int,
    arch: str,
    fused: bool,
    options: dict[str, object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SSD_CACHE_DIR", str(tmp_path / "cache"))
    path = make_tiny_model(tmp_path / "model", arch, **options)
    runner = load_model(resolve_model(str(path)), "int8", "cpu", no_progress).runner
    kind = FusedFeedForward if fused else RowExactActivation
    assert any(isinstance(module, kind) for module in runner.model.modules())
    ids = torch.randint(3, VOCAB_SIZE, (70,)).tolist()
    cache = runner.new_cache()
    alone = torch.cat([runner.forward([RowBlock(cache, [token], 1)]) for token in ids])
    for rows in (2, 11, 70):
        cache = runner.new_cache()
        parts = [ids[at : at + rows] for at in range(0, len(ids), rows)]
        got = torch.cat([runner.forward([RowBlock(cache, part, len(part))]) for part in parts])
        assert torch.equal(got, alone)


def test_other_modules_are_left_alone() -> None:
    from ssd_workers.engine.row_exact import make_activations_exact

    model = nn.Sequential(nn.Linear(2, 2), nn.SiLU(), nn.Sequential(nn.GELU(), nn.LayerNorm(2)))
    make_activations_exact(model)
    kinds = [type(module).__name__ for module in (model[0], model[1], model[2][0], model[2][1])]
    assert kinds == ["Linear", "RowExactActivation", "GELU", "LayerNorm"]
