"""How models write calls, and which of the ways a model uses."""

from __future__ import annotations

import json
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

from ssd_integrations.protocol import ToolCall
from ssd_workers.engine.output_parsers.thinking import CLOSE, OPEN


@dataclass(frozen=True)
class ToolFormat:
    """One way to write calls.

    All calls of an answer are ``begin``, the calls with ``separator`` between them, ``end``. One is
    ``before``, the tool's name, ``between``, the arguments as JSON, ``after``. Where there is no
    separator there can be only one. ``trigger`` begins calls and nothing else, ``closer`` ends one.
    ``markers`` may be tokens of their own, to be seen although they may be special ones.
    """

    name: str
    before: str = '{"name": "'
    between: str = '", "arguments": '
    after: str = "}"
    begin: str = ""
    end: str = ""
    separator: str | None = None
    trigger: str = ""
    closer: str = ""
    markers: tuple[str, ...] = ()

    def render(self, calls: tuple[ToolCall, ...]) -> str:
        """``calls`` as the model would write them."""
        texts = [
            self.before
            + call.name
            + self.between
            + json.dumps(call.arguments, ensure_ascii=False)
            + self.after
            for call in calls
        ]
        return self.begin + (self.separator or "\n").join(texts) + self.end


_MISTRAL = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
FORMATS = {
    format_.name: format_
    for format_ in (
        ToolFormat(
            "hermes",
            before='<tool_call>\n{"name": "',
            after="}\n</tool_call>",
            separator="\n",
            trigger="<tool_call>",
            closer="</tool_call>",
            markers=("<tool_call>", "</tool_call>"),
        ),
        # Its templates render one call a turn and refuse more.
        ToolFormat(
            "llama3",
            between='", "parameters": ',
            trigger="<|python_tag|>",
            markers=("<|python_tag|>",),
        ),
        ToolFormat(
            "mistral",
            begin="[TOOL_CALLS][",
            end="]",
            separator=", ",
            trigger="[TOOL_CALLS]",
            markers=_MISTRAL,
        ),
        ToolFormat(
            "mistral-args",
            before="[TOOL_CALLS]",
            between="[ARGS]",
            after="",
            separator="",
            trigger="[TOOL_CALLS]",
            markers=_MISTRAL,
        ),
        ToolFormat("json", separator="\n"),
    )
}


@dataclass(frozen=True)
class OutputFormat:
    """What a model's output can hold besides text: calls, and reasoning if it ``thinks``."""

    tools: ToolFormat
    thinks: bool

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts that may be tokens of their own."""
        return (*self.tools.markers, *((OPEN, CLOSE) if self.thinks else ()))


def recognise(
    template: str | None,
    added_tokens: Container[str],
    tool_format: str = "auto",
    reasoning_format: str = "auto",
) -> OutputFormat:
    """The format of a model.

    Parameters:
      template: its chat template.
      added_tokens: the texts of its vocabulary's control tokens.
      tool_format, reasoning_format: what the engine was told; "auto" looks at the other two.
    """
    thinks = reasoning_format == "think"
    if reasoning_format == "auto":
        thinks = CLOSE in (template or "")
    if tool_format == "auto":
        tool_format = _guess(template or "", added_tokens)
    return OutputFormat(FORMATS[tool_format], thinks)


def _guess(template: str, added_tokens: Container[str]) -> str:
    # What the template teaches the model counts for more than what its vocabulary could say.
    known: Any
    for known in (template, added_tokens):
        if "[TOOL_CALLS]" in known:
            return "mistral-args" if "[ARGS]" in known else "mistral"
        if "<tool_call>" in known:
            return "hermes"
        if "<|python_tag|>" in known:
            return "llama3"
    return "json"
