"""Attention over packed, ragged rows, with every row's result independent of its neighbours.

The rows of all running sequences stand in one input ``[1, total_rows]``. Each query row attends
over its own sequence's keys only. To be bit-identical alone and in any batch, a row's sums must
have an order that depends on the row alone. On a CPU loops of our own see to that
(:mod:`ssd_workers.engine.attention_loops`). What they do not take, other types than float32 and
heads of odd sizes, is multiplied row by row there, over whole blocks of 64 keys of the row's own
window, invalid ones with a weight of exactly zero.

Off the CPU no library promises that, so all rows of a sequence go into one product: few launches
count more there. See :mod:`ssd_workers.engine.attention_kernels` for torch's fused attention.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from transformers import AttentionInterface

from ssd_workers.engine.attention_kernels import SdpaSpans
from ssd_workers.engine.config import AttnImplementation
from ssd_workers.engine.fixed_step import FixedStep
from ssd_workers.engine.kv_cache import BLOCK, SequenceCache, Span
from ssd_workers.engine.rollback import (
    KeysAndValuesOnly,
    refuse_latent,
    refuse_what_is_not_computed,
)
from ssd_workers.engine.row_attention import RowAttention

ATTENTION_NAME = "ssd_packed_rows"

Grouping = Literal["row", "span"]
"""Which rows of a sequence share a product: none, or all."""


@dataclass(frozen=True)
class AttentionCall:
    """What a layer asks of its attention: the factor of the scores, its window and its cap."""

    scaling: float
    window: int | None
    softcap: float | None


@dataclass(frozen=True)
class _Group:
    """Rows ``first..last`` of the packed input that attend over keys ``key_start..key_end``."""

    cache: SequenceCache
    first: int
    last: int
    key_start: int
    key_end: int
    invalid: torch.Tensor | None  # [rows, 1, keys] bool; None if every key is valid


class PackedStep(KeysAndValuesOnly):
    """One forward's view of every running sequence's cache, in the shape transformers expects.

    ``update`` writes each sequence's rows at its own place; :meth:`attend` reads them.

    Parameters:
      spans: the rows of every sequence.
      grouping: which rows share a product.
      implementation: how rows attend to their keys.
      cache_dtype: the type that keys and values are kept in, if it is not their own.
    """

    def __init__(
        self,
        spans: Sequence[Span],
        *,
        grouping: Grouping,
        implementation: AttnImplementation = "packed",
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        self.layers: list[Any] = []  # the base class looks here; the caches are in the spans
        self.spans = list(spans)
        self.written_layers: set[int] = set()
        #: How each layer called its attention so far.
        self.attended: dict[int, AttentionCall] = {}
        self._grouping = grouping
        self._cache_dtype = cache_dtype
        self._loops = RowAttention(self.spans)
        self._sdpa = SdpaSpans(self.spans) if implementation == "sdpa" else None
        # Layers may be on different devices.
        self._groups: dict[tuple[int | None, torch.device], list[_Group]] = {}

    is_compileable = False

    @property
    def packs_rows(self) -> bool:
        """Whether :meth:`attend_packed` is the attention that was asked for."""
        return self._sdpa is None

    @property
    def is_initialized(self) -> bool:
        return True

    @property
    def is_sliding(self) -> list[bool]:
        return []

    def get_seq_length(self, layer_idx: int = 0) -> int:
        del layer_idx
        return max(span.start for span in self.spans)

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write ``[1, kv_heads, total_rows, head_dim]``; what is returned is not read again.

        Raises:
          UnsupportedModelError: keys and values are not of one shape.
        """
        del args, kwargs
        refuse_latent(key_states.shape, value_states.shape)
        for row, span, keys, values in self.buffers(layer_idx, key_states[0]):
            end = span.start + span.rows
            keys[:, span.start : end] = key_states[0, :, row : row + span.rows]
            values[:, span.start : end] = value_states[0, :, row : row + span.rows]
        # Some models hand nothing of their caller's to their attention but these.
        key_states.ssd_step = self  # type: ignore[attr-defined]
        return key_states, value_states

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        *,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """``[1, heads, total_rows, head_dim]`` queries to ``[1, total_rows, heads, head_dim]``."""
        self.attended[layer] = AttentionCall(scaling, window, softcap)
        if self._sdpa is not None:
            return self._sdpa.attend(layer, query, scaling=scaling, window=window, softcap=softcap)
        heads, total, dim = query.shape[1:]
        kv_heads = self.spans[0].cache.read(layer, 0, 1)[0].shape[0]
        per_kv = heads // kv_heads
        packed = query.new_empty(kv_heads, total * per_kv, dim)
        rows = packed.view(kv_heads, total, per_kv, dim)
        torch.mul(query[0].view(kv_heads, per_kv, total, dim).transpose(1, 2), scaling, out=rows)
        out = self.attend_packed(layer, packed, per_kv, window=window, softcap=softcap)
        out = out.view(kv_heads, total, per_kv, dim)
        return out.transpose(0, 1).reshape(1, total, heads, dim)

    def attend_packed(
        self,
        layer: int,
        queries: torch.Tensor,
        per_kv: int,
        *,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """Attention of scaled queries, those that share a key head side by side.

        Parameters:
          layer: whose keys and values, written before.
          queries: ``[kv_heads, total_rows * per_kv, dim]``.
          per_kv: query heads for each key head.
          window: how many keys a query sees at most, or None for all before it.
          softcap: scores are capped at this, or None.

        Returns: the same shape.
        """
        sample = self.spans[0].cache.read(layer, 0, 1)
        if self._grouping == "row" and RowAttention.takes(queries, *sample):
            return self._loops.attend(layer, queries, per_kv, window, softcap)
        groups = self._plan(window, queries.device)
        out = None if len(groups) == 1 else torch.empty_like(queries)
        for group in groups:
            keys, values = group.cache.read(layer, group.key_start, group.key_end)
            part = slice(group.first * per_kv, group.last * per_kv)
            scores = torch.bmm(queries[:, part], keys.to(queries.dtype).transpose(1, 2))
            if softcap is not None:
                scores = torch.tanh(scores / softcap) * softcap
            if group.invalid is not None:
                view = scores.view(scores.shape[0], -1, per_kv, scores.shape[2])
                view.masked_fill_(group.invalid, -torch.inf)
            weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(queries.dtype)
            result = torch.bmm(weights, values.to(queries.dtype))
            if out is None:
                return result
            out[:, part] = result
        assert out is not None
        return out

    def buffers(
        self, layer: int, like: torch.Tensor
    ) -> Iterator[tuple[int, Span, torch.Tensor, torch.Tensor]]:
        """Where to write the keys and values of each sequence's rows.

        Parameters:
          layer: the layer that is about to write.
          like: a tensor ``[kv_heads, any, head_dim]`` of the right type and device.

        Returns: the number of the sequence's first row, its span, and its buffers
        ``[kv_heads, capacity, head_dim]``.
        """
        self.written_layers.add(layer)
        if self._cache_dtype is not None:
            like = like[:, :0].to(self._cache_dtype)
        row = 0
        for span in self.spans:
            keys, values = span.cache.room(layer, span.start + span.rows, like)
            yield row, span, keys, values
            row += span.rows

    def _plan(self, window: int | None, device: torch.device) -> list[_Group]:
        groups = self._groups.get((window, device))
        if groups is None:
            groups = self._groups[window, device] = list(self._make_groups(window, device))
        return groups

    def _make_groups(self, window: int | None, device: torch.device) -> Sequence[_Group]:
        groups = []
        row = 0
        for span in self.spans:
            first = 0
            while first < span.rows:
                last = span.rows if self._grouping == "span" else first + 1
                # The widest of the group: from the first row's keys to the last row's.
                start, _ = _key_blocks(span.start + first, window)
                _, end = _key_blocks(span.start + last - 1, window)
                invalid = _invalid_keys(
                    span.start + first, last - first, (start, end), window, device
                )
                groups.append(_Group(span.cache, row + first, row + last, start, end, invalid))
                first = last
            row += span.rows
        return groups


def _key_blocks(position: int, window: int | None) -> tuple[int, int]:
    """The block-aligned range of keys that the query at ``position`` sums over."""
    end = (position // BLOCK + 1) * BLOCK
    start = 0 if window is None else max(0, position + 1 - window) // BLOCK * BLOCK
    return start, end


def _invalid_keys(
    position: int, rows: int, blocks: tuple[int, int], window: int | None, device: torch.device
) -> torch.Tensor | None:
    """``[rows, 1, keys]``: keys after the query, or further back than the window."""
    start, end = blocks
    if rows == 1 and position == end - 1 and (window is None or position + 1 - window == start):
        return None
    at = torch.arange(position, position + rows, device=device)[:, None, None]
    keys = torch.arange(start, end, device=device)[None, None, :]
    invalid = keys > at
    if window is not None:
        invalid |= keys <= at - window
    return invalid


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    ssd_step: PackedStep | FixedStep | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The function that transformers' attention layers call under ``ATTENTION_NAME``."""
    del value, attention_mask
    if ssd_step is None:
        ssd_step = getattr(key, "ssd_step", None)
    if ssd_step is None:
        raise RuntimeError(
            "this attention runs only under ssd_workers' ModelRunner, in models that hand it the "
            "keys that the cache returned or the arguments of their own forward"
        )
    refuse_what_is_not_computed(type(module).__name__, kwargs)
    if scaling is None:
        scaling = head_scale(query)
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    out = ssd_step.attend(
        layer, query, scaling=float(scaling), window=sliding_window, softcap=softcap
    )
    return out, None


AttentionInterface.register(ATTENTION_NAME, _attention)


def head_scale(heads: torch.Tensor) -> float:
    """The usual 1/sqrt(head_dim) for a tensor ``[..., head_dim]``."""
    return 1.0 / math.sqrt(heads.shape[-1])
