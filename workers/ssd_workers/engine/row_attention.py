"""A step's attention through compiled loops: which rows there are, and which thread takes them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ssd_workers.engine.attention_loops import Items, attend
from ssd_workers.engine.kv_cache import Span
from ssd_workers.engine.row_threads import in_threads
from ssd_workers.engine.vectors import LANES

# Rows of a sequence that are worked on together: enough to read keys seldom, few enough that
# threads have something to share and that their scores stay near the processor.
_ROWS = 16
# Handing work to another thread costs as much as this many multiplications.
_WORTH_SHARING = 3_000_000


@dataclass(frozen=True)
class _Plan:
    items: Items
    #: Keys that all rows up to an item, and including it, look at.
    keys: NDArray[np.int64]


class RowAttention:
    """Attention of the rows of ``spans`` on a CPU; every row has its bits wherever it stands."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = spans
        self._plans: dict[tuple[int, int], _Plan] = {}

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
        kv_heads, _, dim = queries.shape
        plan = self._plan(kv_heads, window or 0)
        buffers = []
        half = False
        for span in self._spans:
            keys, values = span.cache.read(layer, 0, span.start + span.rows)
            half = keys.dtype == torch.float16
            buffers.append((keys.data_ptr(), values.data_ptr(), keys.stride(0)))
        out = torch.empty_like(queries)
        shared = (
            _HALVES if half else _FLOATS,
            queries.numpy(),
            out.numpy(),
            np.array(buffers, np.int64),
            plan.items,
        )
        rest = (per_kv, window or 0, np.float32(softcap or 0))
        shares = _shares(plan.keys, per_kv * dim * 2)
        in_threads(attend, [(*shared, first, last, *rest) for first, last in shares])
        return out

    def _plan(self, kv_heads: int, window: int) -> _Plan:
        plan = self._plans.get((kv_heads, window))
        if plan is None:
            plan = self._plans[kv_heads, window] = _make_plan(self._spans, kv_heads, window)
        return plan


_FLOATS = np.zeros(0, np.float32)
_HALVES = np.zeros(0, np.uint16)


def _make_plan(spans: Sequence[Span], kv_heads: int, window: int) -> _Plan:
    items, keys = [], []
    row = 0
    for number, span in enumerate(spans):
        for head in range(kv_heads):
            for first in range(0, span.rows, _ROWS):
                rows = min(_ROWS, span.rows - first)
                position = span.start + first
                items.append((number, head, row + first, rows, position))
                seen = position + rows
                keys.append(rows * (min(seen, window) if window else seen))
        row += span.rows
    return _Plan(np.array(items, np.int64), np.cumsum(keys))


def _shares(keys: NDArray[np.int64], per_key: int) -> list[tuple[int, int]]:
    """First and last item of each thread: about as many keys for all of them."""
    total = int(keys[-1])
    threads = min(torch.get_num_threads(), len(keys), 1 + total * per_key // _WORTH_SHARING)
    ends = np.searchsorted(keys, [total * i / threads for i in range(1, threads)]) + 1
    bounds = sorted({0, *(int(end) for end in ends), len(keys)})
    return list(itertools.pairwise(bounds))
