"""Tells calls of tools from the answer's text, in whatever pieces it comes."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from ssd_integrations.protocol import FinishReason
from ssd_workers.engine.output_parsers import shapes
from ssd_workers.engine.output_parsers.call_reader import CallReader
from ssd_workers.engine.output_parsers.formats import ToolFormat
from ssd_workers.engine.output_parsers.parts import (
    CallArguments,
    CallEnd,
    CallStart,
    Part,
    SyntaxPart,
    TextPart,
)
from ssd_workers.engine.output_parsers.text_scanner import TextScanner
from ssd_workers.engine.output_parsers.thinking import partial_length

_CUT = {
    "length": "the token limit came before its end",
    "cancelled": "the request was cancelled before its end",
    "stop": "the answer ended before it did",
}


@dataclass
class _Place:
    """Where calls stand: what opened it, what closes it, and whether all in it are calls."""

    certain: bool = False
    closer: str = ""
    in_list: bool = False


class CallParser:
    """Finds calls in one format, and those written as plain JSON or in a fence of code.

    What a format's trigger begins is a call, valid or not, if JSON follows it. Plain JSON is one
    only if it names a tool and has arguments. All else is text, unchanged; blanks next to a call
    are no part of it.

    Parameters:
      tool_format: how the model writes calls.
      names: the tools that there are.
      parallel: whether there may be more than one valid call.
      make_id: the id of the n-th call.
    """

    def __init__(
        self,
        tool_format: ToolFormat,
        names: Collection[str],
        *,
        parallel: bool,
        make_id: Callable[[int], str],
    ) -> None:
        self._format = tool_format
        self._names = names
        self._parallel = parallel
        self._make_id = make_id
        self._scanner = TextScanner(tool_format.trigger)
        self._step: Callable[[list[Part]], bool] = self._text
        self._buffer = ""
        # The last character of the text; none at its start, where blanks do not count.
        self._before = ""
        self._has_text = False
        self._held = ""  # blanks and tags that are text if no call follows
        self._place = _Place()
        self._reader = CallReader(names, certain=False)
        self._index: int | None = None  # of the call that is being read, once it was started
        self._num_started = self._num_ended = self._num_valid = 0
        self._broken: CallEnd | None = None

    def push(self, text: str) -> list[Part]:
        """Take more text; the parts that are certain now."""
        self._buffer += text
        parts: list[Part] = []
        while self._step(parts):
            pass
        return parts

    def finish(self, reason: FinishReason) -> list[Part]:
        """The rest, now that nothing follows; a call that is not complete is invalid."""
        parts: list[Part] = []
        rest, self._buffer = self._buffer, ""
        fault = _CUT.get(reason, _CUT["stop"])
        certain, reader = self._place.certain, self._reader
        if self._step == self._object and (certain or reader.verdict == "call"):
            self._give(parts, SyntaxPart, self._take_held())
            if reader.is_closed:
                self._end(parts, reader.result(self._make_id(self._num_ended)))
            else:
                self._end(parts, self._so_far(reader.raw + rest, fault))
        elif self._step == self._opened and certain and reason != "stop":
            # The trigger was the last that there was room for.
            self._read_object()
            self._end(parts, self._so_far(self._take_held() + rest, fault))
        elif self._step == self._resync and self._broken is not None:
            self._end(parts, replace(self._broken, raw=self._broken.raw + rest))
        elif self._step == self._after:
            self._give(parts, SyntaxPart, self._take_held() + rest)
        else:
            raw = reader.raw if self._step == self._object else ""
            self._give(parts, TextPart, self._take_held() + raw + rest)
        return parts

    # ---- steps: each takes what it can from the buffer, and says whether to go on -----------

    def _text(self, parts: list[Part]) -> bool:
        self._hold_blanks()
        if self._before and self._held:
            self._before = self._held[-1]
        found = self._scanner.find(self._before, self._buffer)
        if found is None:
            uncertain = self._scanner.uncertain_length(self._before, self._buffer)
            length = len(self._buffer[: len(self._buffer) - uncertain].rstrip())
        else:
            length = len(self._buffer[: found.start].rstrip())
        if length:
            self._give_text(parts, length)
        if found is None:
            return False
        self._hold_blanks()
        if found.kind == "fence":
            self._step = self._fence
        else:
            certain = found.kind == "trigger"
            self._place = _Place(certain, self._format.closer if certain else "")
            if certain:
                self._hold(found.end - found.start)
            self._step = self._opened
        return True

    def _fence(self, parts: list[Part]) -> bool:
        if found := shapes.FENCE.match(self._buffer):
            self._hold(found.end())
            self._place = _Place(closer="```")
            self._step = self._opened
        elif shapes.PARTIAL_FENCE.match(self._buffer):
            return False
        else:
            self._scanner.in_code = True
            self._hold(3)
            self._back_to_text(parts)
        return True

    def _opened(self, parts: list[Part]) -> bool:
        self._hold_blanks()
        if not self._buffer:
            return False
        if self._buffer[0] == "{":
            self._read_object()
        elif self._buffer[0] == "[" and not self._place.in_list:
            self._place.in_list = True
            self._hold(1)
        elif self._place.certain and not self._place.in_list and "[ARGS]" in self._format.markers:
            return self._named(parts)
        else:
            self._back_to_text(parts)
        return True

    def _named(self, parts: list[Part]) -> bool:
        if found := shapes.NAMED.match(self._buffer):
            self._hold(found.end())
            self._read_object(found.group(1))
        elif shapes.PARTIAL_NAMED.match(self._buffer):
            return False
        else:
            self._back_to_text(parts)
        return True

    def _object(self, parts: list[Part]) -> bool:
        reader = self._reader
        self._buffer = self._buffer[reader.push(self._buffer) :]
        if reader.verdict == "other" and not self._place.certain:
            if self._place.closer == "```":
                self._scanner.in_code = True
            self._held += reader.raw
            self._back_to_text(parts)
            return True
        if reader.verdict == "open":
            return False
        self._give(parts, SyntaxPart, self._take_held())
        if reader.streams:
            self._start(parts, reader.name)
            self._give_arguments(parts, reader.take_arguments())
        if reader.fault:
            self._break()
        elif reader.done:
            self._end(parts, reader.result(self._make_id(self._num_ended)))
        else:
            return False
        return True

    def _resync(self, parts: list[Part]) -> bool:
        """Look for where a broken call ends."""
        assert self._broken is not None
        closer = self._place.closer or "\n"
        end = self._buffer.find(closer)
        length = end if end >= 0 else len(self._buffer) - partial_length(self._buffer, (closer,))
        raw = self._broken.raw + self._buffer[:length]
        self._buffer = self._buffer[length:]
        self._broken = replace(self._broken, raw=raw)
        if end < 0:
            return False
        self._end(parts, self._broken)
        return True

    def _after(self, parts: list[Part]) -> bool:
        place = self._place
        self._hold_blanks()
        if not self._buffer:
            return False
        pattern, partial = shapes.NEXT_IN_LIST if place.in_list else shapes.NEXT
        if found := pattern.match(self._buffer):
            self._hold(found.end())
            self._read_object()
        elif partial.match(self._buffer):
            return False
        elif place.in_list:
            place.in_list = False
            if self._buffer[0] == "]":
                self._hold(1)
                self._give(parts, SyntaxPart, self._take_held())
        elif place.certain and self._buffer[0] == "{":
            self._read_object()
        elif place.closer and self._buffer.startswith(place.closer):
            self._hold(len(place.closer))
            self._give(parts, SyntaxPart, self._take_held())
            place.closer = ""
            place.certain = False
        elif place.closer and place.closer.startswith(self._buffer):
            return False
        else:
            # A fence that goes on after the call is one of code.
            self._scanner.in_code = place.closer == "```"
            if not self._has_text:
                self._give(parts, SyntaxPart, self._take_held())
            # What follows a call counts as the start of a line.
            self._before = ""
            self._step = self._text
        return True

    # ---- what the steps have in common ------------------------------------------------------

    def _read_object(self, name: str | None = None) -> None:
        self._reader = CallReader(self._names, name, certain=self._place.certain)
        self._index = None
        self._step = self._object

    def _back_to_text(self, parts: list[Part]) -> None:
        """What was held is no call."""
        self._give_text(parts, 0)
        self._step = self._text

    def _break(self) -> None:
        """The call cannot become a valid one; if it went past its own end, go back there."""
        raw, closer = self._reader.raw, self._place.closer
        end = raw.find(closer) if closer else -1
        if end >= 0:
            raw, self._buffer = raw[:end], raw[end:] + self._buffer
        self._broken = self._so_far(raw, self._reader.fault)
        self._step = self._resync

    def _so_far(self, raw: str, fault: str) -> CallEnd:
        reader, call_id = self._reader, self._make_id(self._num_ended)
        return CallEnd(call_id, reader.name, raw, None, reader.arguments_text(), fault)

    def _start(self, parts: list[Part], name: str | None) -> None:
        if self._index is not None or name not in self._names or not self._is_allowed():
            return
        assert name is not None
        self._index = self._num_started
        self._num_started += 1
        parts.append(CallStart(self._index, self._make_id(self._num_ended), name))

    def _end(self, parts: list[Part], call: CallEnd) -> None:
        if call.arguments is not None and not self._is_allowed():
            call = replace(call, arguments=None, fault="it is one call more than was asked for")
        elif call.arguments is not None and call.name not in self._names:
            call = replace(call, arguments=None, fault=f"there is no tool {call.name!r}")
        if call.arguments is not None:
            if self._index is None:
                # Arguments that are no object in the text: as a text of their own, or none.
                self._start(parts, call.name)
                self._give_arguments(parts, call.arguments_text or "")
            self._num_valid += 1
        parts.append(call)
        self._num_ended += 1
        self._broken, self._index = None, None
        self._step = self._after

    def _is_allowed(self) -> bool:
        return self._parallel or self._num_valid == 0

    def _give_arguments(self, parts: list[Part], text: str) -> None:
        if self._index is not None and text:
            parts.append(CallArguments(self._index, text))

    def _give_text(self, parts: list[Part], length: int) -> None:
        self._hold(length)
        if self._held:
            self._has_text = True
            self._before = self._held[-1]
            parts.append(TextPart(self._take_held()))

    def _give(self, parts: list[Part], kind: type[TextPart | SyntaxPart], text: str) -> None:
        if text:
            parts.append(kind(text))

    def _hold(self, length: int) -> None:
        self._held += self._buffer[:length]
        self._buffer = self._buffer[length:]

    def _hold_blanks(self) -> None:
        self._hold(len(self._buffer) - len(self._buffer.lstrip()))

    def _take_held(self) -> str:
        held, self._held = self._held, ""
        return held
