"""Key-value caches against plain lists, under random writes, rollbacks and sequences that leave."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_workers.engine.kv_cache import GrowingCache, SequenceCache
from ssd_workers.engine.slots import SlotCache, SlotPool

LAYERS, KV_HEADS, DIM = 2, 2, 3


@dataclass
class Twin:
    """A cache and what it must hold: for each position the number that was written there."""

    cache: SequenceCache
    rows: list[float] = field(default_factory=list)

    def append(self, numbers: list[float]) -> None:
        start, end = len(self.rows), len(self.rows) + len(numbers)
        for layer in range(LAYERS):
            new = block(numbers, layer)
            keys, values = self.cache.room(layer, end, new)
            keys[:, start:end] = new
            values[:, start:end] = -new
        self.cache.length = end
        self.rows += numbers

    def truncate(self, length: int) -> None:
        self.cache.truncate(length)
        self.rows = self.rows[:length]

    def check(self) -> None:
        length = len(self.rows)
        assert self.cache.length == length
        for layer in range(LAYERS) if length else ():
            keys, values = self.cache.read(layer, 0, length)
            assert torch.equal(keys, block(self.rows, layer))
            assert torch.equal(values, -block(self.rows, layer))


def block(numbers: list[float], layer: int) -> torch.Tensor:
    """``[kv_heads, rows, dim]`` in which every element says where it belongs."""
    rows = torch.tensor(numbers)[None, :, None] + 1000 * layer
    return rows + torch.arange(KV_HEADS)[:, None, None] / 4 + torch.arange(DIM) / 64


# For a sequence: how many rows come (0: it leaves, another takes its place), and how many of the
# newest are rolled back.
STEPS = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 90), st.integers(0, 20)), min_size=1, max_size=40
)


@pytest.mark.parametrize("kind", ["growing", "slots"])
@settings(max_examples=60, deadline=None)
@given(steps=STEPS)
def test_a_cache_holds_what_was_written_and_not_rolled_back(
    kind: str, steps: list[tuple[int, int, int]]
) -> None:
    pool = SlotPool(LAYERS, 1)

    def new() -> Twin:
        return Twin(SlotCache(pool) if kind == "slots" else GrowingCache(LAYERS, 64))

    twins = [new() for _ in range(3)]
    written = 0.0
    for who, rows, back in steps:
        index = who % len(twins)
        if rows == 0:
            twins[index] = new()
            pool.close_gaps()
        else:
            twins[index].append([written + i for i in range(rows)])
            written += rows
            twins[index].truncate(max(0, len(twins[index].rows) - back))
        for twin in twins:
            twin.check()


def test_rolling_back_never_makes_a_cache_longer() -> None:
    cache = GrowingCache(LAYERS)
    cache.length = 5
    cache.truncate(9)
    assert cache.length == 5
