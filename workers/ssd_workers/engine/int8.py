"""Row-exact int8 products on a CPU.

Weights are quantised per output channel, activations per token row (symmetric, 8 bits). The
product itself is integer arithmetic, so a row's result does not depend on the rows beside it.
The kernel is oneDNN's; it takes activations as unsigned bytes with a zero point of 128 (signed
ones fall into a slow reference path) and, on processors without VNNI or AMX instructions,
saturates silently: :func:`cpu_is_exact` finds that out before anything is decoded.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import nn

from ssd_workers.engine import kernels
from ssd_workers.engine.kernels import Floats
from ssd_workers.engine.row_threads import by_rows

_ZERO_POINT = 128
_MAX = 127.0


def quantize_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``[out, in]`` float to (int8 ``[out, in]``, float32 scales ``[out]``), symmetric."""
    weight = weight.detach().to(torch.float32)
    scale = weight.abs().amax(dim=1).clamp_min(1e-12) / _MAX
    return torch.round(weight / scale[:, None]).to(torch.int8).contiguous(), scale


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, Floats]:
    """``[..., in]`` float32 to (uint8 ``[rows, in]`` around 128, float32 scales ``[rows]``)."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    quantized = torch.empty(rows.shape, dtype=torch.uint8)
    scale = np.empty(len(rows), np.float32)
    by_rows(kernels.quantize, rows.shape[1], (rows.numpy(), quantized.numpy(), scale))
    return quantized, scale


class PackedWeight:
    """An int8 weight ``[out, in]`` in the kernel's own layout, with its channel scales."""

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor) -> None:
        self.out_features, self.in_features = weight.shape
        self.packed = torch.ops.onednn.qlinear_prepack(weight, [1, self.in_features])
        # A copy: a view would keep the whole mapped file of unpacked weights in memory.
        self.scale = scale.to(torch.float32, copy=True)
        self._zero_points = torch.zeros(self.out_features, dtype=torch.long)

    def product(self, rows: torch.Tensor) -> torch.Tensor:
        """uint8 ``[rows, in]`` to float32 ``[rows, out]``, channel scales applied."""
        result: torch.Tensor = torch.ops.onednn.qlinear_pointwise.default(
            rows, 1.0, _ZERO_POINT, self.packed, self.scale, self._zero_points,
            None, 1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip
        return result


class Int8Linear(nn.Module):
    """A linear layer whose product is int8. ``[..., in]`` to ``[..., out]``, float32."""

    def __init__(self, weight: PackedWeight, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.weight_packed = weight
        self.out_features = weight.out_features
        self.in_features = weight.in_features
        #: ``[out]``, or ``[0]`` where there is none.
        self.bias: Floats = np.empty(0, np.float32) if bias is None else bias.numpy().copy()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.from_quantized(*quantize_rows(x)).view(*x.shape[:-1], self.out_features)

    def from_quantized(self, rows: torch.Tensor, scale: Floats) -> torch.Tensor:
        """Quantised rows ``[rows, in]`` and their scales to ``[rows, out]``."""
        y = self.weight_packed.product(rows)
        by_rows(kernels.dequantize, self.out_features, (y.numpy(), scale), self.bias)
        return y

    def added(self, x: torch.Tensor, rows: torch.Tensor, scale: Floats) -> torch.Tensor:
        """``x [rows, out]`` plus what :meth:`from_quantized` returns."""
        y = self.weight_packed.product(rows)
        out = torch.empty_like(x)
        arrays = (x.numpy(), y.numpy(), scale, out.numpy())
        by_rows(kernels.add_product, self.out_features, arrays, self.bias)
        return out


class Int8Fused:
    """Several linear layers with the same input, as one product.

    The layers stay separate modules for the model's own code; the first one that sees an input
    computes all of them, the others take their slice.
    """

    def __init__(self, weight: PackedWeight, bias: torch.Tensor | None, sizes: list[int]) -> None:
        self.linear = Int8Linear(weight, bias)
        self._sizes = sizes
        self._input: torch.Tensor | None = None
        self._slices: list[torch.Tensor | None] = [None] * len(sizes)

    def members(self) -> list[nn.Module]:
        """One module for each of the fused layers, in order."""
        return [Int8Slice(self, index) for index in range(len(self._sizes))]

    def slice(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """The output of layer ``index`` for the input ``x``."""
        if self._input is not x or self._slices[index] is None:
            self._slices = list(self.linear(x).split(self._sizes, dim=-1))
            self._input = x
        result = self._slices[index]
        self._slices[index] = None
        assert result is not None
        if all(piece is None for piece in self._slices):
            self._input = None
        return result


class Int8Slice(nn.Module):
    """One of the layers of an :class:`Int8Fused`."""

    def __init__(self, fused: Int8Fused, index: int) -> None:
        super().__init__()
        self.fused = fused
        self._index = index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fused.slice(self._index, x)


@lru_cache(maxsize=1)
def cpu_is_exact() -> bool:
    """Whether this processor's kernel multiplies extreme int8 values without saturating.

    Adjacent products of 255 x 127 overflow 16 bits, which processors without VNNI use between.
    Also checks that a row has the same bits in products of 1, 5 and 32 rows.
    """
    out_features, in_features = 64, 512
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-127, 128, (out_features, in_features), generator=generator)
    weight[: out_features // 2] = 127
    rows = torch.randint(0, 256, (32, in_features), generator=generator)
    rows[:16] = 255
    scale = torch.rand(out_features, generator=generator) + 0.5
    packed = PackedWeight(weight.to(torch.int8), scale)
    got = packed.product(rows.to(torch.uint8))
    expected = ((rows - _ZERO_POINT) @ weight.T).to(torch.float32) * scale
    if not torch.allclose(got, expected, rtol=1e-6, atol=0):
        return False
    return all(
        torch.equal(packed.product(rows[first : first + n].to(torch.uint8)), got[first : first + n])
        for first, n in ((0, 1), (17, 1), (3, 5), (20, 5))
    )
