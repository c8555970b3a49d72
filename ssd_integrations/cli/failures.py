"""How a command ends when it does not end well: plain words, a remedy and an exit code."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

import typer

from ssd_integrations.errors import InvalidRequestError, RequestCancelledError, SSDError

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141

#: No space, over the quota, a device that fails, or not open for writing.
_CANNOT_WRITE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EBADF})


@contextmanager
def report_failures(*, as_json: bool = False) -> Iterator[None]:
    """Turn what goes wrong inside into a message and the right exit code.

    Typed errors and output that cannot be written exit with 1, an interrupt with 130, a reader
    that went away with 141 and silence. Anything else is a defect of ours and keeps its traceback.
    """
    try:
        yield
    except SSDError as error:
        show_error(error, as_json=as_json)
        raise typer.Exit(EXIT_FAILED) from error
    except KeyboardInterrupt as error:
        show_error(RequestCancelledError("Interrupted.", remedy=""), as_json=as_json)
        raise typer.Exit(EXIT_INTERRUPTED) from error
    except BrokenPipeError as error:
        _discard(sys.stdout)
        raise typer.Exit(EXIT_BROKEN_PIPE) from error
    except OSError as error:
        # What is opened by name has errors of its own.
        if error.filename is not None or error.errno not in _CANNOT_WRITE:
            raise
        _discard(sys.stdout)
        show_error(_unwritable(error), as_json=False)
        raise typer.Exit(EXIT_FAILED) from error


@contextmanager
def usage_errors(*, as_json: bool = False) -> Iterator[None]:
    """The same for values given on the command line: exit code 2."""
    try:
        yield
    except InvalidRequestError as error:
        show_error(error, as_json=as_json)
        raise typer.Exit(EXIT_USAGE) from error


def show_error(error: SSDError, *, as_json: bool) -> None:
    """Print ``error``: two lines on stderr, or one JSON object on stdout."""
    if as_json:
        from ssd_integrations.protocol import ErrorInfo

        print(json.dumps({"error": ErrorInfo.from_error(error).model_dump()}), flush=True)
        return
    from ssd_integrations.cli.render import clean_for_terminal

    print(clean_for_terminal(f"Error: {error.message}"), file=sys.stderr)
    if error.remedy:
        print(clean_for_terminal(f"  What to do: {error.remedy}"), file=sys.stderr)


def _unwritable(error: OSError) -> SSDError:
    return SSDError(
        f"Standard output or a file could not be written: {error.strerror}.",
        remedy="Make room, or send standard output elsewhere.",
    )


def _discard(stream: TextIO) -> None:
    """Point ``stream`` at nothing, so that the interpreter's last flush cannot fail again."""
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, stream.fileno())
    os.close(sink)
