"""What `ssd bench` shows and writes: the bar, the tables, the JSON file, the chart."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssd_integrations.cli.failures import EXIT_FAILED, EXIT_INTERRUPTED
from ssd_integrations.cli.render import note, notes

if TYPE_CHECKING:
    from rich.console import Console

    from ssd_workers.bench.modes import Mode

_FILE_WIDTH = 120


@contextmanager
def answers_bar() -> Iterator[Callable[[int, int], None]]:
    """A bar with the time that is left; without a terminal, a line for every tenth."""
    if not sys.stderr.isatty():
        shown = -1

        def say(done: int, total: int) -> None:
            nonlocal shown
            if done * 10 // total > shown:
                shown = done * 10 // total
                note(f"{done} of {total} answers")

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


def deliver(
    report: dict[str, Any], modes: Iterable[Mode], json_file: Path | None, chart: Path | None
) -> None:
    """Print the tables, and write what was asked for."""
    from ssd_workers.bench.chart import write_chart
    from ssd_workers.bench.report import show_report
    from ssd_workers.bench.summary import ModeSummary

    to_stdout = json_file == Path("-")
    if json_file is not None:
        text = json.dumps(report, ensure_ascii=False, indent=2)
        if to_stdout:
            print(text, flush=True)
        else:
            json_file.write_text(text + "\n", encoding="utf-8")
    show_report(report, _console(stderr=to_stdout))
    if chart is not None:
        facts = report["conditions"]
        write_chart(
            chart,
            {name: ModeSummary(**fields) for name, fields in report["modes"].items()},
            {mode.name for mode in modes if mode.is_ours},
            f"{facts['model']}, suite {facts['suite']}, {facts['machine']['processor']}",
        )


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
