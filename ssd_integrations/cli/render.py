"""Text for people: model output made safe for a terminal, and statistics in one line."""

from __future__ import annotations

import json
import re
import sys
from typing import TYPE_CHECKING, TextIO

from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from ssd_integrations.protocol import DeltaEvent, FinishedEvent

# Everything a terminal may obey (C0 and C1 controls, so every escape sequence), except
# newline and tab.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def clean_for_terminal(text: str) -> str:
    """``text`` without control characters: what a model writes must not steer a terminal."""
    return _CONTROLS.sub("", text)


def write_text(text: str, stream: TextIO | None = None) -> None:
    """Write model text at once: untouched into a pipe or file, cleaned on a terminal."""
    out = stream if stream is not None else sys.stdout
    out.write(clean_for_terminal(text) if out.isatty() else text)
    out.flush()


def notes() -> Console:
    """The console for everything that is not the answer: standard error, no markup."""
    return Console(stderr=True, markup=False, highlight=False, soft_wrap=True)


class AnswerWriter:
    """:func:`write_text` for the pieces of an answer.

    What the model thinks before goes to standard error, on lines of its own.
    """

    def __init__(self) -> None:
        self._is_thinking = False

    def __call__(self, event: DeltaEvent) -> None:
        """Write what ``event`` tells."""
        if event.reasoning:
            write_text(event.reasoning, sys.stderr)
            self._is_thinking = True
        if self._is_thinking and (event.text or event.tool_calls):
            write_text("\n\n", sys.stderr)
            self._is_thinking = False
        write_text(event.text)


def write_calls(event: FinishedEvent) -> None:
    """The calls of an answer, each on a line: the name and the arguments as JSON.

    What was meant as one and is none goes to standard error, with the reason.
    """
    for call in event.tool_calls:
        write_text(f"{call.name} {json.dumps(call.arguments, ensure_ascii=False)}\n")
    for bad in event.invalid_tool_calls:
        note(f"Invalid call of {bad.name or 'a tool'}: {bad.reason}: {bad.text}")


def note(text: str) -> None:
    """Print a dim line on standard error."""
    notes().print(Text(clean_for_terminal(text), style="dim"))


def stats_line(event: FinishedEvent) -> str:
    """Tokens, speed and what speculation did, for one finished request."""
    usage, timing, stats = event.usage, event.timing, event.speculation
    parts = [
        f"{usage.completion_tokens} tokens",
        f"{timing.tokens_per_second:.1f} tokens/s",
        f"first token after {timing.time_to_first_token_s:.2f} s",
    ]
    if usage.cached_tokens:
        parts.append(f"{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens cached")
    if stats.method == "off":
        parts.append("no speculation")
    else:
        parts.append(f"{stats.method}: acceptance length {stats.mean_acceptance_length:.2f}")
        if stats.num_draft_tokens:
            parts.append(
                f"{stats.num_accepted_tokens} of {stats.num_draft_tokens} drafted tokens accepted"
            )
    if event.finish_reason == "length":
        parts.append("stopped at the token limit")
    elif event.finish_reason == "cancelled":
        parts.append("cancelled")
    return " · ".join(parts)
