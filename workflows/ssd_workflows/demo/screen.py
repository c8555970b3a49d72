"""What the demo shows while it runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ssd_integrations.cli.render import clean_for_terminal
from ssd_workflows.demo.compare import Row


def counted(number: int, noun: str) -> str:
    """``number`` with its noun: 1 word, 2 words."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


class Screen:
    """Headings, streamed text, bars and the table, on one stream."""

    def __init__(self, *, stderr: bool) -> None:
        self.console = Console(stderr=stderr, markup=False, highlight=False)
        self._step = 0

    def heading(self, title: str) -> None:
        """Start the next numbered step."""
        self._step += 1
        self.console.print()
        self.console.print(Text(f"{self._step}. {title}", style="bold"))

    def say(self, text: str) -> None:
        """One paragraph."""
        self.console.print(clean_for_terminal(text))

    def code(self, text: str) -> None:
        """Lines that are never broken."""
        self.console.print(text, soft_wrap=True)

    def dim(self, text: str) -> None:
        """One paragraph of small print."""
        self.console.print(Text(clean_for_terminal(text), style="dim"))

    def piece(self, text: str) -> None:
        """A piece of streamed model text, at once and without a line break of its own."""
        self.console.file.write(clean_for_terminal(text))
        self.console.file.flush()

    @contextmanager
    def bars(self) -> Iterator[Progress]:
        """Progress bars that stay on the screen."""
        with Progress(
            TextColumn("   {task.description}"),
            BarColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            console=self.console,
        ) as bars:
            yield bars

    def table(self, rows: Iterable[Row]) -> None:
        """The measured rows."""
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("decoding", no_wrap=True)
        for column in ("first token", "tokens/s", "acceptance length", "speed-up"):
            table.add_column(column, justify="right")
        for row in rows:
            length = row.acceptance_length
            table.add_row(
                row.decoder,
                f"{row.time_to_first_token_s:.2f} s",
                f"{row.tokens_per_second:.1f}",
                "-" if length is None else f"{length:.2f}",
                f"{row.speed_up:.2f} x",
            )
        self.console.print()
        self.console.print(table)
