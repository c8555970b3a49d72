"""A step's attention through compiled loops: which rows there are, and which thread takes them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ssd_workers.engine.attention_loops import (
    BUFFER_NUMBERS,
    TASK,
    attend_floats,
    attend_halves,
    compiled,
)
from ssd_workers.engine.kv_cache import Span
from ssd_workers.engine.openmp import in_team
from ssd_workers.engine.row_threads import in_threads
from ssd_workers.engine.vectors import LANES

# Rows of a sequence that are worked on together: enough to read keys seldom, few enough that
# threads have something to share and that their scores stay near the processor.
_ROWS = 16
# Waking another thread costs as much as this many multiplications.
_WORTH_SHARING = 500_000


class _Task:
    """The numbers that the loops read, for layers that are alike; see ``attend_floats``."""

    def __init__(
        self, spans: Sequence[Span], queries: torch.Tensor, per_kv: int, window: int, softcap: float
    ) -> None:
        kv_heads, count, dim = queries.shape
        self._items = _items(spans, kv_heads)
        self._softcap = np.full(LANES, softcap, np.float32)
        self._buffers = np.zeros((len(spans), BUFFER_NUMBERS), np.int64)
        self._numbers = np.zeros(len(TASK), np.int64)
        known = {
            "items": self._items.ctypes.data,
            "num_items": len(self._items),
            "buffers": self._buffers.ctypes.data,
            "rows": count // per_kv,
            "dim": dim,
            "per_kv": per_kv,
            "window": window,
            "softcap": self._softcap.ctypes.data,
        }
        for name, value in known.items():
            self._numbers[TASK.index(name)] = value
        self.data = self._numbers.ctypes.data
        seen = sum((span.start + span.rows) * span.rows for span in spans)
        work = seen * kv_heads * per_kv * dim * 2
        self.threads = min(torch.get_num_threads(), len(self._items))
        if work < _WORTH_SHARING:
            self.threads = 1

    def set(self, buffers: list[tuple[int, int, int]], queries: int, out: int) -> None:
        """Another layer's addresses."""
        self._buffers[:] = buffers
        self._numbers[_NEXT] = 0
        self._numbers[_QUERIES] = queries
        self._numbers[_OUT] = out


_NEXT, _QUERIES, _OUT = TASK.index("next"), TASK.index("queries"), TASK.index("out")


class RowAttention:
    """Attention of the rows of ``spans`` on a CPU; every row has its bits wherever it stands."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = spans
        self._tasks: dict[tuple[object, ...], _Task] = {}

    @staticmethod
    def takes(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Whether the loops compute what has this type and size ``[..., dim]``."""
        return (
            queries.dtype == torch.float32
            and keys.dtype in (torch.float32, torch.float16)
            and queries.shape[-1] == keys.shape[-1] == values.shape[-1]
            and queries.shape[-1] % LANES == 0
        )

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        per_kv: int,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """``[kv_heads, rows * per_kv, dim]`` scaled queries to the same."""
        key = (queries.shape, per_kv, window, softcap)
        task = self._tasks.get(key)
        if task is None:
            task = _Task(self._spans, queries, per_kv, window or 0, softcap or 0.0)
            self._tasks[key] = task
        buffers = []
        half = False
        for span in self._spans:
            keys, values = span.cache.read(layer, 0, span.start + span.rows)
            half = keys.dtype == torch.float16
            buffers.append((keys.data_ptr(), values.data_ptr(), keys.stride(0)))
        out = torch.empty_like(queries)
        task.set(buffers, queries.data_ptr(), out.data_ptr())
        function = compiled(attend_halves if half else attend_floats)
        if task.threads == 1:
            function.ctypes(task.data)
        elif not in_team(function.address, task.data, torch.get_num_threads()):
            in_threads(function.ctypes, [(task.data,)] * task.threads)
        return out


def _items(spans: Sequence[Span], kv_heads: int) -> NDArray[np.int64]:
    """``[items, ITEM_NUMBERS]``, those with most to do first, so that threads end together."""
    items = []
    row = 0
    for number, span in enumerate(spans):
        for first in range(0, span.rows, _ROWS):
            rows = min(_ROWS, span.rows - first)
            position = span.start + first
            items += [(number, head, row + first, rows, position) for head in range(kv_heads)]
        row += span.rows
    items.sort(key=lambda item: -item[3] * (item[4] + item[3]))
    return np.array(items, np.int64)
