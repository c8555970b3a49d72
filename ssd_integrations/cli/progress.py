"""A progress bar on standard error for work that turns out to be long."""

from __future__ import annotations

import sys
import threading
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

_UNITS = {"B": ("MB", 1e6)}


class LoadingBar:
    """Draws what it is told of (see ``ssd_workers.progress.Progress``), after ``delay_s``.

    On a terminal: one bar per stage, which goes away at the end. Elsewhere: one line per
    stage. A total of 0 means that the end is unknown. Work that ends within the delay leaves
    no trace. May be called from any thread.
    """

    def __init__(self, *, delay_s: float = 2.0) -> None:
        self._console = Console(stderr=True, markup=False, highlight=False)
        self._bars: Progress | None = None
        self._stages: dict[str, tuple[float, float, str]] = {}
        self._tasks: dict[str, TaskID] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._shown_from = time.monotonic() + delay_s
        self._timer = threading.Timer(delay_s, self._show_late)
        self._timer.daemon = True
        self._timer.start()

    def __call__(self, stage: str, done: float, total: float, unit: str) -> None:
        """Report that ``done`` of ``total`` ``unit`` of ``stage`` are complete."""
        with self._lock:
            self._stages[stage] = (done, total, unit)
            if not self._closed and time.monotonic() >= self._shown_from:
                self._draw(stage)

    def close(self) -> None:
        """Take the bars away; reports that still come are ignored."""
        self._timer.cancel()
        with self._lock:
            self._closed = True
            if self._bars is not None:
                self._bars.stop()
                self._bars = None

    def __enter__(self) -> LoadingBar:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _show_late(self) -> None:
        with self._lock:
            unfinished = [
                name for name, (done, total, _) in self._stages.items() if done < total or not total
            ]
            if not self._closed:
                for stage in unfinished:
                    self._draw(stage)

    def _draw(self, stage: str) -> None:
        done, total, unit = self._stages[stage]
        if not sys.stderr.isatty():
            if stage not in self._tasks:
                self._tasks[stage] = TaskID(len(self._tasks))
                self._console.print(f"{stage} ...")
            return
        if self._bars is None:
            self._bars = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[amount]}"),
                TimeElapsedColumn(),
                console=self._console,
                transient=True,
            )
            self._bars.start()
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(stage, total=total or None, amount="")
        self._bars.update(
            self._tasks[stage],
            completed=done,
            total=total or None,
            amount=_amount(done, total, unit),
        )


def _amount(done: float, total: float, unit: str) -> str:
    name, scale = _UNITS.get(unit, (unit, 1.0))
    if not total:
        return f"{done / scale:.0f} {name}"
    return f"{done / scale:.0f} / {total / scale:.0f} {name}"
