"""Layers whose small operations are fused around their int8 products.

They work on quantised rows: uint8 ``[R, n]`` around 128 with a scale for each row. See
:mod:`ssd_workers.engine.fusion` for which layers of a model they stand in for.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn

from ssd_workers.engine import kernels
from ssd_workers.engine.attention import AttentionCall, PackedStep
from ssd_workers.engine.int8 import Int8Linear, quantize_rows
from ssd_workers.engine.kernels import Floats
from ssd_workers.engine.row_threads import by_rows

Quantized: TypeAlias = tuple[torch.Tensor, Floats]


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

    def quantized(self, x: torch.Tensor) -> Quantized:
        """``[R, width]`` to quantised rows of what :meth:`forward` returns."""
        out = torch.empty(x.shape, dtype=torch.uint8)
        scale = np.empty(len(x), np.float32)
        arrays = (x.numpy(), out.numpy(), scale)
        by_rows(kernels.norm_quantize, x.shape[1], arrays, self.weights, self.eps)
        return out, scale


class FusedFeedForward(nn.Module):
    """``down(act(gate(x)) * up(x))`` with everything between the two products in one loop."""

    def __init__(self, gate_up: Int8Linear, down: Int8Linear, linear: float, cubic: float) -> None:
        super().__init__()
        self.gate_up = gate_up
        self.down = down
        self._factors = np.float32(linear), np.float32(cubic)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., hidden]`` to the same."""
        return self.down.from_quantized(*self.gated(*quantize_rows(x))).view(x.shape)

    def gated(self, rows: torch.Tensor, scale: Floats) -> Quantized:
        """Quantised rows of the input to those of ``act(gate(x)) * up(x)``."""
        products = self.gate_up.weight_packed.product(rows)
        hidden = torch.empty(len(rows), self.down.in_features, dtype=torch.uint8)
        hidden_scale = np.empty(len(rows), np.float32)
        arrays = (products.numpy(), scale, hidden.numpy(), hidden_scale)
        by_rows(kernels.gate, products.shape[1], arrays, *self._factors)
        return hidden, hidden_scale


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
        attended = self.attended(*quantize_rows(hidden_states), position_embeddings, ssd_step)
        return self.out.from_quantized(*attended).view(hidden_states.shape), None

    def attended(
        self,
        rows: torch.Tensor,
        scale: Floats,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        step: PackedStep,
    ) -> Quantized:
        """Quantised rows of the input to those of what the output projection reads."""
        y = self.qkv.weight_packed.product(rows).numpy()
        cos, sin = (table[0].contiguous().numpy() for table in position_embeddings)
        packed = torch.empty(self._kv_heads, len(y) * self._per_kv, self._dim)
        queries = packed.numpy()
        for first, span, keys, values in step.buffers(self._layer, packed):
            part = slice(first, first + span.rows)
            kernels.rotate(
                y[part], scale[part], self.qkv.bias, cos[part], sin[part],
                self._norms, self._eps, self._scaling, first, span.start,
                queries, _numbers(keys), _numbers(values),
            )  # fmt: skip
        step.attended[self._layer] = self._call
        result = step.attend_packed(
            self._layer,
            packed,
            self._per_kv,
            window=self._call.window,
            softcap=self._call.softcap,
        )
        heads = torch.empty(len(y), self.out.in_features, dtype=torch.uint8)
        heads_scale = np.empty(len(y), np.float32)
        kernels.quantize_heads(result.numpy(), heads.numpy(), heads_scale)
        return heads, heads_scale


class FusedDecoderLayer(nn.Module):
    """Attention and feed-forward layer, each with a norm before it and added to its input."""

    def __init__(
        self,
        norm: FusedRMSNorm,
        attention: FusedAttention,
        middle_norm: FusedRMSNorm,
        feed_forward: FusedFeedForward,
    ) -> None:
        super().__init__()
        self.input_layernorm = norm
        self.self_attn = attention
        self.post_attention_layernorm = middle_norm
        self.mlp = feed_forward
        # Looked up at every step; a module's attributes are found slowly.
        self._parts = (norm, attention, middle_norm, feed_forward)

    def forward(
        self,
        hidden_states: torch.Tensor,
        *args: Any,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        ssd_step: PackedStep,
        **kwargs: Any,
    ) -> torch.Tensor:
        """``[1, R, hidden]`` to the same."""
        del args, kwargs
        norm, attention, middle_norm, feed_forward = self._parts
        x = hidden_states[0].contiguous()
        quantized = attention.attended(*norm.quantized(x), position_embeddings, ssd_step)
        x = attention.out.added(x, *quantized)
        quantized = feed_forward.gated(*middle_norm.quantized(x))
        return feed_forward.down.added(x, *quantized)[None]


def _numbers(cached: torch.Tensor) -> Any:
    """Keys or values as numba takes them: float16 as the bits of its numbers."""
    return (cached.view(torch.uint16) if cached.dtype == torch.float16 else cached).numpy()
