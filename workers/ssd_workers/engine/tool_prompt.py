"""Tools for chat templates that know none: told in a message, calls and results as text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Literal

from ssd_integrations.protocol import Message, Tool
from ssd_workers.engine.output_parsers.formats import ToolFormat

_INSTRUCTIONS = """\
You have tools. Each line describes one: its name, what it does, the JSON schema of its arguments.
{tools}
To call a tool, answer with nothing but a call in this form:
{example}
If no tool is needed, or its result is there already, answer the user in plain words."""


def describe(tools: Sequence[Tool], tool_format: ToolFormat) -> str:
    """What the model has to know to call ``tools``."""
    lines = [json.dumps(tool.as_function()["function"], ensure_ascii=False) for tool in tools]
    form = tool_format
    example = f"{form.before}<name of the tool>{form.between}{{<its arguments>}}{form.after}"
    return _INSTRUCTIONS.format(tools="\n".join(lines), example=f"{form.begin}{example}{form.end}")


def in_words(
    messages: Sequence[Message],
    tools: Sequence[Tool],
    tool_format: ToolFormat,
    told_in: Literal["system", "user"],
) -> tuple[Message, ...]:
    """``messages`` for a template that renders nothing but roles and contents.

    Parameters:
      tools: those to tell of; with none, only calls and results are put into words.
      tool_format: how the model writes calls.
      told_in: the message that tells of the tools; some templates refuse a system message.
    """
    plain = tuple(_merged(_without_tools(messages, tool_format)))
    if not tools:
        return plain
    section = describe(tools, tool_format)
    if told_in == "system" and plain[0].role != "system":
        return (Message(role="system", content=section), *plain)
    at = next((i for i, message in enumerate(plain) if message.role == told_in), None)
    if at is None:
        return (Message(role=told_in, content=section), *plain)
    told = plain[at].model_copy(update={"content": f"{plain[at].content}\n\n{section}".lstrip()})
    return (*plain[:at], told, *plain[at + 1 :])


def _without_tools(messages: Sequence[Message], tool_format: ToolFormat) -> Iterator[Message]:
    names: dict[str, str] = {}
    for message in messages:
        if message.role == "tool":
            called = message.name or names.get(message.tool_call_id or "", "the tool")
            yield Message(role="user", content=f"Result of {called}:\n{message.content}")
        elif message.tool_calls:
            names |= {call.id: call.name for call in message.tool_calls}
            calls = tool_format.render(message.tool_calls)
            yield Message(role=message.role, content=f"{message.content}\n{calls}".lstrip())
        else:
            yield message


def _merged(messages: Iterator[Message]) -> Iterator[Message]:
    """With results next to each other, or to what the user says, in one message.

    Many templates want turns that alternate.
    """
    last: Message | None = None
    for message in messages:
        if last is not None and last.role == message.role == "user":
            last = last.model_copy(update={"content": f"{last.content}\n\n{message.content}"})
            continue
        if last is not None:
            yield last
        last = message
    if last is not None:
        yield last
