"""Functions that a model calls on its own, made row-exact while it runs on a CPU.

Most of a model is modules, which can be replaced. What it calls as a function cannot: the product
of a router that is no linear layer, the sigmoid of a gate. :class:`FunctionWatch` finds the modules
that do so, and :class:`RowExactFunctions` puts row-exact results in the place of theirs, for
whatever model. Which products are row-exact is a property of the library and the processor, so it
is looked at for each shape of weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
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
# Those that are computed in another way at the end of a vector; others, such as tanh, are not.
_ELEMENTWISE = {
    torch.sigmoid, torch.Tensor.sigmoid, functional.silu, functional.gelu, functional.softplus,
    functional.mish, functional.elu,
}  # fmt: skip


class FunctionWatch(TorchFunctionMode):
    """Notices what the modules of ``model`` call as functions while it runs inside.

    ``callers``: modules whose own code calls one that :class:`RowExactFunctions` replaces.
    ``ranks``: whether the model chooses by rank, as routers of experts do. Such a model is not
    continuous: where two experts are nearly tied, an error in the last bit of a score chooses the
    other one, and the logits differ by far more than a last bit.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.ranks = False
        self.callers: set[nn.Module] = set()
        self._inside: list[nn.Module] = []
        self._hooks = [
            hook
            for module in model.modules()
            for hook in (
                module.register_forward_pre_hook(self._enter),
                module.register_forward_hook(self._leave),
            )
        ]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()

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
        if func in _REPLACED and self._inside:
            self.callers.add(self._inside[-1])
        return func(*args, **kwargs)

    def _enter(self, module: nn.Module, args: Any) -> None:
        del args
        self._inside.append(module)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        del module, args, output
        self._inside.pop()


def make_functions_exact(modules: Iterable[nn.Module]) -> None:
    """Let what ``modules`` call as functions be row-exact from now on.

    Only while they run: inside :class:`RowExactFunctions` every access to a tensor takes longer.
    """
    modes: list[RowExactFunctions] = []

    def enter(module: nn.Module, args: Any) -> None:
        del module, args
        modes.append(RowExactFunctions())
        modes[-1].__enter__()  # type: ignore[no-untyped-call]

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        del module, args, output
        modes.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    for module in modules:
        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave, always_call=True)


_RANKING = {
    torch.topk, torch.Tensor.topk, torch.sort, torch.Tensor.sort, torch.argsort,
    torch.Tensor.argsort, torch.argmax, torch.Tensor.argmax,
}  # fmt: skip
_MAXIMA = {torch.max, torch.Tensor.max}
_REPLACED = {functional.linear, *_PRODUCTS, *_ELEMENTWISE}
