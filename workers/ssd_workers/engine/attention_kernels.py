"""Attention of packed, ragged rows through torch's fused kernels, one call for each sequence.

Faster than plain products on a GPU once contexts are long: scores are never written to memory.
Which kernel runs depends on how many rows and keys there are, so two ways to the same logits agree
to rounding only, not bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ssd_integrations.errors import UnsupportedModelError
from ssd_workers.engine.kv_cache import BLOCK, Span


@dataclass(frozen=True)
class _Call:
    """One sequence's rows ``first..last`` of the packed input, over ``key_start..key_end``.

    ``mask`` is ``[per_kv * rows, keys]``, 0 or -inf; without one the rows see every key, or, if
    ``causal``, row i sees the keys up to i.
    """

    span: Span
    first: int
    last: int
    key_start: int
    key_end: int
    mask: torch.Tensor | None
    causal: bool


class SdpaSpans:
    """``scaled_dot_product_attention`` over the spans of one step.

    Masks are built on the device of the layer that asks first, once for a step and window, so
    that nothing waits for the device.

    Parameters:
      spans: the sequences' rows, in the order of the packed input.
    """

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = spans
        self._calls: dict[tuple[int | None, torch.device], list[_Call]] = {}

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        *,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """``[1, heads, total_rows, head_dim]`` queries to ``[1, total_rows, heads, head_dim]``.

        Raises:
          UnsupportedModelError: the model caps its scores, which the fused kernels cannot.
        """
        if softcap is not None:
            raise UnsupportedModelError(
                f"attn_implementation='sdpa' cannot cap attention scores (softcap={softcap:g}), "
                "which this model needs.",
                remedy="Use attn_implementation='packed'.",
            )
        heads, total, dim = query.shape[1:]
        kv_heads = self._spans[0].cache.read(layer, 0, 1)[0].shape[0]
        per_kv = heads // kv_heads
        out = query.new_empty(heads, total, dim)
        for call in self._plan(window, query, per_kv):
            keys, values = call.span.cache.read(layer, call.key_start, call.key_end)
            rows = query[0, :, call.first : call.last]
            count = call.last - call.first
            if not call.causal:
                # Query heads that share a key head become rows of one head: every kernel takes
                # that, while few take a mask and shared key heads together.
                rows = rows.reshape(kv_heads, per_kv * count, dim)
            result = nn.functional.scaled_dot_product_attention(
                rows[None],
                keys[None],
                values[None],
                attn_mask=call.mask,
                is_causal=call.causal,
                scale=scaling,
                enable_gqa=call.causal and per_kv > 1,
            )
            out[:, call.first : call.last] = result.reshape(heads, count, dim)
        return out.transpose(0, 1)[None]

    def _plan(self, window: int | None, query: torch.Tensor, per_kv: int) -> list[_Call]:
        key = window, query.device
        calls = self._calls.get(key)
        if calls is None:
            calls, first = [], 0
            for span in self._spans:
                calls.append(_make_call(span, first, window, query, per_kv))
                first += span.rows
            self._calls[key] = calls
        return calls


def _make_call(
    span: Span, first: int, window: int | None, query: torch.Tensor, per_kv: int
) -> _Call:
    last, end = first + span.rows, span.start + span.rows
    start = 0 if window is None else max(0, span.start + 1 - window)
    if span.rows == 1:
        return _Call(span, first, last, start, end, None, causal=False)
    if span.start == 0 and (window is None or span.rows <= window):
        return _Call(span, first, last, 0, end, None, causal=True)
    # Whole blocks: the kernels with a mask want aligned keys, and the cache holds them.
    start, end = start // BLOCK * BLOCK, -(-end // BLOCK) * BLOCK
    at = torch.arange(span.start, span.start + span.rows, device=query.device)[:, None]
    keys = torch.arange(start, end, device=query.device)[None]
    invalid = keys > at
    if window is not None:
        invalid |= keys <= at - window
    mask = query.new_zeros(span.rows, end - start).masked_fill_(invalid, -torch.inf)
    return _Call(span, first, last, start, end, mask.repeat(per_kv, 1), causal=False)
