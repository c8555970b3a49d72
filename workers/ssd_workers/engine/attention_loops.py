"""Attention of float32 queries over cached keys and values on a CPU, in loops of our own.

The order of every sum is written down (see :mod:`ssd_workers.engine.vectors`) and depends on a
row's position and window alone, so a row has the same bits in a prompt, in a draft and by itself,
beside whatever other rows and on however many threads.

Scores are taken block by block of ``KEYS`` absolute positions with a running maximum (Milakov and
Gimelshein, "Online normalizer calculation for softmax", 2018), so a long context takes no more
room than a short one. Several queries share what is read of a block.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ssd_workers.engine.kernels import exactly
from ssd_workers.engine.vectors import (
    LANES,
    add,
    exponential,
    first_lane,
    lane_maximum,
    lane_sum,
    load,
    load_one,
    maximum,
    multiply,
    multiply_add,
    splat,
    store,
    store_sums,
    zero,
)

KEYS = 256
"""Positions of a block; a multiple of what caches grow by would do as well."""

# Queries that share a read of a key, and keys that share a read of a query.
_QUERIES = 3
_TILE = 4

_FLOATS = np.zeros(0, np.float32)  # says that what is loaded is float32
_MINUS_INFINITY = np.float32(-np.inf)
_ONE = np.float32(1)

Items = NDArray[np.int64]
"""``[items, 5]``: number of the sequence, number of the key head, first of the packed rows, rows,
position of the first."""

Buffers = NDArray[np.int64]
"""``[sequences, 3]``: addresses of the keys and of the values ``[kv_heads, capacity, dim]``, and
the elements from one head to the next."""


@exactly
def _scores_of_three(kind: Any, queries: int, keys: int, count: int, dim: int, out: int) -> None:
    """Products of three queries with ``count`` keys, a multiple of 4; rows of ``KEYS`` at out."""
    for j in range(0, count, _TILE):
        k0 = j * dim
        k1, k2, k3 = k0 + dim, k0 + 2 * dim, k0 + 3 * dim
        a0, a1, a2, a3 = zero(), zero(), zero(), zero()
        b0, b1, b2, b3 = zero(), zero(), zero(), zero()
        c0, c1, c2, c3 = zero(), zero(), zero(), zero()
        for d in range(0, dim, LANES):
            x0, x1 = load(kind, keys, k0 + d), load(kind, keys, k1 + d)
            x2, x3 = load(kind, keys, k2 + d), load(kind, keys, k3 + d)
            q = load(_FLOATS, queries, d)
            a0, a1 = multiply_add(q, x0, a0), multiply_add(q, x1, a1)
            a2, a3 = multiply_add(q, x2, a2), multiply_add(q, x3, a3)
            q = load(_FLOATS, queries, d + dim)
            b0, b1 = multiply_add(q, x0, b0), multiply_add(q, x1, b1)
            b2, b3 = multiply_add(q, x2, b2), multiply_add(q, x3, b3)
            q = load(_FLOATS, queries, d + 2 * dim)
            c0, c1 = multiply_add(q, x0, c0), multiply_add(q, x1, c1)
            c2, c3 = multiply_add(q, x2, c2), multiply_add(q, x3, c3)
        store_sums(out, j, a0, a1, a2, a3)
        store_sums(out, j + KEYS, b0, b1, b2, b3)
        store_sums(out, j + 2 * KEYS, c0, c1, c2, c3)


@exactly
def _scores_of_one(kind: Any, query: int, keys: int, count: int, dim: int, out: int) -> None:
    """The same for a single query, and the same bits."""
    for j in range(0, count, _TILE):
        k0 = j * dim
        k1, k2, k3 = k0 + dim, k0 + 2 * dim, k0 + 3 * dim
        a0, a1, a2, a3 = zero(), zero(), zero(), zero()
        for d in range(0, dim, LANES):
            q = load(_FLOATS, query, d)
            a0 = multiply_add(q, load(kind, keys, k0 + d), a0)
            a1 = multiply_add(q, load(kind, keys, k1 + d), a1)
            a2 = multiply_add(q, load(kind, keys, k2 + d), a2)
            a3 = multiply_add(q, load(kind, keys, k3 + d), a3)
        store_sums(out, j, a0, a1, a2, a3)


@exactly
def _add_values_to_three(
    kind: Any, weights: int, values: int, first: int, last: int, dim: int, out: int
) -> None:
    """Add values ``first..last`` of a block to three rows ``[dim]`` at ``out``, each weighted."""
    for d in range(0, dim - dim % 32, 32):
        a0, a1 = load(_FLOATS, out, d), load(_FLOATS, out, d + 16)
        b0, b1 = load(_FLOATS, out, dim + d), load(_FLOATS, out, dim + d + 16)
        c0, c1 = load(_FLOATS, out, 2 * dim + d), load(_FLOATS, out, 2 * dim + d + 16)
        for j in range(first, last):
            v0, v1 = load(kind, values, j * dim + d), load(kind, values, j * dim + d + 16)
            w = splat(load_one(weights, j))
            a0, a1 = multiply_add(w, v0, a0), multiply_add(w, v1, a1)
            w = splat(load_one(weights, j + KEYS))
            b0, b1 = multiply_add(w, v0, b0), multiply_add(w, v1, b1)
            w = splat(load_one(weights, j + 2 * KEYS))
            c0, c1 = multiply_add(w, v0, c0), multiply_add(w, v1, c1)
        store(out, d, a0)
        store(out, d + 16, a1)
        store(out, dim + d, b0)
        store(out, dim + d + 16, b1)
        store(out, 2 * dim + d, c0)
        store(out, 2 * dim + d + 16, c1)
    if dim % 32:
        d = dim - LANES
        a0, b0, c0 = (
            load(_FLOATS, out, d),
            load(_FLOATS, out, dim + d),
            load(_FLOATS, out, 2 * dim + d),
        )
        for j in range(first, last):
            v0 = load(kind, values, j * dim + d)
            a0 = multiply_add(splat(load_one(weights, j)), v0, a0)
            b0 = multiply_add(splat(load_one(weights, j + KEYS)), v0, b0)
            c0 = multiply_add(splat(load_one(weights, j + 2 * KEYS)), v0, c0)
        store(out, d, a0)
        store(out, dim + d, b0)
        store(out, 2 * dim + d, c0)


@exactly
def _add_values_to_one(
    kind: Any, weights: int, values: int, first: int, last: int, dim: int, out: int
) -> None:
    """The same for a single row, and the same bits."""
    for d in range(0, dim, LANES):
        a = load(_FLOATS, out, d)
        for j in range(first, last):
            a = multiply_add(splat(load_one(weights, j)), load(kind, values, j * dim + d), a)
        store(out, d, a)


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
        highest = maximum(load(_FLOATS, at, j), highest)
    new = lane_maximum(highest)
    low = splat(-new)
    sums = zero()
    for j in range(0, end, LANES):
        weight = exponential(add(load(_FLOATS, at, j), low))
        sums = add(sums, weight)
        store(at, j, weight)
    if new > peak[0]:
        scale = exponential(splat(peak[0] - new))
        for d in range(0, dim, LANES):
            store(out, d, multiply(load(_FLOATS, out, d), scale))
        total[0] *= first_lane(scale)
        peak[0] = new
    total[0] += lane_sum(sums)


@exactly
def attend(
    kind: Any,
    queries: NDArray[np.float32],
    out: NDArray[np.float32],
    buffers: Buffers,
    items: Items,
    first_item: int,
    last_item: int,
    per_kv: int,
    window: int,
    softcap: float,
) -> None:
    """Attention of the queries of ``items[first_item:last_item]``.

    Parameters:
      kind: an array of the type of the cache, float32, or uint16 for float16.
      queries: ``[kv_heads, >= rows * per_kv, dim]``, scaled; dim a multiple of 16.
      out: written, like ``queries``.
      buffers: see :data:`Buffers`; what lies beyond a sequence's end in them is finite, and there
        is room for whole blocks of 4 positions.
      items: see :data:`Items`.
      per_kv: queries of a row that share a key head.
      window: keys that a query sees at most; 0 for all.
      softcap: scores are capped at this; 0 for not at all.
    """
    dim = queries.shape[2]
    size = kind.itemsize
    for number in range(first_item, last_item):
        sequence, head, first_row, rows, position = items[number]
        count = rows * per_kv
        query = queries[head, first_row * per_kv :].ctypes.data
        result = out[head, first_row * per_kv :].ctypes.data
        out[head, first_row * per_kv : first_row * per_kv + count] = 0
        offset = head * buffers[sequence, 2] * size
        keys, values = buffers[sequence, 0] + offset, buffers[sequence, 1] + offset
        scores = np.empty((count, KEYS), np.float32)
        peaks = np.full(count, _MINUS_INFINITY, np.float32)
        totals = np.zeros(count, np.float32)
        begin = max(0, position + 1 - window) if window > 0 else 0
        for block in range(begin // KEYS * KEYS, position + rows, KEYS):
            length = min(KEYS, position + rows - block)
            # Whole tiles, so that a key has the same place in them always.
            skip = max(0, begin - block) // _TILE * _TILE
            tiles = (length + _TILE - 1) // _TILE * _TILE - skip
            end = (length + LANES - 1) // LANES * LANES
            block_keys = keys + (block + skip) * dim * size
            block_values = values + block * dim * size
            score = scores.ctypes.data
            g = 0
            while g < count:
                step = _QUERIES if g + _QUERIES <= count else 1
                at = score + (g * KEYS + skip) * 4
                if step == _QUERIES:
                    _scores_of_three(kind, query + g * dim * 4, block_keys, tiles, dim, at)
                else:
                    _scores_of_one(kind, query + g * dim * 4, block_keys, tiles, dim, at)
                for i in range(g, g + step):
                    lo, hi = _seen(position + i // per_kv, window, block)
                    _weigh(
                        scores[i], lo, hi, end, softcap, peaks[i : i + 1], totals[i : i + 1],
                        result + i * dim * 4, dim,
                    )  # fmt: skip
                lo, _ = _seen(position + g // per_kv, window, block)
                _, hi = _seen(position + (g + step - 1) // per_kv, window, block)
                at = score + g * KEYS * 4
                if hi > lo and step == _QUERIES:
                    _add_values_to_three(kind, at, block_values, lo, hi, dim, result + g * dim * 4)
                elif hi > lo:
                    _add_values_to_one(kind, at, block_values, lo, hi, dim, result + g * dim * 4)
                g += step
        for i in range(count):
            factor = splat(_ONE / totals[i])
            for d in range(0, dim, LANES):
                store(result, i * dim + d, multiply(load(_FLOATS, result, i * dim + d), factor))


@exactly
def _seen(position: int, window: int, block: int) -> tuple[int, int]:
    """The keys of ``block`` that the query at ``position`` sees, counted from its beginning."""
    hi = min(position + 1 - block, KEYS)
    lo = max(0, position + 1 - window - block) if window > 0 else 0
    return lo, hi
