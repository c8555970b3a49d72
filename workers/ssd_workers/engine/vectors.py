"""Vectors of 16 floats for numba loops whose order of operations must be ours.

A compiler that vectorises a sum chooses its order, and another loop over the same numbers may get
another one. Here every addition is written down: a product of vectors, a sum of lanes. LLVM maps
them to the widest registers of the processor, one AVX-512 register or two of AVX2.
"""

# ruff: noqa: ARG001 (what an intrinsic takes is fixed by numba)

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

LANES = 16
_FLOAT = ir.FloatType()
_HALVES = ir.VectorType(ir.HalfType(), LANES)
VECTOR = ir.VectorType(_FLOAT, LANES)

# exp(t) on |t| <= ln(2) / 2: a minimax polynomial, and ln(2) in two parts that multiply exactly.
_LOWEST = -87.0
_LOG2_E = 1.44269504
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
_POLYNOMIAL = (
    1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1,
    5.0000001201e-1, 1.0, 1.0,
)  # fmt: skip


def _intrinsic(function: Callable[..., Any]) -> Callable[..., Any]:
    return cast(Callable[..., Any], intrinsic(function))


class _Vector(types.Type):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(name="Vector16f")


vector = _Vector()


@register_model(_Vector)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, VECTOR)


@_intrinsic
def zero(context: Any) -> Any:
    """Sixteen zeros."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(VECTOR, [0.0] * LANES)

    return vector(), code


@_intrinsic
def splat(context: Any, x: Any) -> Any:
    """Sixteen times ``x``."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return splatted(builder, args[0])

    return vector(types.float32), code


def splatted(builder: Any, value: Any) -> Any:
    """Code for sixteen times ``value``."""
    one = builder.insert_element(ir.Constant(VECTOR, ir.Undefined), value, ir.IntType(32)(0))
    mask = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
    return builder.shuffle_vector(one, ir.Constant(VECTOR, ir.Undefined), mask)


def at(builder: Any, address: Any, index: Any, to: Any, size: int) -> Any:
    """A pointer to ``to`` at element ``index``, each of ``size`` bytes, of what is at address."""
    offset = builder.mul(index, index.type(size))
    return builder.inttoptr(builder.add(address, offset), to.as_pointer())


def width(kind: Any) -> int:
    """Bytes of a number in an array of type ``kind``: float32, or float16 as uint16."""
    return 2 if kind.dtype == types.uint16 else 4


def loaded(builder: Any, address: Any, index: Any, size: int) -> Any:
    """Code for a vector of the numbers of ``size`` bytes from ``index`` on."""
    value = builder.load(at(builder, address, index, _HALVES if size == 2 else VECTOR, size))
    value.align = size
    return builder.fpext(value, VECTOR) if size == 2 else value


@_intrinsic
def load(context: Any, address: Any, index: Any) -> Any:
    """Sixteen float32 from element ``index`` on of those at ``address``; nothing is checked."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return loaded(builder, args[0], args[1], 4)

    return vector(types.intp, types.intp), code


@_intrinsic
def numbers(context: Any, address: Any) -> Any:
    """A pointer to the int64 numbers at ``address``, for numba's ``carray``."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], ir.IntType(64).as_pointer())

    return types.CPointer(types.int64)(types.intp), code


@_intrinsic
def count_up(context: Any, address: Any) -> Any:
    """The int64 at ``address``, which is one more for the next thread that asks."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, ir.IntType(64)(1), "monotonic")

    return types.int64(types.intp), code


@_intrinsic
def store(context: Any, address: Any, index: Any, value: Any) -> Any:
    """Write to elements ``index`` to ``index + 15`` of the float32 at ``address``; no checks."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[2], at(builder, args[0], args[1], VECTOR, 4)).align = 4
        return context.get_dummy_value()

    return types.none(types.intp, types.intp, vector), code


@_intrinsic
def element(context: Any, kind: Any, x: Any) -> Any:
    """The float32 ``x`` as an element of the array ``kind``; of uint16, the bits of a float16."""
    half = kind.dtype == types.uint16

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if not half:
            return args[1]
        return builder.bitcast(builder.fptrunc(args[1], ir.HalfType()), ir.IntType(16))

    return kind.dtype(kind, types.float32), code


@_intrinsic
def multiply(context: Any, a: Any, b: Any) -> Any:
    """``a * b`` in each lane."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fmul(*args)

    return vector(vector, vector), code


@_intrinsic
def add(context: Any, a: Any, b: Any) -> Any:
    """``a + b`` in each lane."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fadd(*args)

    return vector(vector, vector), code


@_intrinsic
def maximum(context: Any, a: Any, b: Any) -> Any:
    """The larger of ``a`` and ``b`` in each lane, and ``b`` where one is NaN."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", *args), *args)

    return vector(vector, vector), code


@_intrinsic
def exponential(context: Any, x: Any) -> Any:
    """``exp(x)`` in each lane, ``x <= 0``, to a relative error of 2e-7; 0 below -87; NaN of NaN."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def fma(a: Any, b: Any, c: Any) -> Any:
            return call(builder, "llvm.fma.v16f32", a, b, c)

        x = args[0]
        tiny = builder.fcmp_ordered("<", x, _constant(_LOWEST))
        z = builder.select(tiny, _constant(_LOWEST), x)
        n = call(builder, "llvm.floor.v16f32", fma(z, _constant(_LOG2_E), _constant(0.5)))
        t = fma(n, _constant(-_LN2_HIGH), z)
        t = fma(n, _constant(-_LN2_LOW), t)
        p = _constant(_POLYNOMIAL[0])
        for factor in _POLYNOMIAL[1:]:
            p = fma(p, t, _constant(factor))
        integer = ir.VectorType(ir.IntType(32), LANES)
        exponent = builder.add(builder.fptosi(n, integer), ir.Constant(integer, [127] * LANES))
        power = builder.shl(exponent, ir.Constant(integer, [23] * LANES))
        result = builder.fmul(p, builder.bitcast(power, VECTOR))
        return builder.select(tiny, _constant(0.0), result)

    return vector(vector), code


def call(builder: Any, name: str, *args: Any) -> Any:
    """Code for LLVM's function ``name`` of vectors."""
    kind = ir.FunctionType(VECTOR, [VECTOR] * len(args))
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def _constant(value: float) -> Any:
    # As a float32 would hold it: LLVM refuses others.
    return ir.Constant(VECTOR, [float(np.float32(value))] * LANES)


def _halves(builder: Any, value: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """The lower half of a vector combined with the upper one."""
    width = value.type.count // 2
    index = ir.VectorType(ir.IntType(32), width)
    unused = ir.Constant(value.type, ir.Undefined)
    parts = [ir.Constant(index, list(range(at, at + width))) for at in (0, width)]
    return combine(*(builder.shuffle_vector(value, unused, part) for part in parts))


def _reduced(builder: Any, value: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """One lane, by halves."""
    while value.type.count > 1:
        value = _halves(builder, value, combine)
    return builder.extract_element(value, ir.IntType(32)(0))


@_intrinsic
def lane_sum(context: Any, value: Any) -> Any:
    """The sum of the lanes: halves are added until one is left."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _reduced(builder, args[0], builder.fadd)

    return types.float32(vector), code


@_intrinsic
def first_lane(context: Any, value: Any) -> Any:
    """Lane 0."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.extract_element(args[0], ir.IntType(32)(0))

    return types.float32(vector), code


@_intrinsic
def lane_maximum(context: Any, value: Any) -> Any:
    """The largest lane; NaN is not one."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _reduced(
            builder, args[0], lambda a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b)
        )

    return types.float32(vector), code


def stored_sums(builder: Any, address: Any, index: Any, values: Sequence[Any]) -> None:
    """Code to write the sums of the lanes of four vectors side by side.

    A sum is ``((0+8+4+12) + (2+10+6+14)) + ((1+9+5+13) + (3+11+7+15))``, in lanes added in this
    order from the innermost brackets on.
    """

    def mixed(x: Any, y: Any, *lanes: int) -> Any:
        index = ir.Constant(ir.VectorType(ir.IntType(32), 4), list(lanes))
        return builder.shuffle_vector(x, y, index)

    quarters = []
    for value in values:
        while value.type.count > 4:
            value = _halves(builder, value, builder.fadd)
        quarters.append(value)
    a, b, c, d = quarters
    pairs = [
        builder.fadd(mixed(x, y, 0, 4, 1, 5), mixed(x, y, 2, 6, 3, 7)) for x, y in ((a, b), (c, d))
    ]
    sums = builder.fadd(mixed(*pairs, 0, 1, 4, 5), mixed(*pairs, 2, 3, 6, 7))
    pointer = at(builder, address, index, ir.VectorType(_FLOAT, 4), 4)
    builder.store(sums, pointer).align = 4
