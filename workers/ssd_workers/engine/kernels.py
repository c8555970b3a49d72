"""Small fused loops between the int8 products of a step, compiled by numba.

One decoded token meets a hundred small operations in each layer; run one by one from Python they
cost as much as a quarter of the products. Here each group of them is one loop over a row.

A row is computed from beginning to end by one thread in one order, so its bits cannot depend on
the rows beside it. That is why elementwise loops allow no reordering of floating-point operations,
and sums may only be reordered in the way that was compiled in, which is the same for every row.

Arrays are C-contiguous float32 unless said otherwise; ``R`` rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ssd_workers.engine.compiled import exactly, with_sums
from ssd_workers.engine.vectors import element

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

_HALF = np.float32(128.5)  # the zero point 128, and one half because the cast cuts off
_LEVELS = np.float32(127)
_TINY = np.float32(1e-12)
_ONE = np.float32(1)
_ABSOLUTE = np.int32(0x7FFFFFFF)  # all bits of a float but its sign

# exp(t) on |t| <= ln(2) / 2: a minimax polynomial, and ln(2) in two parts that multiply exactly.
_LOG2_E = np.float32(1.44269504)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_E6, _E5 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3)
_E4, _E3 = np.float32(8.3334519073e-3), np.float32(4.1665795894e-2)
_E2, _E1 = np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)
_LOWEST, _HIGHEST = np.float32(-87), np.float32(88)


@exactly
def _peak(bits: NDArray[np.int32]) -> np.float32:
    """The largest absolute value of a row, given as its bits; NaN if there is one.

    Compared as integers, which order like the floats they encode and put NaN above all.
    """
    peak = np.zeros(1, np.int32)
    largest = np.int32(0)
    for i in range(bits.shape[0]):
        largest = max(largest, bits[i] & _ABSOLUTE)
    peak[0] = largest
    value = peak.view(np.float32)[0]
    return _TINY if value < _TINY else value  # type: ignore[no-any-return]


@exactly
def _quantize_row(x: Floats, out: Bytes) -> np.float32:
    """``[n]`` to uint8 around 128; returns the scale."""
    peak = _peak(x.view(np.int32))
    factor = _LEVELS / peak
    for i in range(x.shape[0]):
        out[i] = np.uint8(np.int32(x[i] * factor + _HALF))
    return peak / _LEVELS


@exactly
def quantize(x: Floats, out: Bytes, scale: Floats) -> None:
    """``[R, n]`` to uint8 ``out [R, n]`` around 128 and ``scale [R]``."""
    for r in range(x.shape[0]):
        scale[r] = _quantize_row(x[r], out[r])


@exactly
def quantize_heads(x: Floats, out: Bytes, scale: Floats) -> None:
    """Like :func:`quantize` for attention's output ``[kv_heads, >= R * per_kv, dim]``.

    ``out`` is ``[R, kv_heads * per_kv * dim]``, heads in the order of the model.
    """
    kv_heads, _, dim = x.shape
    rows, width = out.shape
    per_kv = width // (kv_heads * dim)
    row = np.empty(width, np.float32)
    for r in range(rows):
        at = 0
        for kv in range(kv_heads):
            for head in range(r * per_kv, (r + 1) * per_kv):
                for i in range(dim):
                    row[at + i] = x[kv, head, i]
                at += dim
        scale[r] = _quantize_row(row, out[r])


@exactly
def dequantize(y: Floats, scale: Floats, bias: Floats) -> None:
    """Multiply each row of ``y [R, n]`` by its ``scale`` and add ``bias [n]``, in place.

    A ``bias`` of length 0 is none.
    """
    for r in range(y.shape[0]):
        row, factor = y[r], scale[r]
        if bias.shape[0] == 0:
            for i in range(row.shape[0]):
                row[i] = row[i] * factor
        else:
            for i in range(row.shape[0]):
                row[i] = row[i] * factor + bias[i]


@with_sums
def rms_norm(x: Floats, out: Floats, weight: Floats, eps: np.float32) -> None:
    """``out = weight * x / sqrt(mean(x**2) + eps)`` over each row of ``[R, n]``."""
    width = x.shape[1]
    for r in range(x.shape[0]):
        _norm_row(x[r], weight, eps, width, out[r])


@with_sums
def _norm_row(x: Floats, weight: Floats, eps: np.float32, width: int, out: Floats) -> None:
    squares = np.float32(0)
    for i in range(width):
        squares += x[i] * x[i]
    factor = _ONE / np.sqrt(squares / np.float32(width) + eps)
    for i in range(width):
        out[i] = weight[i] * (x[i] * factor)


@with_sums
def norm_quantize(x: Floats, out: Bytes, scale: Floats, weight: Floats, eps: np.float32) -> None:
    """:func:`rms_norm` of ``x [R, n]``, quantised to ``out [R, n]`` and ``scale [R]``."""
    row = np.empty(x.shape[1], np.float32)
    for r in range(x.shape[0]):
        _norm_row(x[r], weight, eps, x.shape[1], row)
        scale[r] = _quantize_row(row, out[r])


@exactly
def add_product(x: Floats, y: Floats, scale: Floats, out: Floats, bias: Floats) -> None:
    """``out = x + (scale * y + bias)``, rows ``[R, n]`` with ``scale [R]``; no bias if empty."""
    for r in range(x.shape[0]):
        factor = scale[r]
        if bias.shape[0] == 0:
            for i in range(x.shape[1]):
                out[r, i] = x[r, i] + y[r, i] * factor
        else:
            for i in range(x.shape[1]):
                out[r, i] = x[r, i] + (y[r, i] * factor + bias[i])


@exactly
def gate(
    y: Floats, scale: Floats, out: Bytes, out_scale: Floats, linear: np.float32, cubic: np.float32
) -> None:
    """A gated feed-forward layer between its two products.

    ``y [R, 2n]`` holds the products of the gate and of the up projection, not yet multiplied by
    ``scale [R]``. With g and u as their halves, ``g * sigmoid(linear * g + cubic * g**3) * u`` is
    quantised to ``out [R, n]`` and ``out_scale [R]``. (1, 0) is SiLU; tanh-GELU is of this form
    too, since 1 + tanh(z) = 2 sigmoid(2z).
    """
    width = y.shape[1] // 2
    hidden = np.empty(width, np.float32)
    exponent = np.empty(width, np.int32)
    power = exponent.view(np.float32)
    for r in range(y.shape[0]):
        factor = scale[r]
        row, up = y[r, :width], y[r, width:]
        for i in range(width):
            g = row[i] * factor
            z = -(linear * g + cubic * g * g * g)
            z = min(max(z, _LOWEST), _HIGHEST)
            n = np.floor(z * _LOG2_E + np.float32(0.5))
            t = z - n * _LN2_HIGH
            t = t - n * _LN2_LOW
            p = _E6 * t + _E5
            p = p * t + _E4
            p = p * t + _E3
            p = p * t + _E2
            p = p * t + _E1
            hidden[i] = p * t * t + t + _ONE
            # 2**n, put together from its bits.
            exponent[i] = (np.int32(n) + np.int32(127)) << np.int32(23)
        for i in range(width):
            g = row[i] * factor
            hidden[i] = g / (_ONE + hidden[i] * power[i]) * (up[i] * factor)
        out_scale[r] = _quantize_row(hidden, out[r])


@exactly
def put(x: Floats, out: Any) -> None:
    """Copy ``x [n]`` to ``out [n]``, float32, or float16 as uint16."""
    for i in range(x.shape[0]):
        out[i] = element(out, x[i])


@with_sums
def rotate(
    y: Floats,
    scale: Floats,
    bias: Floats,
    cos: Floats,
    sin: Floats,
    norms: Floats,
    eps: np.float32,
    scaling: np.float32,
    first: int,
    start: int,
    queries: Floats,
    keys: Any,
    values: Any,
) -> None:
    """From the joint product of one sequence's query, key and value projections to attention.

    Multiplies by the rows' scales, adds the bias, normalises each head, rotates (half-split
    rotary embedding of the first ``cos.shape[1]`` features), multiplies queries by ``scaling``,
    and puts everything in place.

    Parameters:
      y: ``[R, (heads + 2 kv_heads) * dim]``, the rows of this sequence.
      scale: ``[R]``, the rows' scales.
      bias: as long as a row of ``y``; or 0, for none.
      cos, sin: ``[R, rotary]``, rotary <= dim.
      norms: ``[2, dim]`` weights of the RMS norms of queries and keys; or ``[0, dim]``.
      eps: of these norms.
      scaling: what scores are multiplied by.
      first: where the sequence's rows start in ``queries``, in rows.
      start: the position of the first row in ``keys`` and ``values``.
      queries: written: ``[kv_heads, >= (first + R) * per_kv, dim]``.
      keys, values: written: ``[kv_heads, capacity, dim]``, float32, or float16 as uint16.
    """
    kv_heads, _, dim = keys.shape
    rotary, half = cos.shape[1], cos.shape[1] // 2
    heads = y.shape[1] // dim - 2 * kv_heads
    per_kv = heads // kv_heads
    head = np.empty(dim, np.float32)
    rotated = np.empty(dim, np.float32)
    for r in range(y.shape[0]):
        for h in range(heads + 2 * kv_heads):
            part = y[r, h * dim : (h + 1) * dim]
            for i in range(dim):
                head[i] = part[i] * scale[r]
            if bias.shape[0] > 0:
                shift = bias[h * dim : (h + 1) * dim]
                for i in range(dim):
                    head[i] = head[i] + shift[i]
            if h >= heads + kv_heads:
                put(head, values[h - heads - kv_heads, start + r])
                continue
            if norms.shape[0] > 0:
                _norm_row(head, norms[0 if h < heads else 1], eps, dim, head)
            if h < heads:
                out, factor = queries[h // per_kv, (first + r) * per_kv + h % per_kv], scaling
            else:
                out, factor = rotated, _ONE
            for i in range(half):
                a, b = head[i], head[i + half]
                out[i] = (a * cos[r, i] - b * sin[r, i]) * factor
                out[i + half] = (b * cos[r, i + half] + a * sin[r, i + half]) * factor
            for i in range(rotary, dim):
                out[i] = head[i] * factor
            if h >= heads:
                put(rotated, keys[h - heads, start + r])
