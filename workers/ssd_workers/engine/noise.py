"""Gumbel noise that depends on nothing but (seed, position, token id).

Coupled sampling takes the token ``argmax(log p + g)``. Draft and target agree on a token without
talking to each other because both compute the same ``g``, so ``g`` must come out bit for bit the
same for one row or many, for any vocabulary padding and on any device. Library generators and
library logarithms do not promise that (vector bodies and scalar tails round differently), so the
noise is a hash followed by a logarithm made of single IEEE additions, multiplications and
divisions, each a kernel of its own: nothing is left to be contracted or reordered.

Precision. The hash has 32 bits and is a bijection of the token id, so no two tokens of a row get
the same bits. With h those bits as a signed integer, v = (h + 0.5) / 2^32 for h >= 0 and
1 - v = (-h - 0.5) / 2^32 below: both ends are resolved to 24 bits of their distance from the end.
E = -log1p(-v) is exponential, and the winner of the race has the smallest E / p, so it is the
small E that must be fine: they are multiples of 2^-32 (relative steps below 1e-4 for the winner
among 150,000 equal tokens, and g is off by at most 3e-6 everywhere). g = -log(E) lies in
[-3.13, 22.88]. A token of probability below about 1e-10 is never drawn; the distance from the
exact law is below 1e-4 in total variation for a uniform choice among 150,000 tokens, and
negligible for a distribution that a model produces.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import torch
from torch import Tensor

# Bounds of the noise: a token this far below the best one cannot win whatever its noise is.
NOISE_MIN = -3.14
NOISE_MAX = 22.88

# On a CPU: tokens at a time, so that the intermediates stay in the second-level cache.
_BLOCK = 24_576
_MASK64 = (1 << 64) - 1
_LN2 = 0.6931471805599453
_SQRT_HALF_BITS = 0x3F3504F3  # the float32 nearest to sqrt(1/2)


def fresh_seed() -> int:
    """A seed for a request that gave none: 63 unpredictable bits."""
    return secrets.randbits(63)


def gumbel_noise(seed: int, position: int, vocab_size: int, device: torch.device | str) -> Tensor:
    """Standard Gumbel noise of every token at one position of one request.

    Parameters:
      seed: the request's seed, 0 <= seed < 2^63.
      position: index of the token to be drawn, counted from the start of the prompt.
      vocab_size: how many token ids; a larger one appends values and changes none.
      device: where the result is to live.

    Returns: ``[vocab_size]`` float32.
    """
    return gumbel_noise_rows([seed], [position], vocab_size, device)[0]


def gumbel_noise_rows(
    seeds: Sequence[int], positions: Sequence[int], vocab_size: int, device: torch.device | str
) -> Tensor:
    """:func:`gumbel_noise` of several (seed, position) pairs: ``[rows, vocab_size]`` float32."""
    device = torch.device(device)
    ids = torch.arange(vocab_size, dtype=torch.int32, device=device)
    keys = [_row_key(seed, position) for seed, position in zip(seeds, positions, strict=True)]
    table = torch.tensor(keys, dtype=torch.int32, device=device).reshape(-1, 2, 1)
    # On a GPU one launch for all rows is what counts; on a CPU it is the cache.
    if device.type == "cpu":
        rows, columns = max(1, _BLOCK // vocab_size), _BLOCK
    else:
        rows, columns = max(1, len(keys)), vocab_size
    out = torch.empty(len(keys), vocab_size, device=device)
    for start in range(0, len(keys), rows):
        first, second = table[start : start + rows].unbind(dim=1)
        for column in range(0, vocab_size, columns):
            block = slice(column, column + columns)
            out[start : start + rows, block] = _gumbel(_hash(ids[block], first, second))
    return out


def gumbel_noise_at(seed: int, position: int, token_ids: Tensor) -> Tensor:
    """The noise of the tokens ``token_ids`` only (``[n]`` int32): ``[n]`` float32."""
    first, second = _row_key(seed, position)
    if token_ids.device.type == "cpu" and len(token_ids) > _BLOCK:
        blocks = token_ids.chunk(-(-len(token_ids) // _BLOCK))
        return torch.cat([_gumbel(_hash(block, first, second)) for block in blocks])
    return _gumbel(_hash(token_ids, first, second))


def _row_key(seed: int, position: int) -> tuple[int, int]:
    """Two signed 32-bit keys of a (seed, position) pair."""
    mixed = _mix64(_mix64(seed) + position * 0x9E3779B97F4A7C15)
    return _signed32(mixed >> 32), _signed32(mixed)


def _mix64(value: int) -> int:
    """A bijection of 64-bit integers whose output bits each depend on every input bit."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def _signed32(value: int) -> int:
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value & 0x80000000 else value


def _hash(ids: Tensor, first: Tensor | int, second: Tensor | int) -> Tensor:
    """Keyed bijection of int32 ids, wrapping arithmetic. Overwrites nothing it is given."""
    x = ids * _signed32(0x9E3779B1) + first
    _xor_shift_multiply(x, 16, 0x7FEB352D)
    _xor_shift_multiply(x, 15, 0x846CA68B)
    x.bitwise_xor_(second)
    _xor_shift_multiply(x, 16, 0x21F0AAAD)
    _xor_shift_multiply(x, 15, 0x735A2D97)
    return x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF))


def _xor_shift_multiply(x: Tensor, shift: int, factor: int) -> None:
    # int32 shifts copy the sign bit; the mask makes the shift logical, and so a bijection.
    x.bitwise_xor_((x >> shift).bitwise_and_((1 << (32 - shift)) - 1)).mul_(_signed32(factor))


def _gumbel(bits: Tensor) -> Tensor:
    """Gumbel noise from uniform int32 bits; see the module's notes for the mapping."""
    sign = bits >> 31  # 0 for the lower half of v, -1 for the upper half
    x = (bits ^ sign).to(torch.float32).add_(0.5).mul_(2.0**-32)  # distance from the nearer end
    lower = sign.to(torch.float32).add_(1.0)  # 1 in the lower half, 0 in the upper
    # u = 1 - v, rounded: 1 - x in the lower half, x itself in the upper.
    u = lower - (lower * 2.0).sub_(1.0).mul_(x)
    # What the rounding of 1 - x lost, exactly; log(1 - x) = log(u) + lost / u to first order.
    # (1 - u and the difference below are exact in float32, because x <= 1/2.)
    lost = (1.0 - u).sub_(x).mul_(lower).div_(u)
    exponential = _log(u).add_(lost).neg_()
    return _log(exponential).neg_()


def _log(u: Tensor) -> Tensor:
    """Natural logarithm of normal positive float32 numbers, relative error near 1e-7."""
    # u = m * 2^e with m in [sqrt(1/2), sqrt(2)), by integer arithmetic on the float's bits.
    bits = u.view(torch.int32) - _SQRT_HALF_BITS
    exponent = (bits >> 23).to(torch.float32)
    m = bits.bitwise_and_(0x7FFFFF).add_(_SQRT_HALF_BITS).view(torch.float32)
    # log m = 2 artanh(s) with s = (m - 1) / (m + 1); |s| < 0.1716, so five terms reach 3e-9.
    s = m - 1.0
    s.div_(m.add_(1.0))
    square = s * s
    series = (square * (2.0 / 9.0)).add_(2.0 / 7.0)
    for coefficient in (2.0 / 5.0, 2.0 / 3.0):
        series.mul_(square).add_(coefficient)
    # s * 2 is exact and carries the result; the rest is a small correction.
    series.mul_(square).mul_(s).add_(s.mul_(2.0))
    return series.add_(exponent.mul_(_LN2))
