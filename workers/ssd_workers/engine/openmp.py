"""Giving back the threads that OpenMP keeps for a thread of ours."""

from __future__ import annotations

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


@lru_cache(maxsize=1)
def _pause() -> Callable[..., int] | None:
    import torch  # noqa: F401  (brings its OpenMP library into the process)

    return c_function("omp_pause_resource_all")
