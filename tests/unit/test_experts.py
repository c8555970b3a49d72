"""Experts and routers: a row has the same bits alone and in any batch; int8 is kept on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.nn import functional
from transformers.integrations.moe import ExpertsInterface

from ssd_integrations.errors import UnsupportedModelError
from ssd_workers.engine import row_exact_functions
from ssd_workers.engine.experts import EXPERTS_NAME, is_experts
from ssd_workers.engine.int8 import cpu_is_exact
from ssd_workers.engine.loading import load_model
from ssd_workers.engine.row_exact_functions import (
    FunctionWatch,
    RowExactFunctions,
    make_functions_exact,
    row_exact_linear,
)
from ssd_workers.models.store import resolve_model
from ssd_workers.progress import no_progress
from tests.architectures import MIXTURES, make_model

needs_int8 = pytest.mark.skipif(
    not cpu_is_exact(), reason="this processor has no exact int8 products (VNNI or AMX)"
)


@pytest.mark.parametrize("shape", [(8, 64), (64, 64), (96, 1100), (400, 64), (1, 64), (2100, 128)])
@pytest.mark.parametrize("counts", [None, (16, 16), (1, 1)])
def test_products_are_row_exact(
    shape: tuple[int, int], counts: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if counts is not None:
        monkeypatch.setattr(row_exact_functions, "_alike", lambda weight: counts)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator)
    bias = torch.randn(shape[0], generator=generator)
    x = torch.randn(1, 300, shape[1], generator=generator)
    alone = torch.cat([row_exact_linear(row, weight, bias) for row in x.split(1, dim=1)], dim=1)
    torch.testing.assert_close(alone, functional.linear(x, weight, bias), atol=1e-3, rtol=1e-4)
    for first, count in ((0, 300), (3, 2), (17, 15), (100, 16), (50, 33), (1, 129)):
        part = row_exact_linear(x[:, first : first + count], weight, bias)
        assert torch.equal(part, alone[:, first : first + count])


def test_functions_inside_are_row_exact() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(7, 60, generator=generator)
    gate = torch.randn(1, 60, generator=generator)
    x = torch.randn(100, 60, generator=generator) * 3

    def router(rows: torch.Tensor) -> torch.Tensor:
        scores = functional.linear(rows, weight).sigmoid() + rows @ weight.T
        return torch.cat([scores, functional.silu(functional.linear(rows, gate))], dim=1)

    with RowExactFunctions():
        whole = router(x)
        for count in (1, 2, 9, 31, 77):
            assert torch.equal(router(x[:count]), whole[:count])
    torch.testing.assert_close(whole, router(x), atol=1e-5, rtol=1e-5)


class Gate(nn.Module):
    """A module with a product and a sigmoid of its own."""

    def __init__(self, ranking: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 60, generator=torch.Generator().manual_seed(1)))
        self.norm = nn.LayerNorm(60)
        self.ranking = ranking

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = functional.linear(self.norm(x), self.weight)
        self.ranking(scores)
        return scores.sigmoid()


@pytest.mark.parametrize(
    ("ranking", "ranks"),
    [
        (lambda x: x.topk(2), True),
        (lambda x: torch.topk(x, 2), True),
        (lambda x: x.max(dim=-1), True),
        (lambda x: x.argmax(-1), True),
        (lambda x: x.max(), False),
        (lambda x: x.softmax(-1), False),
    ],
)
def test_functions_of_modules_are_noticed_and_replaced(
    ranking: Callable[[torch.Tensor], object], ranks: bool
) -> None:
    gate = Gate(ranking)
    model = nn.Sequential(nn.Softmax(-1), gate)
    x = torch.randn(100, 60, generator=torch.Generator().manual_seed(0))
    with FunctionWatch(model) as watch:
        plain = model(x)
    assert watch.callers == {gate}
    assert watch.ranks == ranks
    make_functions_exact(watch.callers)
    whole = model(x)
    torch.testing.assert_close(whole, plain)
    for count in (1, 2, 9, 31, 77):
        assert torch.equal(model(x[:count]), whole[:count])
    # Nothing is left behind where a module fails.
    with pytest.raises(RuntimeError):
        model(x[:, :5])
    assert not torch.overrides._get_current_function_mode_stack()


@pytest.mark.parametrize("arch", MIXTURES)
def test_experts_are_row_exact_and_those_of_the_library(
    arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSD_CACHE_DIR", str(tmp_path / "cache"))
    path = make_model(tmp_path / "model", arch)
    model = load_model(resolve_model(str(path)), "float32", "cpu", no_progress).runner.model
    experts = next(module for module in model.modules() if is_experts(module))
    x = torch.randn(40, 64)
    index = torch.stack([torch.randperm(4)[:2] for _ in range(40)])
    weights = torch.rand(40, 2)
    ours = ExpertsInterface._global_mapping[EXPERTS_NAME]
    whole = ours(experts, x, index, weights)
    alone = [ours(experts, *(t[i : i + 1] for t in (x, index, weights))) for i in range(40)]
    assert torch.equal(torch.cat(alone), whole)
    library = ExpertsInterface._global_mapping["batched_mm"]
    torch.testing.assert_close(whole, library(experts, x, index, weights), atol=1e-3, rtol=1e-4)


@needs_int8
@pytest.mark.parametrize("arch", MIXTURES)
def test_int8_experts_are_made_once_and_read_again(
    arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSD_CACHE_DIR", str(tmp_path / "cache"))
    source = resolve_model(str(make_model(tmp_path / "model", arch)))
    stages: list[str] = []

    def progress(stage: str, done: float, total: float, unit: str) -> None:
        stages.append(stage)
        assert done <= total

    first = load_model(source, "int8", "cpu", progress)
    assert "quantise to int8" in stages
    stages.clear()
    second = load_model(source, "int8", "cpu", progress)
    assert "quantise to int8" not in stages
    assert not any(is_experts(module) for module in second.runner.model.modules())
    # No float weights are left beside embeddings and routers.
    left = {name for name, p in second.runner.model.named_parameters() if p.ndim >= 2}
    assert all("embed" in name or "gate" in name for name in left), left
    (file,) = (tmp_path / "cache" / "int8").glob("*/int8.safetensors")
    with safe_open(file, framework="pt") as stored:
        packed = stored.get_tensor("model.layers.0.mlp.experts.gate_up_proj.weight")
    assert packed.dtype == torch.int8
    assert packed.ndim == 3
    from ssd_workers.engine.runner import RowBlock

    tokens = list(range(5, 30))
    logits = [
        m.runner.forward([RowBlock(m.runner.new_cache(), tokens, 25)]) for m in (first, second)
    ]
    assert torch.equal(*logits)


@needs_int8
def test_weights_of_another_make_are_refused_in_int8(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would be computed in float32, and be as large as ever."""
    from transformers.models.llama import modeling_llama as llama

    def mixed(self: Any, config: Any, init: Any = llama.LlamaMLP.__init__) -> None:
        init(self, config)
        self.mixing = torch.nn.Parameter(torch.randn(4, 64, 64) / 8)

    def forward(self: Any, x: torch.Tensor, forward: Any = llama.LlamaMLP.forward) -> torch.Tensor:
        return forward(self, x @ self.mixing[1])

    monkeypatch.setattr(llama.LlamaMLP, "__init__", mixed)
    monkeypatch.setattr(llama.LlamaMLP, "forward", forward)
    monkeypatch.setenv("SSD_CACHE_DIR", str(tmp_path / "cache"))
    source = resolve_model(str(make_model(tmp_path / "model", "llama")))
    load_model(source, "float32", "cpu", no_progress)
    with pytest.raises(UnsupportedModelError, match=r"int8 does not cover, such as '.*mixing"):
        load_model(source, "int8", "cpu", no_progress)
