"""The `ssd` command: one module per subcommand, imported when it runs."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from ssd_integrations import __version__
from ssd_integrations.cli.failures import EXIT_USAGE, report_failures, show_error
from ssd_integrations.cli.lazy import LazyGroup
from ssd_integrations.cli.standard_streams import open_closed_streams
from ssd_integrations.errors import InvalidRequestError

__all__ = ["app", "main"]

_EXAMPLES = """\b
Examples:
  ssd demo                    the whole tour, nothing else to install
  ssd generate "Say hello"    one answer, in this process
  ssd up                      an embedded broker and a worker
  ssd generate "Say hello" --broker-url redis://localhost:6379/0
"""

#: What a wrong command line raises: click's class, whether typer brings its own click or not.
_USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="ssd",
    cls=LazyGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Exact speculative decoding for LangChain and LlamaIndex, in process or on "
    "Celery workers.",
    epilog=_EXAMPLES,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"ssd-integrations {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", is_eager=True, callback=_print_version
        ),
    ] = False,
) -> None:
    del version


def main() -> None:
    """Entry point of the `ssd` command."""
    open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        # A model may write characters that the terminal's encoding lacks.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    if hasattr(sys.stdin, "reconfigure"):
        # What is not text is refused with the request that holds it, not by an exception here.
        sys.stdin.reconfigure(errors="surrogateescape")
    # The libraries' own bars would draw over ours.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        with report_failures():
            _run(sys.argv[1:])
    except typer.Exit as end:
        sys.exit(end.exit_code)


def _run(arguments: list[str]) -> None:
    """Run the command; who asked for JSON gets a wrong command line told as JSON too."""
    if "--json" not in arguments:
        app(arguments, prog_name="ssd")
        return
    try:
        code = app(arguments, prog_name="ssd", standalone_mode=False)
    except _USAGE_ERROR as error:
        described = error.format_message()  # type: ignore[attr-defined]
        remedy = "Correct the command line; --help after the command lists the options."
        show_error(InvalidRequestError(described, remedy=remedy), as_json=True)
        raise typer.Exit(EXIT_USAGE) from error
    raise typer.Exit(code if isinstance(code, int) else 0)
