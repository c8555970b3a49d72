"""Standard streams that whoever started the command has closed."""

from __future__ import annotations

import os
import sys


def open_closed_streams() -> None:
    """Give closed standard streams a file again, before another file takes their numbers.

    Input is then empty, errors go nowhere, and output fails when it is written: it is a file that
    is open for reading only, so that an answer is not lost without a word.
    """
    # In this order: a new file takes the lowest number that is free.
    if sys.stdin is None:
        sys.stdin = os.fdopen(os.open(os.devnull, os.O_RDONLY), "r")
    if sys.stdout is None:
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_RDONLY), "w")
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
