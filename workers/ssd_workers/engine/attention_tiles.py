"""The two inner loops of attention, written in LLVM's language for any number of queries.

A tile keeps its sums in registers: ``n`` queries by four keys, or ``n`` rows of the result by some
vectors of values. What the compiler sees is the order of operations itself, so a number has the
same bits in a tile of one query and in one of six.
"""

# ruff: noqa: ARG001 (what an intrinsic takes is fixed by numba)

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ssd_workers.engine.vectors import LANES, VECTOR, at, call, loaded, splatted, stored_sums, width

TILE_KEYS = 4
_AHEAD = 64  # keys by which memory is asked for them before they are used
_REGISTERS = 24  # for sums; a processor with AVX-512 has 32


def _tile(function: Callable[..., Any]) -> Callable[..., Any]:
    return cast(Callable[..., Any], intrinsic(prefer_literal=True)(function))


@_tile
def score_tile(
    context: Any, kind: Any, n: Any, queries: Any, keys: Any, values: Any, dim: Any,
    out: Any, stride: Any,
) -> Any:  # fmt: skip
    """Scores of ``n`` queries with four keys.

    Parameters:
      kind: an array of the type of keys and values, float32, or uint16 for float16.
      n: how many queries; a constant.
      queries: address of ``[n, dim]`` float32.
      keys: address of ``[4, dim]`` of ``kind``.
      values: the same of the four values, which come next and are brought near the processor.
      dim: a multiple of 16.
      out: address of float32, written: four numbers for every query.
      stride: from one query's numbers to the next one's.
    """
    size, count = width(kind), n.literal_value

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, _, queries, keys, values, dim, out, stride = args
        zero = ir.Constant(VECTOR, [0.0] * LANES)
        sums = [
            [cgutils.alloca_once_value(builder, zero) for _ in range(TILE_KEYS)]
            for _ in range(count)
        ]
        step, distance = dim.type(LANES), builder.mul(dim.type(_AHEAD), dim)
        with cgutils.for_range_slice(builder, dim.type(0), dim, step, dim.type) as (d, _):
            places = [builder.add(builder.mul(dim.type(j), dim), d) for j in range(TILE_KEYS)]
            for place in places:
                _prefetch(builder, values, place, size)
                _prefetch(builder, keys, builder.add(place, distance), size)
            vectors = [loaded(builder, keys, place, size) for place in places]
            for i in range(count):
                place = builder.add(builder.mul(dim.type(i), dim), d)
                query = loaded(builder, queries, place, 4)
                for total, vector in zip(sums[i], vectors, strict=True):
                    _add_product(builder, query, vector, total)
        for i in range(count):
            place = builder.mul(dim.type(i), stride)
            stored_sums(builder, out, place, [builder.load(total) for total in sums[i]])
        return context.get_dummy_value()

    word = types.intp
    return types.none(kind, n, word, word, word, word, word, word), code


@_tile
def value_tile(
    context: Any, kind: Any, n: Any, weights: Any, stride: Any, values: Any, ahead: Any,
    first: Any, last: Any, dim: Any, out: Any,
) -> Any:  # fmt: skip
    """Add values ``first..last``, weighted, to ``n`` rows.

    Parameters:
      kind: an array of the type of the values, float32, or uint16 for float16.
      n: how many rows; a constant.
      weights: address of float32: a row's weight of value ``j`` is at ``j``.
      stride: from one row's weights to the next one's.
      values: address of ``[>= last, dim]`` of ``kind``.
      ahead: address of the keys of the same shape that come next, and that are brought near.
      dim: a multiple of 16.
      out: address of ``[n, dim]`` float32.
    """
    size, count = width(kind), n.literal_value

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, _, weights, stride, values, ahead, first, last, dim, out = args
        word = dim.type

        def columns(begin: Any, end: Any, vectors: int) -> None:
            step = word(vectors * LANES)
            with cgutils.for_range_slice(builder, begin, end, step, word) as (d, _):
                offsets = [builder.add(d, word(v * LANES)) for v in range(vectors)]
                places = [
                    [builder.add(builder.mul(word(i), dim), offset) for offset in offsets]
                    for i in range(count)
                ]
                sums = [
                    [cgutils.alloca_once(builder, VECTOR) for _ in offsets] for _ in range(count)
                ]
                for row, totals in zip(places, sums, strict=True):
                    for place, total in zip(row, totals, strict=True):
                        builder.store(loaded(builder, out, place, 4), total)
                with cgutils.for_range_slice(builder, first, last, word(1), word) as (j, _):
                    base = builder.mul(j, dim)
                    for offset in offsets:
                        _prefetch(builder, ahead, builder.add(base, offset), size)
                    parts = [
                        loaded(builder, values, builder.add(base, offset), size)
                        for offset in offsets
                    ]
                    for i in range(count):
                        place = builder.add(builder.mul(word(i), stride), j)
                        weight = builder.load(at(builder, weights, place, ir.FloatType(), 4))
                        weight = splatted(builder, weight)
                        for part, total in zip(parts, sums[i], strict=True):
                            _add_product(builder, weight, part, total)
                for row, totals in zip(places, sums, strict=True):
                    for place, total in zip(row, totals, strict=True):
                        pointer = at(builder, out, place, VECTOR, 4)
                        builder.store(builder.load(total), pointer).align = 4

        vectors = min(8, _REGISTERS // count)
        vectors = 1 << (vectors.bit_length() - 1)
        wide = builder.sub(dim, builder.srem(dim, word(vectors * LANES)))
        columns(word(0), wide, vectors)
        columns(wide, dim, 1)
        return context.get_dummy_value()

    word = types.intp
    return types.none(kind, n, word, word, word, word, word, word, word, word), code


def _add_product(builder: Any, a: Any, b: Any, total: Any) -> None:
    builder.store(call(builder, "llvm.fma.v16f32", a, b, builder.load(total)), total)


def _prefetch(builder: Any, address: Any, index: Any, size: int) -> None:
    byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    pointer = at(builder, address, index, ir.IntType(8), size)
    # To read, into the second level, data.
    builder.call(function, [pointer, number(0), number(2), number(1)])
