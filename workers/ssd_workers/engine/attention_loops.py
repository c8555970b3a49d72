"""Attention of float32 queries over cached keys and values on a CPU, in loops of our own.

The order of every sum is written down (see :mod:`ssd_workers.engine.vectors`) and depends on a
row's position and window alone, so a row has the same bits in a prompt, in a draft and by itself,
beside whatever other rows and on however many threads.

Scores are taken block by block of ``KEYS`` absolute positions with a running maximum (Milakov and
Gimelshein, "Online normalizer calculation for softmax", 2018), so a long context takes no more
room than a short one. Several queries share what is read of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from numba import carray, cfunc, types

from ssd_workers.engine.attention_tiles import TILE_KEYS, score_tile, value_tile
from ssd_workers.engine.compiled import CACHED, exactly
from ssd_workers.engine.vectors import (
    LANES,
    add,
    count_up,
    exponential,
    first_lane,
    lane_maximum,
    lane_sum,
    load,
    maximum,
    multiply,
    numbers,
    splat,
    store,
    zero,
)

KEYS = 256
"""Positions of a block, counted from the beginning of the sequence."""

_MINUS_INFINITY = np.float32(-np.inf)
_ONE = np.float32(1)

# What a task is made of: int64 numbers, addresses among them.
TASK = (
    "next", "items", "num_items", "buffers", "queries", "rows", "out", "dim", "per_kv", "window",
    "softcap",
)  # fmt: skip
_NEXT, _ITEMS, _NUM_ITEMS, _BUFFERS, _QUERIES, _ROWS, _OUT, _DIM, _PER_KV, _WINDOW, _SOFTCAP = (
    range(len(TASK))
)
#: An item: number of the sequence, key head, first of the packed rows, rows, position of the first.
ITEM_NUMBERS = 5
#: Of a sequence: addresses of the keys and of the values ``[kv_heads, capacity, dim]``, and the
#: elements from one head to the next.
BUFFER_NUMBERS = 3


@exactly
def _tiles(
    kind: Any, n: int, query: int, keys: int, values: int, count: int, dim: int, out: int
) -> None:
    """Scores of ``n`` queries with ``count`` keys, a multiple of 4; rows of ``KEYS`` at ``out``."""
    width = TILE_KEYS * dim * kind.itemsize
    for tile in range(count // TILE_KEYS):
        k, v, o = keys + tile * width, values + tile * width, out + tile * TILE_KEYS * 4
        if n == 6:
            score_tile(kind, 6, query, k, v, dim, o, KEYS)
        elif n == 4:
            score_tile(kind, 4, query, k, v, dim, o, KEYS)
        elif n == 2:
            score_tile(kind, 2, query, k, v, dim, o, KEYS)
        else:
            score_tile(kind, 1, query, k, v, dim, o, KEYS)


@exactly
def _add_values(
    kind: Any, n: int, weights: int, values: int, ahead: int, lo: int, hi: int, dim: int, out: int
) -> None:
    """Add the values of a block, weighted, to ``n`` rows ``[dim]`` at ``out``."""
    if n == 6:
        value_tile(kind, 6, weights, KEYS, values, ahead, lo, hi, dim, out)
    elif n == 4:
        value_tile(kind, 4, weights, KEYS, values, ahead, lo, hi, dim, out)
    elif n == 2:
        value_tile(kind, 2, weights, KEYS, values, ahead, lo, hi, dim, out)
    else:
        value_tile(kind, 1, weights, KEYS, values, ahead, lo, hi, dim, out)


@exactly
def _together(left: int) -> int:
    """How many of the queries that are ``left`` are taken together."""
    if left >= 6:
        return 6
    if left >= 4:
        return 4
    return 2 if left >= 2 else 1


@exactly
def _weigh(
    scores: Any,
    lo: int,
    hi: int,
    end: int,
    softcap: float,
    peak: Any,
    total: Any,
    out: int,
    dim: int,
) -> None:
    """Turn a query's scores of a block into weights, those outside ``lo..hi`` into zeros.

    ``peak`` and ``total`` are the running maximum and sum (arrays of one); what has been added up
    ``[dim]`` at ``out`` is scaled to a new maximum.
    """
    if lo >= hi:
        scores[:end] = 0
        return
    scores[:lo] = _MINUS_INFINITY
    scores[hi:end] = _MINUS_INFINITY
    if softcap > 0:
        for j in range(lo, hi):
            scores[j] = np.tanh(scores[j] / softcap) * softcap
    at = scores.ctypes.data
    highest = splat(peak[0])
    for j in range(0, end, LANES):
        highest = maximum(load(at, j), highest)
    new = lane_maximum(highest)
    low = splat(-new)
    sums = zero()
    for j in range(0, end, LANES):
        weight = exponential(add(load(at, j), low))
        sums = add(sums, weight)
        store(at, j, weight)
    if new > peak[0]:
        scale = exponential(splat(peak[0] - new))
        for d in range(0, dim, LANES):
            store(out, d, multiply(load(out, d), scale))
        total[0] *= first_lane(scale)
        peak[0] = new
    total[0] += lane_sum(sums)


@exactly
def _attend(kind: Any, data: int) -> None:
    """Take items of the task at ``data``, one after the other, until none is left."""
    task = carray(numbers(data), len(TASK))
    items = carray(numbers(task[_ITEMS]), (task[_NUM_ITEMS], ITEM_NUMBERS))
    dim, per_kv, window = task[_DIM], task[_PER_KV], task[_WINDOW]
    softcap = first_lane(load(task[_SOFTCAP], 0))
    size = kind.itemsize
    while True:
        number = count_up(data)
        if number >= task[_NUM_ITEMS]:
            return
        sequence, head, first_row, rows, position = items[number]
        count = rows * per_kv
        offset = (head * task[_ROWS] + first_row) * per_kv * dim * 4
        query, result = task[_QUERIES] + offset, task[_OUT] + offset
        for d in range(0, count * dim, LANES):
            store(result, d, zero())
        buffer = carray(numbers(task[_BUFFERS] + sequence * BUFFER_NUMBERS * 8), BUFFER_NUMBERS)
        keys = buffer[0] + head * buffer[2] * size
        values = buffer[1] + head * buffer[2] * size
        scores = np.empty((count, KEYS), np.float32)
        peaks = np.full(count, _MINUS_INFINITY, np.float32)
        totals = np.zeros(count, np.float32)
        begin = max(0, position + 1 - window) if window > 0 else 0
        for block in range(begin // KEYS * KEYS, position + rows, KEYS):
            length = min(KEYS, position + rows - block)
            # Whole tiles, so that a key has the same place in them always.
            skip = max(0, begin - block) // TILE_KEYS * TILE_KEYS
            tiles = (length + TILE_KEYS - 1) // TILE_KEYS * TILE_KEYS - skip
            end = (length + LANES - 1) // LANES * LANES
            block_keys = keys + (block + skip) * dim * size
            block_values = values + block * dim * size
            score = scores.ctypes.data
            g = 0
            while g < count:
                step = _together(count - g)
                at = score + g * KEYS * 4
                group = query + g * dim * 4
                _tiles(
                    kind, step, group, block_keys, block_values + skip * dim * size, tiles, dim,
                    at + skip * 4,
                )  # fmt: skip
                for i in range(g, g + step):
                    lo, hi = _seen(position + i // per_kv, window, block)
                    _weigh(
                        scores[i], lo, hi, end, softcap, peaks[i : i + 1], totals[i : i + 1],
                        result + i * dim * 4, dim,
                    )  # fmt: skip
                lo, _ = _seen(position + g // per_kv, window, block)
                _, hi = _seen(position + (g + step - 1) // per_kv, window, block)
                if hi > lo:
                    _add_values(
                        kind, step, at, block_values, keys + (block + KEYS) * dim * size, lo, hi,
                        dim, result + g * dim * 4,
                    )  # fmt: skip
                g += step
        for i in range(count):
            factor = splat(_ONE / totals[i])
            for d in range(0, dim, LANES):
                store(result, i * dim + d, multiply(load(result, i * dim + d), factor))


@exactly
def _seen(position: int, window: int, block: int) -> tuple[int, int]:
    """The keys of ``block`` that the query at ``position`` sees, counted from its beginning."""
    hi = min(position + 1 - block, KEYS)
    lo = max(0, position + 1 - window - block) if window > 0 else 0
    return lo, hi


def attend_floats(data: int) -> None:
    """Attention over float32 keys and values.

    Several threads may call it with the same task at once; each takes what the others leave.

    Parameters:
      data: address of int64 numbers in the order of ``TASK``: ``next`` is 0 at first; ``items`` is
        the address of ``num_items`` items and ``buffers`` of a sequence's numbers for each of them;
        ``queries`` and ``out`` are addresses of float32 ``[kv_heads, rows * per_kv, dim]``, scaled
        and written, with dim a multiple of 16; a query sees at most ``window`` keys, 0 for all;
        ``softcap`` is the address of 16 float32, at which scores are capped; 0 for not at all.
        What lies beyond a sequence's end in its buffers is finite, and there is room for whole
        blocks of 4 positions.
    """
    _attend(_FLOATS, data)


def attend_halves(data: int) -> None:
    """The same over float16 keys and values."""
    _attend(_HALVES, data)


_FLOATS = np.zeros(0, np.float32)
_HALVES = np.zeros(0, np.uint16)


@lru_cache(maxsize=2)
def compiled(function: Callable[[int], None]) -> Any:
    """``function`` as C knows it, with its ``address``; called from Python, it frees the lock."""
    return cfunc(types.void(types.intp), **CACHED)(function)
