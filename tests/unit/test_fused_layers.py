"""Fused layers replace what they reproduce, and nothing else."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, CohereConfig, GraniteConfig, Olmo2Config
from transformers.activations import ACT2FN

from ssd_workers.engine import loading
from ssd_workers.engine.int8 import cpu_is_exact
from ssd_workers.engine.runner import ModelRunner, RowBlock
from ssd_workers.models.store import resolve_model
from ssd_workers.progress import no_progress
from tests.tiny import VOCAB_SIZE, make_tiny_model, make_tokenizer

pytestmark = pytest.mark.skipif(
    not cpu_is_exact(), reason="this processor has no exact int8 products (VNNI or AMX)"
)

IDS = torch.randint(3, VOCAB_SIZE, (100,), generator=torch.Generator().manual_seed(0)).tolist()


def load(
    path: Path, monkeypatch: pytest.MonkeyPatch, *, fuse: bool = True, attention: str = "packed"
) -> ModelRunner:
    with monkeypatch.context() as patch:
        patch.setenv("SSD_CACHE_DIR", str(path.parent / "cache"))
        if not fuse:
            patch.setattr(ModelRunner, "fuse_layers", lambda self, context_length: 0)
        return loading.load_model(
            resolve_model(str(path)), "int8", "cpu", no_progress,
            attention=attention,  # type: ignore[arg-type]
        ).runner  # fmt: skip


def fused_kinds(runner: ModelRunner) -> dict[str, int]:
    names = Counter(type(module).__name__ for module in runner.model.modules())
    return {name: count for name, count in names.items() if name.startswith("Fused")}


def logits(runner: ModelRunner) -> torch.Tensor:
    return runner.forward([RowBlock(runner.new_cache(), IDS, len(IDS))])


def check_against_unfused(path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    fused, plain = load(path, monkeypatch), load(path, monkeypatch, fuse=False)
    assert fused_kinds(plain) == {}
    a, b = logits(fused), logits(plain)
    assert (a - b).norm() / b.norm() < 0.05  # a value may be rounded to the next int8 level
    cache = fused.new_cache()
    alone = torch.cat([fused.forward([RowBlock(cache, [token], 1)]) for token in IDS])
    assert torch.equal(alone, a)
    return fused_kinds(fused)


@pytest.mark.parametrize(
    ("arch", "layers", "norms"),
    [("llama", 2, 5), ("qwen3", 2, 5), ("gemma3", 3, 13), ("gpt2", 0, 0)],
)
def test_what_is_fused(
    arch: str, layers: int, norms: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = check_against_unfused(make_tiny_model(tmp_path / "model", arch), monkeypatch)
    expected = {"FusedRMSNorm": norms, "FusedFeedForward": layers, "FusedAttention": layers}
    if arch != "gemma3":  # whose layers have four norms
        expected["FusedDecoderLayer"] = layers
    assert kinds == {name: count for name, count in expected.items() if count}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        # Rotates neighbouring features rather than halves.
        (CohereConfig, {"FusedFeedForward": 2}),
        # Normalises all heads together.
        (Olmo2Config, {"FusedRMSNorm": 9, "FusedFeedForward": 2}),
        # Scales its scores and residuals by settings of its own.
        (GraniteConfig, {"FusedRMSNorm": 5, "FusedFeedForward": 2, "FusedAttention": 2}),
    ],
)
def test_other_models_keep_what_is_theirs(
    config: type, expected: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    settings = config(
        vocab_size=VOCAB_SIZE, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3, pad_token_id=0,
        eos_token_id=2, bos_token_id=None, residual_multiplier=0.3,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(settings).save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    assert check_against_unfused(tmp_path / "model", monkeypatch) == expected


@pytest.mark.parametrize("name", ["gelu", "relu", "sigmoid", "tanh"])
def test_other_activation_functions_are_left_alone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert name in ACT2FN
    path = make_tiny_model(tmp_path / "model", "llama", hidden_act=name)
    assert "FusedFeedForward" not in check_against_unfused(path, monkeypatch)


def test_a_layer_that_computes_something_else_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks like any other, and gives other values."""
    from transformers.models.llama import modeling_llama as llama

    plain_mlp, plain_norm = llama.LlamaMLP.forward, llama.LlamaRMSNorm.forward
    monkeypatch.setattr(llama.LlamaMLP, "forward", lambda self, x: 1.05 * plain_mlp(self, x))
    monkeypatch.setattr(llama.LlamaRMSNorm, "forward", lambda self, x: plain_norm(self, x) + 1e-3)
    rotate = llama.apply_rotary_pos_emb
    monkeypatch.setattr(
        llama, "apply_rotary_pos_emb", lambda q, k, cos, sin, **kw: rotate(q, k, cos, -sin, **kw)
    )
    runner = load(make_tiny_model(tmp_path / "model", "llama"), monkeypatch)
    assert fused_kinds(runner) == {}


def test_a_layer_that_computes_distant_positions_otherwise_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As models that scale their queries beyond the length they were first trained on."""
    from transformers.models.llama import modeling_llama as llama

    rotate = llama.apply_rotary_pos_emb

    def scaled(q, k, cos, sin, **kwargs):  # type: ignore[no-untyped-def]
        q, k = rotate(q, k, cos, sin, **kwargs)
        # The last feature turns so slowly that its angle tells near from far.
        far = cos[:, None, :, -1:] < 0.999
        return torch.where(far, 1.5 * q, q), k

    monkeypatch.setattr(llama, "apply_rotary_pos_emb", scaled)
    runner = load(make_tiny_model(tmp_path / "model", "llama"), monkeypatch)
    kinds = fused_kinds(runner)
    assert kinds == {"FusedRMSNorm": 5, "FusedFeedForward": 2}


def test_another_attention_that_was_asked_for_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = load(make_tiny_model(tmp_path / "model", "llama"), monkeypatch, attention="sdpa")
    assert fused_kinds(runner) == {"FusedRMSNorm": 5, "FusedFeedForward": 2}
