"""Blocks of earlier sequences against a plain list of prefixes, and what is in them."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_workers.engine.kv_cache import BLOCK, GrowingCache
from ssd_workers.engine.prefix_cache import PrefixCache

LAYERS, KV_HEADS, DIM = 2, 2, 4
BLOCK_BYTES = LAYERS * 2 * KV_HEADS * BLOCK * DIM * 4


class World:
    """What a model would compute: for every prefix, keys and values of its last position."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, ...], float] = {}

    def cache(self, tokens: list[int], length: int) -> GrowingCache:
        """A cache that holds the first ``length`` of ``tokens``."""
        cache = GrowingCache(LAYERS, BLOCK)
        if length:
            rows = self.rows(tokens[:length])
            for layer in range(LAYERS):
                keys, values = cache.room(layer, length, rows)
                keys[:, :length] = rows + layer
                values[:, :length] = -rows - layer
        cache.length = length
        return cache

    def rows(self, tokens: list[int]) -> torch.Tensor:
        """``[kv_heads, rows, dim]``, told apart by everything up to each position."""
        numbers = []
        for end in range(1, len(tokens) + 1):
            prefix = tuple(tokens[:end])
            numbers.append(self._numbers.setdefault(prefix, 10.0 * len(self._numbers)))
        return torch.tensor(numbers)[None, :, None].expand(KV_HEADS, -1, DIM).clone()

    def check(self, tokens: list[int], cache: GrowingCache) -> None:
        if cache.length == 0:
            return
        rows = self.rows(tokens[: cache.length])
        for layer in range(LAYERS):
            keys, values = cache.read(layer, 0, cache.length)
            assert torch.equal(keys, rows + layer)
            assert torch.equal(values, -rows - layer)


class Plain:
    """Whole prefixes in a list, least recently used first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity  # in blocks
        self.prefixes: list[tuple[int, ...]] = []

    def find(self, tokens: list[int]) -> int:
        return self._known(tokens, (len(tokens) - 1) // BLOCK)

    def store(self, tokens: list[int], room: int) -> None:
        limit = min(self._capacity, room)
        count = len(tokens) // BLOCK
        known = self._known(tokens, count)
        if known == count:
            return
        for number in range(known + 1, count + 1):
            if number > limit:
                break
            self.shrink(limit - 1)
            self.prefixes.append(tuple(tokens[: number * BLOCK]))
        self._known(tokens, count)

    def shrink(self, blocks: int) -> None:
        while len(self.prefixes) > max(blocks, 0):
            self.prefixes.pop(0)

    def _known(self, tokens: list[int], limit: int) -> int:
        """The number of known blocks, which are used by that, the last one first."""
        found = 0
        while found < limit and tuple(tokens[: (found + 1) * BLOCK]) in self.prefixes:
            found += 1
        for number in range(found, 0, -1):
            prefix = tuple(tokens[: number * BLOCK])
            self.prefixes.remove(prefix)
            self.prefixes.append(prefix)
        return found


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["fill", "fill", "store", "store", "shrink"]),
        st.lists(st.integers(0, 1), max_size=4),  # whole blocks of one token each
        st.integers(0, BLOCK - 1),  # tokens of the next block
        st.integers(0, 7),  # what is in the cache already, or the room
    ),
    max_size=25,
)


@settings(max_examples=80, deadline=None)
@given(capacity=st.integers(0, 5), steps=STEPS)
def test_equals_a_list_of_prefixes(
    capacity: int, steps: list[tuple[str, list[int], int, int]]
) -> None:
    world, plain = World(), Plain(capacity)
    prefixes = PrefixCache(capacity * BLOCK_BYTES)
    for action, blocks, rest, number in steps:
        tokens = [token for block in blocks for token in [block] * BLOCK] + [9] * rest
        if action == "store":
            prefixes.store(tokens, world.cache(tokens, len(tokens)), number * BLOCK_BYTES)
            plain.store(tokens, number)
        elif action == "shrink":
            prefixes.shrink(number * BLOCK_BYTES)
            plain.shrink(number)
        elif tokens:
            before = min(37 * number, len(tokens) - 1)
            cache = world.cache(tokens, before)
            found = prefixes.fill(tokens, cache)
            assert found == max(0, plain.find(tokens) * BLOCK - before)
            assert cache.length == before + found < len(tokens)
            world.check(tokens, cache)
        assert len(prefixes) == len(plain.prefixes)
        assert prefixes.nbytes == BLOCK_BYTES * len(prefixes) <= capacity * BLOCK_BYTES


@torch.inference_mode()
def test_a_copy_shares_nothing_with_its_origin() -> None:
    world, prefixes = World(), PrefixCache(10 * BLOCK_BYTES)
    tokens = list(range(2 * BLOCK + 5))
    source = world.cache(tokens, len(tokens))
    prefixes.store(tokens, source, 10 * BLOCK_BYTES)
    for layer in range(LAYERS):
        for part in source.read(layer, 0, len(tokens)):
            part.zero_()
    for _ in range(2):
        cache = world.cache(tokens, 0)
        assert prefixes.fill(tokens, cache) == 2 * BLOCK
        world.check(tokens, cache)
        for part in cache.read(0, 0, BLOCK):
            part.zero_()


def test_the_last_token_is_always_left_to_be_computed() -> None:
    world, prefixes = World(), PrefixCache(10 * BLOCK_BYTES)
    tokens = list(range(2 * BLOCK))
    prefixes.store(tokens, world.cache(tokens, 2 * BLOCK), 10 * BLOCK_BYTES)
    assert prefixes.fill(tokens, world.cache(tokens, 0)) == BLOCK
    assert prefixes.fill([*tokens, 7], world.cache(tokens, 0)) == 2 * BLOCK


def test_a_cache_makes_no_more_room_than_its_limit() -> None:
    like = torch.zeros(KV_HEADS, 1, DIM)
    for limit, blocks in ((10 * BLOCK - 3, 10), (None, 12)):
        cache = GrowingCache(1, 8 * BLOCK, limit)
        assert cache.room(0, 10, like)[0].shape[1] == 8 * BLOCK
        assert cache.room(0, 8 * BLOCK + 1, like)[0].shape[1] == blocks * BLOCK
