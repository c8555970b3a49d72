"""Functions of the C libraries in this process that Python has no name for."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable


def c_function(name: str) -> Callable[..., int] | None:
    """The function ``name``, or None where no library in this process has it."""
    if os.name != "posix":
        return None
    return getattr(ctypes.CDLL(None), name, None)
