"""What `ssd bench` shows and writes: the bar, the tables, the JSON file, the chart."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssd_integrations.cli.failures import EXIT_FAILED, EXIT_INTERRUPTED
from ssd_integrations.cli.render import note, notes
from ssd_integrations.errors import InvalidRequestError, SSDError

if TYPE_CHECKING:
    from rich.console import Console

    from ssd_workers.bench.modes import Mode

_FILE_WIDTH = 120
_STDOUT = Path("-")


@contextmanager
def answers_bar() -> Iterator[Callable[[int, int], None]]:
    """A bar with the time that is left; without a terminal, a line for every tenth."""
    if not sys.stderr.isatty():
        shown = -1
        start = time.monotonic()

        def say(done: int, total: int) -> None:
            nonlocal shown
            if done * 10 // total > shown:
                shown = done * 10 // total
                left = (time.monotonic() - start) / done * (total - done) if done else None
                rest = f", about {_span(left)} left" if left else ""
                note(f"{done} of {total} answers{rest}")

        yield say
        return
    from rich.progress import (
        BarColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("measuring"), BarColumn(), TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(), TextColumn("left:"), TimeRemainingColumn(),
    )  # fmt: skip
    # Over minutes, as the modes differ in speed and the bar should not.
    with Progress(*columns, console=notes(), transient=True, speed_estimate_period=600) as bars:
        task = bars.add_task("measuring", total=None, note="")
        yield lambda done, total: bars.update(
            task, completed=done, total=total, note=f"{done} of {total} answers"
        )


def _span(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def check_output(option: str, path: Path) -> None:
    """See that ``path`` can be written; `-` is standard output.

    Raises:
      InvalidRequestError: it is a folder, in no folder, or not ours to write.
    """
    if path == _STDOUT:
        return
    remedy = f"Give {option} a file name in a folder that you can write to."
    if not path.parent.is_dir():
        raise InvalidRequestError(
            f"{option} {path}: there is no folder {str(path.parent)!r}.", remedy=remedy
        )
    if path.is_dir():
        raise InvalidRequestError(f"{option} {path}: this is a folder.", remedy=remedy)
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise InvalidRequestError(f"{option} {path}: no permission to write it.", remedy=remedy)


def deliver(
    report: dict[str, Any], modes: Iterable[Mode], json_file: Path | None, chart: Path | None
) -> None:
    """Print the tables, and write what was asked for.

    Raises:
      SSDError: a file could not be written; the tables are printed by then.
    """
    from ssd_workers.bench.report import show_report

    to_stdout = json_file == _STDOUT
    show_report(report, _console(stderr=to_stdout))
    if json_file is not None:
        text = json.dumps(report, ensure_ascii=False, indent=2)
        if to_stdout:
            print(text, flush=True)
        else:
            with _writing(json_file):
                json_file.write_text(text + "\n", encoding="utf-8")
    if chart is not None:
        with _writing(chart):
            _draw(report, modes, chart)


def _draw(report: dict[str, Any], modes: Iterable[Mode], chart: Path) -> None:
    from ssd_workers.bench.chart import write_chart
    from ssd_workers.bench.summary import ModeSummary

    facts = report["conditions"]
    write_chart(
        chart,
        {name: ModeSummary(**fields) for name, fields in report["modes"].items()},
        {mode.name for mode in modes if mode.is_ours},
        f"{facts['model']}, suite {facts['suite']}, {facts['machine']['processor']}",
    )


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SSDError(
            f"{path} could not be written: {error.strerror or error}.",
            remedy="Take the figures from the table above, or measure again.",
        ) from error


def _console(*, stderr: bool) -> Console:
    from rich.console import Console

    console = Console(stderr=stderr, markup=False, highlight=False)
    # A file has no width, and the whole table is wanted there.
    return (
        console
        if console.is_terminal
        else Console(stderr=stderr, markup=False, highlight=False, width=_FILE_WIDTH)
    )


def exit_code(report: dict[str, Any]) -> int:
    """0, or what says that answers failed, that texts differ where they must not, an interrupt."""
    from ssd_workers.bench.report import failures

    if report["interrupted"]:
        return EXIT_INTERRUPTED
    different = report["identical_texts"]["different"]
    # Elsewhere two tokens may be so near that the order of summation decides between them.
    exact = report["conditions"].get("dtype") == "int8"
    return EXIT_FAILED if failures(report) or (different and exact) else 0
