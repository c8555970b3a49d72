"""Layers of an int8 model whose small operations are fused around its products.

A replacement must compute what the layer computed before: each one is tried on the inputs of a
real forward, and a layer whose output it does not reproduce stays as it is. So this needs no list
of architectures: RMS norms, gated feed-forward layers and attention with half-split rotary
embeddings are recognised by what they contain and proven by what they return.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from ssd_workers.engine import kernels
from ssd_workers.engine.attention import MIN_ROWS, AttentionCall, PackedStep
from ssd_workers.engine.int8 import Int8Linear, Int8Slice, quantize_rows
from ssd_workers.engine.kernels import Floats, by_rows
from ssd_workers.engine.row_exact import RowExactActivation

# How far, relative to its size, an output may be from the original's. Float operations in another
# order differ in the last bits; behind them, a value may now and then be rounded to the other of
# two neighbouring int8 levels. What is computed in another way is much further off.
_FLOAT_TOLERANCE = 1e-5
_INT8_TOLERANCE = 1e-2

# Activation functions of the form x * sigmoid(linear * x + cubic * x**3).
_GELU = 2 * (2 / np.pi) ** 0.5
_GATES = ((1.0, 0.0), (_GELU, _GELU * 0.044715), (1.702, 0.0))


class FusedRMSNorm(nn.Module):
    """Root mean square normalisation over the last dimension, in one loop."""

    def __init__(self, weight: Floats, eps: float) -> None:
        super().__init__()
        self.weights = weight
        self.eps = np.float32(eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., width]`` to the same."""
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        out = torch.empty_like(rows)
        arrays = (rows.numpy(), out.numpy())
        by_rows(kernels.rms_norm, rows.shape[1], arrays, self.weights, self.eps)
        return out.view(x.shape)


class FusedFeedForward(nn.Module):
    """``down(act(gate(x)) * up(x))`` with everything between the two products in one loop."""

    def __init__(self, gate_up: Int8Linear, down: Int8Linear, linear: float, cubic: float) -> None:
        super().__init__()
        self.gate_up = gate_up
        self.down = down
        self._factors = np.float32(linear), np.float32(cubic)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., hidden]`` to the same."""
        rows, scale = quantize_rows(x)
        products = self.gate_up.weight_packed.product(rows)
        hidden = torch.empty(len(rows), self.down.in_features, dtype=torch.uint8)
        hidden_scale = np.empty(len(rows), np.float32)
        arrays = (products.numpy(), scale, hidden.numpy(), hidden_scale)
        by_rows(kernels.gate, products.shape[1], arrays, *self._factors)
        return self.down.from_quantized(hidden, hidden_scale).view(x.shape)


class FusedAttention(nn.Module):
    """Attention with rotary embedding: one loop from the products to the cache and the queries."""

    def __init__(
        self,
        layer: int,
        qkv: Int8Linear,
        out: Int8Linear,
        head_dim: int,
        kv_heads: int,
        norms: tuple[Floats, float],
        call: AttentionCall,
    ) -> None:
        super().__init__()
        self._layer = layer
        self.qkv = qkv
        self.out = out
        self._dim, self._kv_heads = head_dim, kv_heads
        self._per_kv = out.in_features // head_dim // kv_heads
        self._norms, self._eps = norms[0], np.float32(norms[1])
        self._scaling = np.float32(call.scaling)
        self._call = call

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        *args: Any,
        ssd_step: PackedStep,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """``[1, R, hidden]`` and cosines and sines ``[1, R, rotary]`` to ``[1, R, hidden]``."""
        del args, kwargs
        rows, scale = quantize_rows(hidden_states)
        products = self.qkv.weight_packed.product(rows)
        y = products.numpy()
        cos, sin = (table[0].contiguous().numpy() for table in position_embeddings)
        packed = torch.zeros(self._kv_heads, len(y) * self._per_kv + MIN_ROWS, self._dim)
        for first, span, keys, values in ssd_step.buffers(self._layer, packed):
            part = slice(first, first + span.rows)
            kernels.rotate(
                y[part], scale[part], self.qkv.bias, cos[part], sin[part],
                self._norms, self._eps, self._scaling, first, span.start,
                packed.numpy(), keys.numpy(), values.numpy(),
            )  # fmt: skip
        ssd_step.attended[self._layer] = self._call
        attended = ssd_step.attend_packed(
            self._layer,
            packed,
            self._per_kv,
            window=self._call.window,
            softcap=self._call.softcap,
        )
        heads = torch.empty(len(y), self.out.in_features, dtype=torch.uint8)
        heads_scale = np.empty(len(y), np.float32)
        kernels.quantize_heads(attended.numpy(), heads.numpy(), heads_scale)
        return self.out.from_quantized(heads, heads_scale).view(hidden_states.shape), None


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
    """Records the last call of every module of ``model`` that could be replaced."""

    def __init__(self, model: nn.Module) -> None:
        self.seen: dict[nn.Module, Seen] = {}
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
        self.seen[module] = Seen(args, kwargs, tensor.clone(), is_pair)

    def close(self) -> None:
        """Stop recording."""
        for hook in self._hooks:
            hook.remove()


def fuse_layers(model: nn.Module, recorder: Recorder, step: PackedStep) -> int:
    """Replace what can be replaced exactly, and return the number of replaced layers.

    Parameters:
      model: an int8 model on the CPU.
      recorder: that has seen one forward of it.
      step: the step of that forward; its caches are written once more with the same values.
    """
    replaced = 0
    places = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if child in recorder.seen
    ]
    for parent, name, child in places:
        seen = recorder.seen[child]
        for candidate, tolerance in _candidates(child, seen, step):
            if seen.agrees(candidate(*seen.args, **seen.kwargs), tolerance):
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


def _candidates(
    module: nn.Module, seen: Seen, step: PackedStep
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
        elif "position_embeddings" in seen.kwargs:
            fused = _attention(module, step)
            if fused is not None:
                yield fused, _INT8_TOLERANCE


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


def _attention(module: nn.Module, step: PackedStep) -> FusedAttention | None:
    qkv, out = _joint(module, "q_proj", "k_proj", "v_proj"), _linear(module, "o_proj")
    layer, dim = getattr(module, "layer_idx", None), getattr(module, "head_dim", None)
    if qkv is None or out is None or not isinstance(layer, int) or not isinstance(dim, int):
        return None
    call = step.attended.get(layer)
    norms = _head_norms(module, dim)
    # Query heads times their dimension is what the output projection reads.
    kv_width, rest = divmod(qkv.out_features - out.in_features, 2)
    if call is None or norms is None or rest or kv_width % dim:
        return None
    return FusedAttention(layer, qkv, out, dim, kv_width // dim, norms, call)


def _head_norms(module: nn.Module, dim: int) -> tuple[Floats, float] | None:
    """Weights ``[2, dim]`` of the norms of query and key heads, ``[0, dim]`` without; and eps."""
    found = [getattr(module, name, None) for name in ("q_norm", "k_norm")]
    if found == [None, None]:
        return np.empty((0, dim), np.float32), 0.0
    x = torch.linspace(-3, 2, dim)[None]
    settings = []
    for norm in found:
        if not isinstance(norm, nn.Module):
            return None
        for weight, eps in _norm_settings(norm):
            if weight.shape == (dim,) and _agree(
                FusedRMSNorm(weight, eps)(x), norm(x), _FLOAT_TOLERANCE
            ):
                settings.append((weight, eps))
                break
    if len(settings) != 2 or settings[0][1] != settings[1][1]:
        return None
    return np.stack([weight for weight, _ in settings]), settings[0][1]
