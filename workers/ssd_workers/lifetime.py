"""Child processes that never outlive their parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def die_with_parent(number: signal.Signals, parent: int | None = None) -> None:
    """Ask the kernel to send this process ``number`` when its parent's thread ends.

    ``parent`` is the process that started this one; if that is already gone, so is this one.
    Only Linux can; elsewhere this does nothing and an orderly parent stops its children.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number))
        if parent is not None and os.getppid() != parent:
            os._exit(1)


def child_setup(number: signal.Signals) -> Callable[[], None] | None:
    """A ``preexec_fn`` for a program that cannot call :func:`die_with_parent` itself."""
    if sys.platform != "linux":
        return None
    # Looked up before the fork: the child of a threaded parent must not load anything.
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    parent, value = os.getpid(), int(number)

    def prepare() -> None:
        prctl(_PR_SET_PDEATHSIG, value)
        if os.getppid() != parent:
            os._exit(1)

    return prepare


def stop_process(process: subprocess.Popen[bytes], timeout_s: float) -> int:
    """SIGTERM, and SIGKILL after ``timeout_s``; the exit code."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
    return process.wait()
