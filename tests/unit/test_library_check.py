"""A model that this engine would compute otherwise than transformers is refused at load."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.integrations.moe import ExpertsInterface

from ssd_integrations.errors import UnsupportedModelError
from ssd_workers.engine import library_check
from ssd_workers.engine.attention import ATTENTION_NAME, PackedStep
from ssd_workers.engine.experts import EXPERTS_NAME, is_experts
from ssd_workers.engine.int8 import cpu_is_exact
from ssd_workers.engine.loading import LoadedModel, load_model
from ssd_workers.engine.runner import ModelRunner
from ssd_workers.models.store import resolve_model
from ssd_workers.progress import no_progress
from tests.architectures import MIXTURES, REFUSED, WINDOW, make_model


def load(path: Path, dtype: str = "float32") -> LoadedModel:
    return load_model(resolve_model(str(path)), dtype, "cpu", no_progress)  # type: ignore[arg-type]


@pytest.mark.parametrize("arch", REFUSED)
def test_refused_with_the_mechanism(arch: str, tmp_path: Path) -> None:
    path = make_model(tmp_path, arch)
    with pytest.raises(UnsupportedModelError, match=REFUSED[arch][1]) as caught:
        load(path)
    assert "cannot be decoded by this engine" in caught.value.message


@pytest.mark.parametrize(
    ("arch", "wrong"),
    [
        ("gemma2", {"softcap": None}),
        ("mistral", {"window": None}),
        ("gemma3_text", {"window": WINDOW}),
        ("llama", {"scaling": 0.2}),
        ("mixtral", {"scaling": 0.2}),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_attention_that_leaves_something_out_is_noticed(
    arch: str,
    wrong: dict[str, Any],
    dtype: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SSD_CACHE_DIR", str(tmp_path / "cache"))
    path = make_model(tmp_path / "model", arch)
    attend = PackedStep.attend

    def otherwise(step: PackedStep, layer: int, query: torch.Tensor, **how: Any) -> torch.Tensor:
        return attend(step, layer, query, **{**how, **wrong})

    monkeypatch.setattr(PackedStep, "attend", otherwise)
    with pytest.raises(UnsupportedModelError, match="away from those that transformers"):
        load(path, dtype)


def test_rows_that_see_each_other_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positions of a model are those of its own sequence, not those of the longest."""
    from transformers.models.gpt2 import modeling_gpt2 as gpt2

    forward = gpt2.GPT2Model.forward

    def counted(self: Any, *args: Any, cache: Any = None, **kwargs: Any) -> Any:
        if cache is not None:
            kwargs["position_ids"] = (
                torch.arange(kwargs["position_ids"].shape[1])[None] + cache.get_seq_length()
            )
        return forward(self, *args, cache=cache, **kwargs)

    monkeypatch.setattr(gpt2.GPT2Model, "forward", counted)
    with pytest.raises(UnsupportedModelError, match="away from those that transformers"):
        load(make_model(tmp_path, "gpt2"))


@pytest.mark.skipif(not cpu_is_exact(), reason="this processor has no exact int8 products")
def test_last_bits_that_depend_on_the_batch_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llama import modeling_llama as llama

    monkeypatch.setenv("SSD_CACHE_DIR", str(tmp_path / "cache"))
    path = make_model(tmp_path / "model", "llama")
    load(path, "int8")
    forward = llama.LlamaRMSNorm.forward

    def rounded(self: Any, x: torch.Tensor) -> torch.Tensor:
        return forward(self, x) * (1 + 1e-6 * (x.shape[-2] > 1))

    monkeypatch.setattr(llama.LlamaRMSNorm, "forward", rounded)
    with pytest.raises(UnsupportedModelError, match="depends on the tokens computed beside it"):
        load(path, "int8")
    load(path)  # float32 promises less of a model that does not choose among experts


def test_a_near_tie_between_experts_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_model(tmp_path, "mixtral")
    tries: list[int] = []
    original = library_check.compare

    def tied(*args: Any) -> library_check.Comparison:
        tries.append(args[-1])
        found = original(*args)
        return replace(found, difference=found.difference + (1.0 if len(tries) < 3 else 0.0))

    monkeypatch.setattr("ssd_workers.engine.runner.compare", tied)
    load(path)
    assert tries == [0, 1, 2]


def test_small_differences_are_seen_through_coarse_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounding to 16 bits moves logits further than this, and is kept out."""
    path = make_model(tmp_path, "llama")
    attend = PackedStep.attend

    def scaled(step: PackedStep, layer: int, query: torch.Tensor, **how: Any) -> torch.Tensor:
        return attend(step, layer, query, **{**how, "scaling": how["scaling"] * 1.005})

    monkeypatch.setattr(PackedStep, "attend", scaled)
    with pytest.raises(UnsupportedModelError, match="away from those that transformers"):
        load(path, "bfloat16")


@pytest.mark.parametrize("arch", ["llama", "mixtral", "gpt2"])
def test_weights_are_widened_for_the_check_alone(arch: str, tmp_path: Path) -> None:
    model = load(make_model(tmp_path, arch), "bfloat16").runner.model
    before = dict(model.named_parameters())
    tokens = torch.arange(5, 15)[None]
    with library_check.in_float32(model), library_check._of_the_library(model):
        assert model(tokens).logits.dtype == torch.float32
        with pytest.raises((IndexError, RuntimeError)):
            model(tokens + 10_000)
    after = dict(model.named_parameters())
    assert before.keys() == after.keys()
    assert all(after[name] is parameter for name, parameter in before.items())
    assert {p.dtype for p in after.values()} == {torch.bfloat16}


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_failure_in_the_middle_of_the_check_is_a_refusal(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llama import modeling_llama as llama

    monkeypatch.setenv("SSD_CACHE_DIR", str(tmp_path / "cache"))
    forward = llama.LlamaMLP.forward

    def short(self: Any, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] > 8:
            raise ValueError("no more than 8 rows")
        return forward(self, x)

    monkeypatch.setattr(llama.LlamaMLP, "forward", short)
    with pytest.raises(UnsupportedModelError, match="no more than 8 rows"):
        load(make_model(tmp_path / "model", "llama"), dtype)


@pytest.mark.parametrize("arch", MIXTURES)
def test_experts_of_the_library_are_noticed(
    arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where its sorted products are not row-exact, which is everywhere that we know of."""
    library = ExpertsInterface._global_mapping["grouped_mm"]
    path = make_model(tmp_path, arch)
    experts = next(m for m in load(path).runner.model.modules() if is_experts(m))
    x, index = torch.randn(20, 64), torch.arange(20)[:, None] % 4
    with torch.inference_mode():
        together = library(experts, x, index, torch.ones(20, 1))
        alone = library(experts, x[:1], index[:1], torch.ones(1, 1))
    if torch.equal(alone, together[:1]):
        pytest.skip("row-exact on this machine")
    monkeypatch.setitem(ExpertsInterface._global_mapping, EXPERTS_NAME, library)
    with pytest.raises(UnsupportedModelError, match="depends on the tokens computed beside it"):
        load(path)


@pytest.mark.parametrize("arch", ["mistral", "gemma2", "phi3", "mixtral"])
def test_the_check_leaves_the_model_as_it_was(arch: str, tmp_path: Path) -> None:
    model = load(make_model(tmp_path, arch)).runner.model
    assert model.config._attn_implementation == ATTENTION_NAME
    assert model.config._experts_implementation == EXPERTS_NAME
    if arch != "mixtral":
        assert model.config.sliding_window == WINDOW
    own = {getattr(module, "sliding_window", WINDOW) for module in model.modules()}
    assert own <= {WINDOW, None}


def test_the_check_costs_few_short_forwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    forward = ModelRunner._forward

    def counted(self: ModelRunner, blocks: Any, *args: Any, **kwargs: Any) -> Any:
        rows.append(sum(len(block.token_ids) for block in blocks))
        return forward(self, blocks, *args, **kwargs)

    monkeypatch.setattr(ModelRunner, "_forward", counted)
    load(make_model(tmp_path, "llama"))
    assert len(rows) == 4  # and one of the library's
    assert sum(rows) < 25
