"""Reads the JSON object of one call as it comes: ``{"name": ..., "arguments": {...}}``."""

from __future__ import annotations

import re
import string
from collections.abc import Collection
from typing import Any, Literal

from pydantic_core import from_json

from ssd_workers.engine.output_parsers.parts import CallEnd

_ARGUMENT_KEYS = ("arguments", "parameters")
_OTHER_KEYS = ("name", "type", "id")
_BLANKS = " \t\r\n"
# What numbers, true, false and null are written with.
_SCALAR = frozenset(string.ascii_letters + string.digits + "+-.")
# The part of a string up to its end, an escape or a character that JSON does not allow there.
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_CLOSING = {"{": "}", "[": "]"}

Expected = Literal["key", "first key", "colon", "value", "rest of a value", "comma", "second brace"]


class CallReader:
    """Follows the brackets and strings of an object and notes its keys as they come.

    It finds the end of the object and of what the call is made of; whether all of it is JSON, the
    parser of :meth:`result` says. ``fault`` is set as soon as it is certain that it cannot be. The
    braces may be doubled, ``{{...}}``: there are templates that show a call like this.

    Parameters:
      names: the tools that there are. :attr:`verdict` says whether the object is meant as a call
        of one of them.
      name: the tool, where it was written before; the object is then the arguments alone.
      certain: read on even if it is not meant as a call.
    """

    def __init__(self, names: Collection[str], name: str | None = None, *, certain: bool) -> None:
        self.raw = ""
        self.done = False
        self.fault = ""
        self.name = name
        self.verdict: Literal["open", "call", "other"] = "open" if name is None else "call"
        self._names = names
        self._certain = certain
        self._alone = name is not None
        self._at = 0
        self._stack: list[str] = []
        self._in_string = False
        self._escaping = False
        self._expected: Expected = "first key"
        self._key = ""
        self._value_start = 0
        self._arguments: tuple[int, int | None] | None = None
        self._taken = 0
        # Where the object itself is, within doubled braces.
        self._start, self._end = 0, 0
        if self._alone:
            # As if the object around them had been read up to here.
            self._stack, self._expected, self._key = ["}"], "value", "arguments"

    @property
    def streams(self) -> bool:
        """Whether arguments can be given out as they come: those that are an object."""
        return self._arguments is not None and self.raw[self._arguments[0]] == "{"

    def push(self, text: str) -> int:
        """Take ``text`` up to the end of the object or to a fault; how many characters."""
        before = len(self.raw)
        self.raw += text
        while self._at < len(self.raw) and not self._is_over:
            self._step()
        self.raw = self.raw[: self._at]
        if self.done or self.fault:
            self._decide("other")
        return len(self.raw) - before

    @property
    def _is_over(self) -> bool:
        unwanted = self.verdict == "other" and not self._certain
        return self.done or bool(self.fault) or unwanted

    @property
    def is_closed(self) -> bool:
        """Whether the object is whole, be it that a second brace could follow."""
        return self.done or self._expected == "second brace"

    def take_arguments(self) -> str:
        """The arguments' text since the last call."""
        if self._arguments is None:
            return ""
        start, end = self._arguments
        fresh = self.raw[start + self._taken : end]
        self._taken += len(fresh)
        return fresh

    def arguments_text(self) -> str | None:
        """All of the arguments' text so far."""
        if self._arguments is None:
            return None
        start, end = self._arguments
        return self.raw[start:end]

    def result(self, call_id: str) -> CallEnd:
        """The call that the object says, valid or not; the object is at its end."""
        text = self.arguments_text()

        def invalid(fault: str) -> CallEnd:
            return CallEnd(call_id, self.name, self.raw, arguments_text=text, fault=fault)

        if self.fault:
            return invalid(self.fault)
        try:
            value: Any = from_json(self.raw[self._start : self._end], allow_inf_nan=False)
            arguments = value
            if not self._alone:
                arguments = value.get("arguments", value.get("parameters"))
            if isinstance(arguments, str):
                text = arguments
                arguments = from_json(arguments, allow_inf_nan=False) if arguments else {}
        except ValueError as error:
            return invalid(f"it is not JSON: {error}")
        if self.name is None:
            return invalid("it has no name")
        if arguments is None:
            arguments, text = {}, "{}"
        if not isinstance(arguments, dict):
            return invalid("its arguments are not an object")
        return CallEnd(call_id, self.name, self.raw, arguments, text or "{}")

    def _step(self) -> None:
        if self._escaping:
            # Whatever it is: a quote does not end the string here.
            self._escaping = False
            self._at += 1
            return
        if self._in_string:
            self._string()
            return
        char = self.raw[self._at]
        if char in _BLANKS:
            self._at += 1
        elif len(self._stack) == 1:
            self._top_level(char)
        else:
            self._nested(char)

    def _string(self) -> None:
        found = _PLAIN.match(self.raw, self._at)
        end = found.end() if found else self._at
        if end == len(self.raw):
            self._at = end
        elif self.raw[end] == "\\":
            self._at = end + 1
            self._escaping = True
        elif self.raw[end] == '"':
            self._at = end + 1
            self._in_string = False
            if len(self._stack) == 1:
                self._string_ended()
        else:
            self._at = end
            self.fault = "it is not JSON: a string goes over the end of a line"

    def _nested(self, char: str) -> None:
        if not self._stack:
            if char != "{":
                self.fault = "it is not a JSON object"
                return
            self._stack.append("}")
            self._at += 1
            return
        if char == '"':
            self._in_string = True
        elif char in _CLOSING:
            self._stack.append(_CLOSING[char])
        elif char in "}]":
            if char != self._stack[-1]:
                self.fault = f"it is not JSON: {char!r} where {self._stack[-1]!r} should be"
                return
            self._stack.pop()
            if len(self._stack) == 1:
                self._value_ended(self._at + 1)
        elif not (char in ",:" or char in _SCALAR):
            self.fault = f"it is not JSON: {char!r} between its parts"
            return
        self._at += 1

    def _top_level(self, char: str) -> None:
        if char == "}" and self._expected in ("first key", "comma"):
            self._at += 1
            self._end = self._at
            self._expected = "second brace"
            self.done = not self._start
        elif char == "{" and self._expected == "first key" and not self._start:
            self._start = self._at
            self._at += 1
        elif self._expected == "second brace":
            self._at += char == "}"
            self.done = True
        elif char == '"' and self._expected in ("first key", "key", "value"):
            self._value_started()
            self._in_string = True
            self._at += 1
        elif char == ":" and self._expected == "colon":
            self._expected = "value"
            self._at += 1
        elif char == "," and self._expected == "comma":
            self._expected = "key"
            self._at += 1
        elif char in _CLOSING and self._expected == "value":
            self._value_started()
            self._stack.append(_CLOSING[char])
            self._at += 1
        elif self._expected in ("value", "rest of a value") and char in _SCALAR:
            if self._expected == "value":
                self._value_started()
            self._expected = "rest of a value"
            self._at += 1
        elif self._expected == "rest of a value":
            self._value_ended(self._at)
        else:
            self.fault = f"it is not JSON: {char!r} where its {self._expected} should be"

    def _value_started(self) -> None:
        self._value_start = self._at
        if self._expected == "value" and self._key in _ARGUMENT_KEYS:
            self._arguments = (self._at, None)
            self._look_for_call()

    def _string_ended(self) -> None:
        if self._expected == "value":
            if self._key == "name":
                self.name = self._decoded()
                if self.name not in self._names:
                    self._decide("other")
                self._look_for_call()
            self._value_ended(self._at)
            return
        key = self._decoded()
        arguments = key in _ARGUMENT_KEYS
        if (arguments and self._arguments) or (key == "name" and self.name is not None):
            self.fault = f"it has {key!r} twice" if not arguments else "it has arguments twice"
        self._key = key or ""
        if not arguments and key not in _OTHER_KEYS:
            self._decide("other")
        self._expected = "colon"

    def _look_for_call(self) -> None:
        if self.name in self._names and self._arguments is not None:
            self._decide("call")

    def _decide(self, verdict: Literal["call", "other"]) -> None:
        if self.verdict == "open":
            self.verdict = verdict

    def _value_ended(self, end: int) -> None:
        if self._arguments is not None and self._arguments[1] is None:
            self._arguments = (self._arguments[0], end)
        elif self._key == "name" and self.name is None:
            self.fault = self.fault or "its name is not a text"
        self._expected = "comma"
        if self._alone:
            self._end = end
            self.done = True

    def _decoded(self) -> str | None:
        try:
            text: str = from_json(self.raw[self._value_start : self._at])
        except ValueError as error:
            self.fault = f"it is not JSON: {error}"
            return None
        return text
