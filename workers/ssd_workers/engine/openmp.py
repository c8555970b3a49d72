"""The threads that OpenMP keeps for a thread of ours: work for them, and giving them back."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from functools import lru_cache

from ssd_workers.engine.c_library import c_function

_forked = threading.Event()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked.set)

_SOFT = 1  # omp_pause_soft: threads end, settings stay


def release_threads() -> None:
    """End the OpenMP threads that wait for the calling thread's next parallel work.

    OpenMP keeps a team for every thread that ever computed something. While a process has more
    of them than cores, GNU's library has each wait asleep instead of spinning, and a decoding step
    with its hundreds of short parallel loops takes a fifth longer. So who has nothing more to
    compute calls this; the team comes back by itself, in a fraction of a millisecond.

    Does nothing where torch is built without OpenMP, and in a forked process, whose first thread
    would wait for a team that stayed with the parent.
    """
    pause = None if _forked.is_set() else _pause()
    if pause is not None:
        pause(_SOFT)


def in_team(address: int, data: int, threads: int) -> bool:
    """Call the C function ``void (void *)`` at ``address`` with ``data`` in each thread of a team.

    It is the team that torch computes with, awake as long as there is work, so this takes some
    microseconds. ``threads`` should be torch's number: another one would make it a new team.

    Returns: False where there is no such team, and nothing was called.
    """
    parallel = None if _forked.is_set() else _parallel()
    if parallel is None:
        return False
    parallel(ctypes.c_void_p(address), ctypes.c_void_p(data), ctypes.c_uint(threads), 0)
    return True


@lru_cache(maxsize=1)
def _parallel() -> Callable[..., int] | None:
    import torch  # noqa: F401  (brings its OpenMP library into the process)

    # GNU's library, or another one with GNU's names.
    return c_function("GOMP_parallel")


@lru_cache(maxsize=1)
def _pause() -> Callable[..., int] | None:
    import torch  # noqa: F401  (brings its OpenMP library into the process)

    return c_function("omp_pause_resource_all")
