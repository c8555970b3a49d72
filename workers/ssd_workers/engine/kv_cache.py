"""Keys and values of one sequence, kept per layer and rolled back by length."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

BLOCK = 64
"""Buffers grow, and keys are attended, in blocks of this many positions (see attention.py)."""

BlockTensors = tuple[tuple[torch.Tensor, torch.Tensor], ...]
"""For each layer the keys and the values ``[kv_heads, BLOCK, head_dim]`` of one block."""


class SequenceCache(ABC):
    """The key-value cache of one sequence: ``length`` positions of every layer are valid.

    Rolling back a rejected draft is setting ``length``; nothing is copied. Positions at and beyond
    ``length`` hold finite leftovers that attention masks out.
    """

    def __init__(self) -> None:
        self.length = 0

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes held by all buffers."""

    @abstractmethod
    def room(self, layer: int, end: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The buffers of keys and of values, with room for positions below ``end``.

        ``like`` is a tensor ``[kv_heads, any, head_dim]`` of their type. They are
        ``[kv_heads, at least end, head_dim]`` and valid until the next call.
        """

    @abstractmethod
    def read(self, layer: int, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views ``[kv_heads, end-start, head_dim]`` of keys and values; capacity covers ``end``."""

    def truncate(self, length: int) -> None:
        """Forget every position at and beyond ``length``."""
        self.length = min(self.length, length)


class GrowingCache(SequenceCache):
    """Two buffers ``[kv_heads, capacity, head_dim]`` for each layer, of this sequence alone.

    Parameters:
      num_layers: of the model.
      initial_capacity: positions to make room for at once.
      limit: as long as there are fewer positions, no more room than for so many is made.
    """

    def __init__(
        self, num_layers: int, initial_capacity: int = 4 * BLOCK, limit: int | None = None
    ) -> None:
        super().__init__()
        self._initial_capacity = round_up(max(initial_capacity, BLOCK))
        self._limit = limit
        self._keys: list[torch.Tensor | None] = [None] * num_layers
        self._values: list[torch.Tensor | None] = [None] * num_layers

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (*self._keys, *self._values) if t is not None)

    def room(self, layer: int, end: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self._keys[layer], self._values[layer]
        if keys is None or values is None or keys.shape[1] < end:
            capacity = self._next_capacity(0 if keys is None else keys.shape[1], end)
            keys = self._keys[layer] = _grown(keys, like, capacity)
            values = self._values[layer] = _grown(values, like, capacity)
        return keys, values

    def read(self, layer: int, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self._keys[layer], self._values[layer]
        assert keys is not None  # written earlier in the same step
        assert values is not None
        return keys[:, start:end], values[:, start:end]

    @torch.inference_mode()
    def copy_block(self, index: int) -> BlockTensors:
        """A copy of the positions from ``index * BLOCK`` on, which are all valid."""
        start, end = index * BLOCK, (index + 1) * BLOCK
        layers = range(len(self._keys))
        copied = []
        for keys, values in (self.read(layer, start, end) for layer in layers):
            copied.append((_copy(keys), _copy(values)))
        return tuple(copied)

    @torch.inference_mode()
    def put_blocks(self, first: int, blocks: Sequence[BlockTensors]) -> None:
        """Write ``blocks`` from block ``first`` on; the cache then ends with the last of them."""
        end = (first + len(blocks)) * BLOCK
        part = slice(first * BLOCK, end)
        for layer in range(len(self._keys)):
            keys, values = self.room(layer, end, blocks[0][layer][0])
            keys[:, part] = torch.cat([block[layer][0] for block in blocks], dim=1)
            values[:, part] = torch.cat([block[layer][1] for block in blocks], dim=1)
        self.length = end

    def _next_capacity(self, held: int, needed: int) -> int:
        """Room for ``needed`` positions: at least half more than before, but for the limit."""
        more = held + held // 2
        if self._limit is not None:
            more = min(more, self._limit)
        return round_up(max(needed, self._initial_capacity, more))


@dataclass(frozen=True)
class Span:
    """Consecutive rows of one sequence: ``rows`` new positions that start at ``start``."""

    cache: SequenceCache
    start: int
    rows: int


def round_up(length: int) -> int:
    """``length`` in whole blocks."""
    return -(-length // BLOCK) * BLOCK


def _grown(buffer: torch.Tensor | None, like: torch.Tensor, capacity: int) -> torch.Tensor:
    """``buffer`` with room for ``capacity`` positions; what is new is zero."""
    # Zeros, not empty: masked positions get a weight of exactly 0, and 0 * NaN is NaN.
    new = like.new_zeros(like.shape[0], capacity, like.shape[2])
    if buffer is not None:
        new[:, : buffer.shape[1]] = buffer
    return new


def _copy(part: torch.Tensor) -> torch.Tensor:
    return part.clone(memory_format=torch.contiguous_format)
