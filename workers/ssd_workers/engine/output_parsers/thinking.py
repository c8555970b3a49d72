"""The reasoning that a model writes before its answer: ``<think>...</think>``."""

from __future__ import annotations

from ssd_workers.engine.output_parsers.parts import Part, ReasoningPart, SyntaxPart, TextPart

OPEN = "<think>"
CLOSE = "</think>"


class ThinkingParser:
    """Tells reasoning from the answer, in whatever pieces the text comes.

    Reasoning is only looked for where an output begins: an answer may speak of the tags. Blanks
    around it are no part of it, nor are those between it and the answer.

    Parameters:
      opened: the prompt ends with the opening tag.
    """

    def __init__(self, *, opened: bool) -> None:
        self._step = self._thinking if opened else self._beginning
        self._opened = opened
        self._may_repeat_tag = opened
        self._buffer = ""

    def push(self, text: str) -> list[Part]:
        """Take more text; the parts that are certain now. A ``TextPart`` is of the answer."""
        self._buffer += text
        parts: list[Part] = []
        while self._step(parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        """The rest, now that nothing follows."""
        rest, self._buffer = self._buffer, ""
        if not rest:
            return []
        if self._step == self._thinking:
            blanks = len(rest) - len(rest.rstrip())
            thought, tail = rest[: len(rest) - blanks], rest[len(rest) - blanks :]
            return _parts((ReasoningPart, thought), (SyntaxPart, tail))
        if self._step == self._between:
            return [SyntaxPart(rest)]
        return [TextPart(rest)]

    def _beginning(self, parts: list[Part]) -> bool:
        start = self._buffer.lstrip()
        if start.startswith(OPEN):
            end = len(self._buffer) - len(start) + len(OPEN)
            self._take(parts, SyntaxPart, end)
            self._step = self._thinking
            self._may_repeat_tag = False
            self._opened = True
            return True
        if OPEN.startswith(start):
            return False
        self._step = self._answer
        return True

    def _thinking(self, parts: list[Part]) -> bool:
        if self._opened:
            # Before the first thought: blanks, and the tag again where the prompt had it already.
            start = self._buffer.lstrip()
            blanks = len(self._buffer) - len(start)
            if self._may_repeat_tag and start.startswith(OPEN):
                self._take(parts, SyntaxPart, blanks + len(OPEN))
                self._may_repeat_tag = False
                return True
            if not start or (self._may_repeat_tag and OPEN.startswith(start)):
                return False
            self._take(parts, SyntaxPart, blanks)
            self._opened = False
        end = self._buffer.find(CLOSE)
        if end < 0:
            self._take(parts, ReasoningPart, self._certain())
            return False
        thought = len(self._buffer[:end].rstrip())
        self._take(parts, ReasoningPart, thought)
        self._take(parts, SyntaxPart, end - thought + len(CLOSE))
        self._step = self._between
        return True

    def _between(self, parts: list[Part]) -> bool:
        blanks = len(self._buffer) - len(self._buffer.lstrip())
        self._take(parts, SyntaxPart, blanks)
        if not self._buffer:
            return False
        self._step = self._answer
        return True

    def _answer(self, parts: list[Part]) -> bool:
        self._take(parts, TextPart, len(self._buffer))
        return False

    def _certain(self) -> int:
        """How much of the buffer is reasoning, whatever follows."""
        end = len(self._buffer) - partial_length(self._buffer, (CLOSE,))
        return len(self._buffer[:end].rstrip())

    def _take(
        self, parts: list[Part], kind: type[TextPart | ReasoningPart | SyntaxPart], length: int
    ) -> None:
        parts += _parts((kind, self._buffer[:length]))
        self._buffer = self._buffer[length:]


def partial_length(text: str, markers: tuple[str, ...]) -> int:
    """The length of the longest end of ``text`` that begins one of ``markers`` and is not all."""
    longest = max((len(marker) for marker in markers), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(len(m) > length and m.startswith(text[-length:]) for m in markers):
            return length
    return 0


def _parts(*pieces: tuple[type[TextPart | ReasoningPart | SyntaxPart], str]) -> list[Part]:
    return [kind(text) for kind, text in pieces if text]
