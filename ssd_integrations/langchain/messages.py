"""LangChain messages as messages of the contract."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)

from ssd_integrations.errors import InvalidRequestError
from ssd_integrations.protocol import Role

_CHAT_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "ai": "assistant",
    "tool": "tool",
}
# Blocks that other providers leave in an assistant's content. The calls are in `tool_calls`
# as well, and past reasoning is not part of the conversation.
_ASSISTANT_ONLY_BLOCKS = frozenset(
    {"tool_use", "tool_call", "function_call", "reasoning", "thinking", "redacted_thinking"}
)


def to_contract(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """The fields of one :class:`ssd_integrations.protocol.Message` per message.

    Raises:
      InvalidRequestError: a role, a content block or a tool call that cannot be sent.
    """
    return [_message(message) for message in messages]


def _message(message: BaseMessage) -> dict[str, Any]:
    role = _role(message)
    fields: dict[str, Any] = {"role": role, "content": _text(message, role)}
    if message.name is not None:
        fields["name"] = message.name
    if isinstance(message, ToolMessage):
        fields["tool_call_id"] = message.tool_call_id
    if isinstance(message, AIMessage):
        fields["tool_calls"] = _tool_calls(message)
    return fields


def _role(message: BaseMessage) -> Role:
    if isinstance(message, ChatMessage):
        role = _CHAT_ROLES.get(message.role.lower())
        if role is None:
            raise InvalidRequestError(
                f"ChatMessage has the role {message.role!r}.",
                remedy=f"Use one of {', '.join(_CHAT_ROLES)}.",
            )
        return role
    if isinstance(message, SystemMessage):
        return "system"
    if isinstance(message, HumanMessage):
        return "user"
    if isinstance(message, AIMessage):
        return "assistant"
    if isinstance(message, ToolMessage | FunctionMessage):
        return "tool"
    raise InvalidRequestError(
        f"A {type(message).__name__} cannot be sent to a model.",
        remedy="Use system, human, ai, tool or chat messages.",
    )


def _text(message: BaseMessage, role: Role) -> str:
    if isinstance(message.content, str):
        return message.content
    parts = []
    for block in message.content:
        if isinstance(block, str):
            parts.append(block)
        elif block.get("type") == "text" and isinstance(block.get("text"), str):
            parts.append(block["text"])
        elif not (role == "assistant" and block.get("type") in _ASSISTANT_ONLY_BLOCKS):
            raise InvalidRequestError(
                f"A {role} message holds a content block of type {block.get('type')!r}.",
                remedy="Models behind ChatSSD read text only: give strings or text blocks.",
            )
    return "".join(parts)


def _tool_calls(message: AIMessage) -> list[dict[str, Any]]:
    if message.invalid_tool_calls:
        name = message.invalid_tool_calls[0].get("name")
        raise InvalidRequestError(
            f"An ai message holds a call of {name!r} whose arguments are not valid JSON.",
            remedy="Take invalid_tool_calls out of the history, or correct the arguments.",
        )
    return [
        # LangChain lets an id be None; a template that prints ids needs one that is unique.
        {"id": call["id"] or f"call_{index}", "name": call["name"], "arguments": call["args"]}
        for index, call in enumerate(message.tool_calls)
    ]
