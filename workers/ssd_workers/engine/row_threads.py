"""Many rows shared out over threads; which thread computes a row does not change it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import torch
from numpy.typing import NDArray

# Handing rows to other threads costs as much as this many values.
_WORTH_SHARING = 500_000


def by_rows(
    kernel: Callable[..., None], width: int, rows: tuple[NDArray[Any], ...], *rest: Any
) -> None:
    """``kernel(*rows, *rest)``, shared out over threads where that pays.

    Parameters:
      kernel: takes arrays of rows first, and holds Python's lock for short moments only.
      width: how many values of a row are worked on.
      rows: arrays ``[R, ...]``.
      rest: handed to every call as it is.
    """
    count = len(rows[0])
    threads = min(torch.get_num_threads(), count, 1 + count * width // _WORTH_SHARING)
    if threads <= 1:
        kernel(*rows, *rest)
        return
    bounds = [count * i // threads for i in range(threads + 1)]
    in_threads(
        kernel,
        [
            (*(array[first:last] for array in rows), *rest)
            for first, last in itertools.pairwise(bounds)
        ],
    )


def in_threads(kernel: Callable[..., None], calls: Sequence[tuple[Any, ...]]) -> None:
    """Call ``kernel`` with each of ``calls`` at once, the first of them in this thread."""
    others = [_pool().submit(kernel, *arguments) for arguments in calls[1:]]
    kernel(*calls[0])
    for other in others:
        other.result()


@lru_cache(maxsize=1)
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="ssd-rows")


# A forked process has no threads but its first.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)
