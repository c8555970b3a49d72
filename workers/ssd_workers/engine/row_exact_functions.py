"""Functions that a model calls on its own, made row-exact while it runs on a CPU.

Most of a model is modules, which can be replaced. What it calls as a function cannot: the product
of a router that is no linear layer, the sigmoid of a gate. :class:`RowExactFunctions` puts
row-exact results in their place, for whatever model. Which products are row-exact is a property
of the library and the processor, so it is looked at for each shape of weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ssd_workers.engine.row_exact import elementwise

#: Beyond, rows are multiplied in parts.
_MOST_ROWS = 128
#: Fewer rows are filled up with zeros: products of few rows are often computed in another way.
_MIN_ROWS = 16
#: Numbers of rows that are compared with the product of ``_MOST_ROWS``.
_TRIED = (16, 17, 31, 64, 97)

# Under its own name the function would come back to :class:`RowExactFunctions`.
_linear: Callable[..., torch.Tensor] = torch.ops.aten.linear.default

_row_counts: dict[tuple[Any, ...], tuple[int, int]] = {}


class RowExactFunctions(TorchFunctionMode):
    """Inside, a row's product with a weight and its elementwise functions have the same bits
    alone and beside any other rows. For tensors on the CPU; all else is computed as ever.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if func in _PRODUCTS and not kwargs and _is_product_with_weight(*args):
            return row_exact_linear(args[0], args[1].T)
        if func is functional.linear and _on_cpu(args[:1]):
            return row_exact_linear(*args, **kwargs)
        if func in _ELEMENTWISE and _on_cpu(args[:1]):
            return elementwise(lambda x: func(x, *args[1:], **kwargs), args[0])
        return func(*args, **kwargs)


def row_exact_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``[..., in]`` times ``[out, in]``, as ``torch.nn.functional.linear``, row by row alike."""
    rows = x.reshape(-1, x.shape[-1])
    least, most = _alike(weight)
    parts = []
    for part in torch.split(rows, most):
        padded = functional.pad(part, (0, 0, 0, max(0, least - len(part))))
        parts.append(_linear(padded, weight, bias)[: len(part)])
    return torch.cat(parts).view(*x.shape[:-1], weight.shape[0])


def _alike(weight: torch.Tensor) -> tuple[int, int]:
    """The least and the most rows that may be multiplied at once for the same bits in each."""
    key = (*weight.shape, *weight.stride(), weight.dtype, torch.get_num_threads())
    if key not in _row_counts:
        _row_counts[key] = _try_row_counts(weight)
    return _row_counts[key]


def _try_row_counts(weight: torch.Tensor) -> tuple[int, int]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(_MOST_ROWS, weight.shape[1], generator=generator).to(weight.dtype)
    if not bool(weight.any()):  # would prove nothing
        weight = torch.randn(weight.shape, generator=generator).to(weight.dtype)
    whole = _linear(rows, weight)

    def same(first: int, count: int) -> bool:
        part = _linear(rows[first : first + count], weight)
        return torch.equal(part, whole[first : first + count])

    if all(same(first, count) for count in _TRIED for first in (0, _MOST_ROWS - count - 5)):
        return _MIN_ROWS, _MOST_ROWS
    whole = torch.cat([_linear(part, weight) for part in torch.split(rows, _MIN_ROWS)])
    if all(same(first, _MIN_ROWS) for first in (1, 2, 5, 7, 11, 15, 24)):
        return _MIN_ROWS, _MIN_ROWS
    return 1, 1


def _on_cpu(args: Sequence[Any]) -> bool:
    x = args[0] if args else None
    return isinstance(x, torch.Tensor) and x.device.type == "cpu" and x.ndim > 0


def _is_product_with_weight(*args: Any) -> bool:
    """Rows ``[..., in]`` times a matrix ``[in, out]``."""
    return (
        len(args) == 2
        and _on_cpu(args)
        and isinstance(args[1], torch.Tensor)
        and args[1].ndim == 2
        and args[0].ndim >= 2
        and args[0].is_floating_point()
    )


_PRODUCTS = {
    torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.__matmul__,
}  # fmt: skip
_ELEMENTWISE = {
    torch.sigmoid, torch.Tensor.sigmoid, torch.tanh, torch.Tensor.tanh, torch.exp,
    torch.Tensor.exp, functional.silu, functional.gelu, functional.softplus, functional.mish,
    functional.elu, functional.logsigmoid,
}  # fmt: skip


class RankingWatch(TorchFunctionMode):
    """Notices whether what runs inside chooses by rank, as routers of experts do.

    ``ranks``: such a model is not continuous. Where two experts are nearly tied, an error in the
    last bit of a score chooses the other one, and the logits differ by far more than a last bit.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ranks = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        del types
        kwargs = kwargs or {}
        self.ranks |= func in _RANKING or (func in _MAXIMA and (len(args) > 1 or "dim" in kwargs))
        return func(*args, **kwargs)


_RANKING = {
    torch.topk, torch.Tensor.topk, torch.sort, torch.Tensor.sort, torch.argsort,
    torch.Tensor.argsort, torch.argmax, torch.Tensor.argmax,
}  # fmt: skip
_MAXIMA = {torch.max, torch.Tensor.max}
