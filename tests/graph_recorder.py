"""A CUDA graph's terms on a CPU: operations are noted once, with their tensors, and done again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
# Reading a value, shapes that depend on values, and values that come from Python.
_FORBIDDEN = {
    aten.item.default,
    aten.is_nonzero.default,
    aten.equal.default,
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.lift_fresh.default,
}


class CpuRecorder:
    """Records as a CUDA graph does: Python runs once, and what it decided stays so.

    ``recordings`` counts the functions recorded.
    """

    def __init__(self, device: torch.device) -> None:
        assert device.type == "cpu"
        self.recordings = 0

    def record(self, function: Callable[[], object]) -> Callable[[], None]:
        self.recordings += 1
        with _Notes() as notes:
            function()
        return notes.replay

    def wait(self) -> None:
        pass


class _Notes(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._done: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        masked = func is aten.index.Tensor and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if func in _FORBIDDEN or masked:
            raise RuntimeError(f"operation not permitted when a graph is recorded: {func}")
        result = func(*args, **(kwargs or {}))
        self._done.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        for func, args, kwargs, result in self._done:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)
