"""Which layers of an int8 model are replaced by fused ones.

A replacement must compute what the layer computed before: each one is tried on the inputs of a
real forward, and a layer whose output it does not reproduce stays as it is. So this needs no list
of architectures: RMS norms, gated feed-forward layers, attention with half-split rotary embeddings
and decoder layers made of those are recognised by what they contain and proven by what they return.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from ssd_workers.engine.attention import PackedStep
from ssd_workers.engine.fused_layers import (
    FusedAttention,
    FusedDecoderLayer,
    FusedFeedForward,
    FusedRMSNorm,
)
from ssd_workers.engine.int8 import Int8Linear, Int8Slice
from ssd_workers.engine.kernels import Floats
from ssd_workers.engine.row_exact import RowExactActivation

# How far, relative to its size, an output may be from the original's. Float operations in another
# order differ in the last bits; behind them, a value may now and then be rounded to the other of
# two neighbouring int8 levels. What is computed in another way is much further off.
_FLOAT_TOLERANCE = 1e-5
_INT8_TOLERANCE = 1e-2

# Activation functions of the form x * sigmoid(linear * x + cubic * x**3).
_GELU = 2 * (2 / np.pi) ** 0.5
_GATES = ((1.0, 0.0), (_GELU, _GELU * 0.044715), (1.702, 0.0))

_LAYER_PARTS = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")


@dataclass(frozen=True)
class Seen:
    """What a module was called with, and what it returned."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: torch.Tensor
    is_pair: bool

    def agrees(self, result: Any, tolerance: float) -> bool:
        """Whether ``result`` is what was returned, up to ``tolerance`` of its size."""
        is_pair = isinstance(result, tuple)
        return is_pair == self.is_pair and _agree(
            result[0] if is_pair else result, self.output, tolerance
        )


class Recorder:
    """Records the calls of every module of ``model`` that could be replaced."""

    def __init__(self, model: nn.Module) -> None:
        self.seen: dict[nn.Module, list[Seen]] = {}
        self._hooks = [
            module.register_forward_hook(self._record, with_kwargs=True)
            for module in model.modules()
            if any(True for _ in _kinds(module))
        ]

    def _record(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        is_pair = isinstance(output, tuple)
        if is_pair and len(output) != 2:
            return
        tensor = output[0] if is_pair else output
        seen = Seen(args, kwargs, tensor.clone(), is_pair)
        self.seen.setdefault(module, []).append(seen)

    def close(self) -> None:
        """Stop recording."""
        for hook in self._hooks:
            hook.remove()


def fuse_layers(model: nn.Module, recorder: Recorder, steps: Sequence[PackedStep]) -> int:
    """Replace what can be replaced exactly, and return the number of replaced layers.

    Parameters:
      model: an int8 model on the CPU.
      recorder: that has seen forwards of it; a replacement must reproduce every one.
      steps: of those forwards; their caches are written once more with the same values.
    """
    replaced = 0
    # Children before parents: a decoder layer is put together from fused parts.
    for parent in reversed(list(model.modules())):
        for name, child in list(parent.named_children()):
            seen = recorder.seen.get(child)
            if seen is None:
                continue
            for candidate, tolerance in _candidates(child, seen, steps):
                if all(s.agrees(candidate(*s.args, **s.kwargs), tolerance) for s in seen):
                    setattr(parent, name, candidate)
                    replaced += 1
                    break
    return replaced


def _agree(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
    if a.shape != b.shape:
        return False
    return bool(torch.linalg.vector_norm(a - b) <= tolerance * torch.linalg.vector_norm(b))


def _kinds(module: nn.Module) -> Iterator[str]:
    """What ``module`` could be replaced by, judged by what it contains."""
    if type(module).__name__.endswith("RMSNorm"):
        yield "norm"
    if _joint(module, "gate_proj", "up_proj") and _linear(module, "down_proj"):
        yield "feed-forward"
    if _joint(module, "q_proj", "k_proj", "v_proj") and _linear(module, "o_proj"):
        yield "attention"
    if all(isinstance(getattr(module, part, None), nn.Module) for part in _LAYER_PARTS):
        yield "decoder layer"


def _candidates(
    module: nn.Module, seen: Sequence[Seen], steps: Sequence[PackedStep]
) -> Iterator[tuple[nn.Module, float]]:
    for kind in _kinds(module):
        if kind == "norm":
            for weight, eps in _norm_settings(module):
                yield FusedRMSNorm(weight, eps), _FLOAT_TOLERANCE
        elif kind == "feed-forward":
            gate_up, down = _joint(module, "gate_proj", "up_proj"), _linear(module, "down_proj")
            factors = _gate_factors(module)
            if gate_up and down and factors and not len(gate_up.bias):
                yield FusedFeedForward(gate_up, down, *factors), _INT8_TOLERANCE
        elif all(_gets(s, "position_embeddings") and _gets(s, "ssd_step") for s in seen):
            fused = _attention(module, steps) if kind == "attention" else _decoder_layer(module)
            if fused is not None:
                yield fused, _INT8_TOLERANCE


def _gets(seen: Seen, name: str) -> bool:
    return seen.kwargs.get(name) is not None


def _joint(module: nn.Module, *names: str) -> Int8Linear | None:
    """The one product behind the children ``names``, if that is what they are."""
    parts = [getattr(module, name, None) for name in names]
    if not all(isinstance(part, Int8Slice) for part in parts):
        return None
    fused = {part.fused for part in parts if isinstance(part, Int8Slice)}
    return fused.pop().linear if len(fused) == 1 else None


def _linear(module: nn.Module, name: str) -> Int8Linear | None:
    child = getattr(module, name, None)
    return child if isinstance(child, Int8Linear) else None


def _norm_settings(module: nn.Module) -> Iterator[tuple[Floats, float]]:
    """Weights and epsilons that ``module`` may normalise with: some models add 1 to theirs."""
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if isinstance(weight, torch.Tensor) and weight.ndim == 1 and isinstance(eps, float):
        values = weight.detach().numpy().copy()
        yield values, eps
        yield values + np.float32(1), eps


def _gate_factors(module: nn.Module) -> tuple[float, float] | None:
    """The form of the module's activation function, found by its values."""
    act = getattr(module, "act_fn", None)
    if not isinstance(act, nn.Module):
        return None
    x = torch.linspace(-12, 12, 4096)
    values = (act.inner if isinstance(act, RowExactActivation) else act)(x)
    for linear, cubic in _GATES:
        if torch.allclose(x * torch.sigmoid(linear * x + cubic * x**3), values, atol=1e-5):
            return linear, cubic
    return None


def _attention(module: nn.Module, steps: Sequence[PackedStep]) -> nn.Module | None:
    qkv, out = _joint(module, "q_proj", "k_proj", "v_proj"), _linear(module, "o_proj")
    layer, dim = getattr(module, "layer_idx", None), getattr(module, "head_dim", None)
    if qkv is None or out is None or not isinstance(layer, int) or not isinstance(dim, int):
        return None
    calls = {step.attended.get(layer) if step.packs_rows else None for step in steps}
    call = calls.pop() if len(calls) == 1 else None
    norms = _head_norms(module, dim)
    # Query heads times their dimension is what the output projection reads.
    kv_width, rest = divmod(qkv.out_features - out.in_features, 2)
    if call is None or norms is None or rest or kv_width % dim:
        return None
    return FusedAttention(layer, qkv, out, dim, kv_width // dim, norms, call)


def _decoder_layer(module: nn.Module) -> FusedDecoderLayer | None:
    norm, attention, middle_norm, feed_forward = (getattr(module, part) for part in _LAYER_PARTS)
    if (
        isinstance(norm, FusedRMSNorm)
        and isinstance(attention, FusedAttention)
        and isinstance(middle_norm, FusedRMSNorm)
        and isinstance(feed_forward, FusedFeedForward)
    ):
        return FusedDecoderLayer(norm, attention, middle_norm, feed_forward)
    return None


def _head_norms(module: nn.Module, dim: int) -> tuple[Floats, float] | None:
    """Weights ``[2, dim]`` of the norms of query and key heads, ``[0, dim]`` without; and eps."""
    found = [getattr(module, name, None) for name in ("q_norm", "k_norm")]
    if found == [None, None]:
        return np.empty((0, dim), np.float32), 0.0
    weights = [norm.weights for norm in found if isinstance(norm, FusedRMSNorm)]
    eps = {float(norm.eps) for norm in found if isinstance(norm, FusedRMSNorm)}
    if len(weights) != 2 or len(eps) != 1 or any(weight.shape != (dim,) for weight in weights):
        return None
    return np.stack(weights), eps.pop()
