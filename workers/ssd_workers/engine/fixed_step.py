"""A forward whose shapes depend on nothing but its bucket: what a CUDA graph can record.

The rows of sequence ``i`` stand in row ``i`` of a rectangle ``[slots, rows]``, filled up with
padding. Where they are written and what they see is said by tensors, never by Python numbers, so
the same operations serve sequences of any length.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ssd_workers.engine.rollback import KeysAndValuesOnly


class FixedStep(KeysAndValuesOnly):
    """One forward's view of a slot pool, in the shape transformers expects.

    Parameters:
      keys: for each layer ``[slots or more, kv_heads, positions, head_dim]``.
      values: the same for values.
      positions: ``[slots, rows]``; a row sees the keys up to its own.
      write_at: ``[slots, rows]``, where each row's key goes; for padding a position beyond
        ``num_keys`` that nobody reads.
      num_keys: how many keys are attended over, most of them masked.
    """

    def __init__(
        self,
        keys: Mapping[int, torch.Tensor],
        values: Mapping[int, torch.Tensor],
        positions: torch.Tensor,
        write_at: torch.Tensor,
        num_keys: int,
    ) -> None:
        self.layers: list[Any] = []  # the base class looks here; the buffers are the pool's
        self._keys = keys
        self._values = values
        self._positions = positions
        self._write_at = write_at
        self._num_keys = num_keys
        self._slots = torch.arange(positions.shape[0], device=positions.device)[:, None]
        self._masks: dict[tuple[int | None, int], torch.Tensor] = {}

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write ``[slots, kv_heads, rows, head_dim]``; what is returned is not read again."""
        del args, kwargs
        self._keys[layer_idx][self._slots, :, self._write_at] = key_states.transpose(1, 2)
        self._values[layer_idx][self._slots, :, self._write_at] = value_states.transpose(1, 2)
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
        """``[slots, heads, rows, head_dim]`` queries to ``[slots, rows, heads, head_dim]``."""
        slots, heads, rows, dim = query.shape
        keys = self._keys[layer][:slots, :, : self._num_keys]
        values = self._values[layer][:slots, :, : self._num_keys]
        kv_heads = keys.shape[1]
        per_kv = heads // kv_heads
        # Query heads that share a key head become rows of one head: every kernel takes that.
        folded = query.reshape(slots, kv_heads, per_kv * rows, dim)
        mask = self._mask(window, per_kv, query.dtype)
        if softcap is None:
            out = nn.functional.scaled_dot_product_attention(
                folded, keys, values, attn_mask=mask, scale=scaling
            )
        else:
            scores = torch.matmul(folded, keys.transpose(2, 3)) * scaling
            scores = torch.tanh(scores / softcap) * softcap + mask
            weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(values.dtype)
            out = torch.matmul(weights, values)
        return out.reshape(slots, heads, rows, -1).transpose(1, 2)

    def _mask(self, window: int | None, per_kv: int, dtype: torch.dtype) -> torch.Tensor:
        """``[slots, 1, per_kv * rows, num_keys]``: 0, or -inf for keys a row must not see."""
        mask = self._masks.get((window, per_kv))
        if mask is None:
            at = self._positions[:, None, :, None]
            keys = torch.arange(self._num_keys, device=at.device)
            invalid = keys > at
            if window is not None:
                invalid = invalid | (keys <= at - window)
            mask = torch.zeros(invalid.shape, dtype=dtype, device=at.device)
            mask = mask.masked_fill(invalid, -torch.inf).repeat(1, 1, per_kv, 1)
            self._masks[window, per_kv] = mask
        return mask
