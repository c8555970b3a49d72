"""Finds in an answer's text where calls may begin."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from ssd_workers.engine.output_parsers.thinking import partial_length

_LINE_START = r"(?<![^\n])"
_PARTIAL_FENCE = re.compile(_LINE_START + r"`{1,2}\Z")

OpeningKind = Literal["trigger", "bracket", "fence"]


class Opening(NamedTuple):
    """Where something begins that could be a call: after ``start`` characters."""

    start: int
    end: int
    kind: OpeningKind


class TextScanner:
    """Looks for a trigger anywhere, and for brackets and fences of code at the start of a line.

    Within a fence that was no call, brackets belong to the code.

    Parameters:
      trigger: the text that begins calls; empty where a format has none.
    """

    def __init__(self, trigger: str) -> None:
        self._triggers = (trigger,) if trigger else ()
        patterns = [f"(?P<fence>{_LINE_START}```)", f"(?P<bracket>{_LINE_START}[{{[])"]
        if trigger:
            # First: it may begin with a bracket.
            patterns.insert(0, f"(?P<trigger>{re.escape(trigger)})")
        self._pattern = re.compile("|".join(patterns))
        self.in_code = False

    def find(self, before: str, text: str) -> Opening | None:
        """The first opening in ``text``; ``before`` is what precedes it, empty at the start."""
        at = len(before)
        text = before + text
        while found := self._pattern.search(text, at):
            kind: OpeningKind = found.lastgroup  # type: ignore[assignment]
            if kind == "bracket" and self._may_be_trigger(text[found.start() :]):
                return None
            if kind == "trigger" or not self.in_code:
                return Opening(found.start() - len(before), found.end() - len(before), kind)
            if kind == "fence":
                self.in_code = False
            at = found.end()
        return None

    def _may_be_trigger(self, rest: str) -> bool:
        return any(trigger.startswith(rest) for trigger in self._triggers)

    def uncertain_length(self, before: str, text: str) -> int:
        """How many characters at the end of ``text`` may be the beginning of an opening."""
        fence = _PARTIAL_FENCE.search(before + text, len(before))
        return max(len(fence.group()) if fence else 0, partial_length(text, self._triggers))
