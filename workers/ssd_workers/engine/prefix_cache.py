"""Keys and values of earlier prompts and answers, for later ones that begin with the same tokens.

They are kept in blocks of ``BLOCK`` positions. A block is found by its own tokens and by the block
before it, so by all tokens up to its end; nothing is found by a hash alone. A row's keys and values
depend on its position and on the tokens up to it, so a block that is found is the block that would
be computed. Whatever else they depend on (the model, its precision) must be the same: an engine has
a cache of its own.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from ssd_workers.engine.kv_cache import BLOCK, BlockTensors, GrowingCache

_ROOT = 0


@dataclass(frozen=True, eq=False)
class _Block:
    """``number`` names the block to those that follow it; no other block ever had it."""

    number: int
    tensors: BlockTensors
    nbytes: int


_Key = tuple[int, tuple[int, ...]]


class PrefixCache:
    """Blocks by the tokens that lead to them; those not used for longest go first.

    Blocks are copied in and out, so nobody holds on to one and each can go at any time. A block's
    followers always go before it: using a block is using all before it, a moment later.

    Parameters:
      capacity: bytes of keys and values at most.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        # Least recently used first.
        self._blocks: OrderedDict[_Key, _Block] = OrderedDict()
        self._numbers = itertools.count(_ROOT + 1)
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def fill(self, token_ids: Sequence[int], cache: GrowingCache) -> int:
        """Put what is known of ``token_ids`` into ``cache``, which holds their beginning.

        The last token is left out: it must be computed, to know what follows it.

        Returns: how many positions ``cache`` has more than before.
        """
        chain = self._chain(token_ids, (len(token_ids) - 1) // BLOCK)
        self._touch([key for key, _ in chain])
        first, before = cache.length // BLOCK, cache.length
        missing = [block.tensors for _, block in chain[first:]]
        if missing:
            # The block that is there in part is written again with what it holds.
            cache.put_blocks(first, missing)
        return cache.length - before

    def store(self, token_ids: Sequence[int], cache: GrowingCache, room: int) -> None:
        """Copy the whole blocks of ``cache`` that are not here yet.

        Parameters:
          token_ids: at least ``cache.length`` tokens.
          cache: their keys and values.
          room: bytes that may be held in all; less than the capacity where memory is short.
        """
        wanted = cache.length // BLOCK
        chain = self._chain(token_ids, wanted)
        keys = [key for key, _ in chain]
        # Before anything is evicted: what follows must not lose what it follows.
        self._touch(keys)
        if len(chain) == wanted:
            return
        limit = min(self._capacity, room)
        held = sum(block.nbytes for _, block in chain)
        parent = chain[-1][1].number if chain else _ROOT
        for index in range(len(chain), wanted):
            tensors = cache.copy_block(index)
            nbytes = sum(keys.nbytes + values.nbytes for keys, values in tensors)
            held += nbytes
            if held > limit:
                break
            self.shrink(limit - nbytes)
            key = (parent, _tokens(token_ids, index))
            block = self._blocks[key] = _Block(next(self._numbers), tensors, nbytes)
            self.nbytes += nbytes
            keys.append(key)
            parent = block.number
        self._touch(keys)

    def shrink(self, nbytes: int) -> None:
        """Forget blocks until at most ``nbytes`` are held."""
        while self._blocks and self.nbytes > nbytes:
            _, block = self._blocks.popitem(last=False)
            self.nbytes -= block.nbytes

    def _chain(self, token_ids: Sequence[int], limit: int) -> list[tuple[_Key, _Block]]:
        """The known blocks of ``token_ids`` from the first on, at most ``limit``."""
        found: list[tuple[_Key, _Block]] = []
        parent = _ROOT
        for index in range(limit):
            key = (parent, _tokens(token_ids, index))
            block = self._blocks.get(key)
            if block is None:
                break
            found.append((key, block))
            parent = block.number
        return found

    def _touch(self, keys: list[_Key]) -> None:
        """Mark a chain as used, its last block first."""
        for key in reversed(keys):
            self._blocks.move_to_end(key)


def _tokens(token_ids: Sequence[int], index: int) -> tuple[int, ...]:
    return tuple(token_ids[index * BLOCK : (index + 1) * BLOCK])
