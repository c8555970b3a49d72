"""The grammar of answers that call tools, in the way that the model writes calls."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher

from ssd_integrations.protocol import Tool
from ssd_workers.engine.output_parsers.formats import OutputFormat
from ssd_workers.engine.output_parsers.thinking import CLOSE, OPEN

#: Calls in a row at most: where calls are all it may write, a small model repeats itself.
MAX_CALLS = 16
# With the blanks that models write between the parts of a JSON text, and no others.
_SPACED: Any = {
    "whitespace_flexible": False,
    "whitespace_pattern": None,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": False,
    "coerce_one_of": False,
}
# A schema that is put together from others names its properties there.
_ELSEWHERE = ("$ref", "allOf", "anyOf", "oneOf", "patternProperties", "additionalProperties")
# Keywords whose keys are names, and those whose values are no schemas.
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_DATA = ("enum", "const", "default", "examples")


@dataclass(frozen=True)
class ToolGrammar:
    """Calls of ``tools``, in ``output_format``.

    With ``required`` the answer is calls alone; otherwise it is text in which calls may stand, and
    what begins one with the format's trigger goes on as one. With ``several`` there may be more
    than one. The model may think first; it must end it if it is ``in_reasoning`` already.
    """

    tools: tuple[Tool, ...]
    output_format: OutputFormat
    required: bool
    several: bool
    in_reasoning: bool

    @property
    def key(self) -> str:
        """The same for the same grammar."""
        how = (self.output_format, self.required, self.several, self.in_reasoning)
        return "\n".join([repr(how), *(tool.to_json() for tool in self.tools)])

    @property
    def constrains(self) -> bool:
        """Whether it says anything: a call without a trigger cannot be told from text."""
        return self.required or bool(self.output_format.tools.trigger)

    def source(self, tokens: Mapping[str, int]) -> str:
        """What llguidance compiles.

        Parameters:
          tokens: those of the format's markers that are tokens of their own, and their ids.
        """
        writer = _Writer(self, tokens)
        grammars = [{"name": "answer", "lark_grammar": writer.lark()}]
        for index, tool in enumerate(self.tools):
            made = LLMatcher.grammar_from_json_schema(closed(tool), overrides=_SPACED)
            grammars.append({**json.loads(made)["grammars"][0], "name": f"arguments_{index}"})
        return json.dumps({"grammars": grammars})


class _Writer:
    def __init__(self, grammar: ToolGrammar, tokens: Mapping[str, int]) -> None:
        self._grammar = grammar
        self._format = grammar.output_format.tools
        self._tokens = tokens
        self._several = grammar.several and self._format.separator is not None

    def lark(self) -> str:
        rules = self._required() if self._grammar.required else self._free()
        thinking = ""
        if self._grammar.output_format.thinks:
            thinking = "thinking " if self._grammar.in_reasoning else "thinking? "
            rules += self._thinking()
        start, *others = rules
        return "\n".join(
            [f"start: {thinking}{start}", *others, "TEXT: /(?s:.*)/", "BLANKS: /[ \\n]{1,4}/"]
        )

    def _required(self) -> list[str]:
        form = self._format
        return [
            f"{self._literal(form.begin)} {self._list()} {self._literal(form.end)}",
            *self._calls(form.before),
        ]

    def _free(self) -> list[str]:
        form, trigger = self._format, self._format.trigger
        begin, before = form.begin, form.before
        if begin:
            begin = begin.removeprefix(trigger)
        else:
            before = before.removeprefix(trigger)
        calls = self._list() if begin else "call"
        return [
            "group* TEXT" if self._several else "(group | TEXT)",
            f"group: opening {self._literal(begin)} {calls} {self._literal(form.end)}",
            self._up_to("opening", trigger),
            *self._calls(before),
        ]

    def _list(self) -> str:
        if not self._several:
            return "call"
        more = f"({self._literal(self._format.separator or '')} call)"
        return f"call {more}{{0,{MAX_CALLS - 1}}}"

    def _calls(self, before: str) -> list[str]:
        form, tools = self._format, self._grammar.tools
        names = " | ".join(f"call_{index}" for index in range(len(tools)))
        return [f"call: {names}"] + [
            f"call_{index}: {self._literal(before + tool.name + form.between)} "
            f"@arguments_{index} {self._literal(form.after)}"
            for index, tool in enumerate(tools)
        ]

    def _thinking(self) -> list[str]:
        opening = "" if self._grammar.in_reasoning else self._literal(OPEN)
        blanks = "BLANKS?" if self._grammar.required else ""
        return [f"thinking: {opening} thought {blanks}", self._up_to("thought", CLOSE)]

    def _up_to(self, rule: str, marker: str) -> str:
        """A rule for any text and ``marker`` at its end, for the first time."""
        if marker in self._tokens:
            return f"{rule}: TEXT {self._literal(marker)}"
        return f"{rule}[lazy]: TEXT {self._literal(marker)}"

    def _literal(self, text: str) -> str:
        """Just ``text``, its markers as tokens where there are such."""
        if not self._tokens:
            return json.dumps(text) if text else ""
        pattern = "(" + "|".join(map(re.escape, self._tokens)) + ")"
        return " ".join(
            f"<[{self._tokens[piece]}]>" if piece in self._tokens else json.dumps(piece)
            for piece in re.split(pattern, text)
            if piece
        )


def closed(tool: Tool) -> dict[str, Any]:
    """The schema of ``tool``'s arguments, without any that it does not name.

    A property of the schema that allows others is kept. With ``strict``, objects within it are
    closed in the same way.
    """
    schema = dict(tool.parameters) if not tool.strict else _closed_within(tool.parameters)
    return _closed(schema)


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    if schema.get("type") != "object" or any(key in schema for key in _ELSEWHERE):
        return schema
    return {**schema, "additionalProperties": False}


def _closed_within(part: Any) -> Any:
    if isinstance(part, list):
        return [_closed_within(inner) for inner in part]
    if not isinstance(part, dict):
        return part
    made: dict[str, Any] = {}
    for key, value in part.items():
        if key in _BY_NAME and isinstance(value, dict):
            made[key] = {name: _closed_within(inner) for name, inner in value.items()}
        else:
            made[key] = value if key in _DATA else _closed_within(value)
    return _closed(made)
