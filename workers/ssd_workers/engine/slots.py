"""Keys and values of many sequences in common buffers, so that one operation serves them all."""

from __future__ import annotations

import weakref

import torch

from ssd_workers.engine.kv_cache import SequenceCache

MIN_CAPACITY = 256
"""Capacities are this many positions times a power of two."""


class SlotPool:
    """For each layer two buffers ``[slots, kv_heads, capacity + 1, head_dim]``.

    A sequence has a slot as long as its :class:`SlotCache` lives. The one position beyond the
    capacity is scratch: padding rows write there, and nobody reads it. Buffers come with a layer's
    first keys, and only ever grow, by doubling.

    Parameters:
      num_layers: of the model.
      num_slots: sequences that there is room for at first; rounded up to a power of two.
    """

    def __init__(self, num_layers: int, num_slots: int) -> None:
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}
        self._num_layers = num_layers
        self.num_slots = power_of_two(num_slots)
        self.capacity = MIN_CAPACITY
        self.version = 0  # another one when buffers were replaced
        # Weak, so that a slot is free as soon as nobody can use it any more.
        self._owners: dict[int, weakref.ref[SlotCache]] = {}

    @property
    def is_allocated(self) -> bool:
        """Whether every layer has its buffers."""
        return len(self.values) == self._num_layers

    def acquire(self, cache: SlotCache) -> int:
        """The lowest free slot, cleared; makes more slots if all are taken."""
        live = self._live()
        slot = next(i for i in range(len(live) + 1) if i not in live)
        self._reserve(slot + 1, self.capacity)
        self._clear(slot)
        self._owners[slot] = weakref.ref(cache)
        return slot

    def reserve(self, length: int) -> None:
        """Make room for ``length`` positions in every slot."""
        self._reserve(self.num_slots, pool_capacity(length))

    def close_gaps(self) -> None:
        """Move sequences to lower slots if that halves the slots a step has to cover."""
        live = self._live()
        covered = power_of_two(len(live))
        free = (slot for slot in range(covered) if slot not in live)
        for slot, cache in sorted(live.items()):
            if slot >= covered:
                self._move(cache, next(free))

    def room(
        self, slot: int, layer: int, end: int, like: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As :meth:`SequenceCache.room`, for the sequence in ``slot``."""
        self.reserve(end)
        if layer not in self.values:
            shape = self.num_slots, like.shape[0], self.capacity + 1, like.shape[2]
            self.keys[layer], self.values[layer] = (_zeros_like(like, shape) for _ in range(2))
        return self.keys[layer][slot], self.values[layer][slot]

    def _buffers(self) -> list[torch.Tensor]:
        return [*self.keys.values(), *self.values.values()]

    def _live(self) -> dict[int, SlotCache]:
        found = {slot: owner() for slot, owner in self._owners.items()}
        return {slot: cache for slot, cache in found.items() if cache is not None}

    def _reserve(self, num_slots: int, capacity: int) -> None:
        num_slots = max(self.num_slots, power_of_two(num_slots))
        capacity = max(self.capacity, capacity)
        if (num_slots, capacity) == (self.num_slots, self.capacity):
            return
        self.version += 1
        held = self.capacity
        for buffers in (self.keys, self.values):
            for layer in buffers:  # one at a time, so that little is held twice
                old = buffers[layer]
                new = _zeros_like(old, (num_slots, old.shape[1], capacity + 1, old.shape[3]))
                new[: old.shape[0], :, :held] = old[:, :, :held]
                buffers[layer] = new
        self.num_slots, self.capacity = num_slots, capacity

    def _clear(self, slot: int) -> None:
        """Leftovers of an earlier sequence: if not finite, a weight of 0 would not mask them."""
        for buffer in self._buffers():
            buffer[slot].zero_()

    def _move(self, cache: SlotCache, slot: int) -> None:
        self._clear(slot)
        for buffer in self._buffers():
            buffer[slot, :, : cache.length] = buffer[cache.slot, :, : cache.length]
        del self._owners[cache.slot]
        self._owners[slot] = weakref.ref(cache)
        cache.slot = slot


class SlotCache(SequenceCache):
    """One sequence's slot of a pool; the slot may change between steps.

    Parameters:
      pool: where keys and values are.
      expected_length: positions to make room for at once.
    """

    def __init__(self, pool: SlotPool, expected_length: int = 0) -> None:
        super().__init__()
        self._pool = pool
        pool.reserve(expected_length)
        self.slot = pool.acquire(self)

    @property
    def nbytes(self) -> int:
        buffers = (*self._pool.keys.values(), *self._pool.values.values())
        return sum(buffer[self.slot].nbytes for buffer in buffers)

    def room(self, layer: int, end: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._pool.room(self.slot, layer, end, like)

    def read(self, layer: int, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self._pool.keys[layer], self._pool.values[layer]
        return keys[self.slot, :, start:end], values[self.slot, :, start:end]


def power_of_two(n: int) -> int:
    """The least power of two that is no less than ``n``; 1 for 0."""
    return 1 << max(n - 1, 0).bit_length()


def pool_capacity(length: int) -> int:
    """The capacity of buffers that have room for ``length`` positions."""
    return MIN_CAPACITY * power_of_two(-(-length // MIN_CAPACITY))


@torch.inference_mode(False)
def _zeros_like(like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A buffer of ``shape`` that may be written in and out of inference mode.

    Zeros, not empty: masked positions get a weight of exactly 0, and 0 * NaN is NaN.
    """
    return torch.zeros(shape, dtype=like.dtype, device=like.device)
