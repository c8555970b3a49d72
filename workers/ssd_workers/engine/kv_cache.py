"""Keys and values of one sequence, kept per layer and rolled back by length."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

BLOCK = 64
"""Buffers grow, and keys are attended, in blocks of this many positions (see attention.py)."""


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
    """Two buffers ``[kv_heads, capacity, head_dim]`` for each layer, of this sequence alone."""

    def __init__(self, num_layers: int, initial_capacity: int = 4 * BLOCK) -> None:
        super().__init__()
        self._initial_capacity = _round_up(max(initial_capacity, BLOCK))
        self._keys: list[torch.Tensor | None] = [None] * num_layers
        self._values: list[torch.Tensor | None] = [None] * num_layers

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (*self._keys, *self._values) if t is not None)

    def room(self, layer: int, end: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self._keys[layer], self._values[layer]
        if keys is None or values is None or keys.shape[1] < end:
            keys = self._keys[layer] = _grown(keys, like, end, self._initial_capacity)
            values = self._values[layer] = _grown(values, like, end, self._initial_capacity)
        return keys, values

    def read(self, layer: int, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self._keys[layer], self._values[layer]
        assert keys is not None  # written earlier in the same step
        assert values is not None
        return keys[:, start:end], values[:, start:end]


@dataclass(frozen=True)
class Span:
    """Consecutive rows of one sequence: ``rows`` new positions that start at ``start``."""

    cache: SequenceCache
    start: int
    rows: int


def _round_up(n: int) -> int:
    return -(-n // BLOCK) * BLOCK


def _grown(
    buffer: torch.Tensor | None, like: torch.Tensor, needed: int, initial: int
) -> torch.Tensor:
    """``buffer`` with room for ``needed`` positions; grows by at least half, zero-filled."""
    if buffer is not None and buffer.shape[1] >= needed:
        return buffer
    held = 0 if buffer is None else buffer.shape[1]
    capacity = _round_up(max(needed, initial, held + held // 2))
    # Zeros, not empty: masked positions get a weight of exactly 0, and 0 * NaN is NaN.
    new = like.new_zeros(like.shape[0], capacity, like.shape[2])
    if buffer is not None:
        new[:, :held] = buffer
    return new
