"""LlamaIndex messages as messages of the contract."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)

from ssd_integrations.errors import InvalidRequestError
from ssd_integrations.protocol import Role

_ROLES: dict[MessageRole, Role] = {
    MessageRole.SYSTEM: "system",
    MessageRole.DEVELOPER: "system",
    MessageRole.USER: "user",
    MessageRole.ASSISTANT: "assistant",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
    MessageRole.TOOL: "tool",
    MessageRole.FUNCTION: "tool",
}


def to_contract(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """The fields of one :class:`ssd_integrations.protocol.Message` per message.

    Raises:
      InvalidRequestError: a content block or a tool call that cannot be sent.
    """
    return [_message(message) for message in messages]


def _message(message: ChatMessage) -> dict[str, Any]:
    role = _ROLES[message.role]
    fields: dict[str, Any] = {"role": role, "content": _text(message, role)}
    if role == "assistant":
        fields["tool_calls"] = _tool_calls(message)
    if role == "tool":
        fields["tool_call_id"] = message.additional_kwargs.get("tool_call_id")
    name = message.additional_kwargs.get("name")
    if name is not None:
        fields["name"] = name
    return fields


def _text(message: ChatMessage, role: Role) -> str:
    parts = []
    for block in message.blocks:
        if isinstance(block, TextBlock):
            parts.append(block.text)
        # Calls travel in tool_calls; past reasoning is not part of the conversation.
        elif not (role == "assistant" and isinstance(block, ThinkingBlock | ToolCallBlock)):
            raise InvalidRequestError(
                f"A {role} message holds a content block of type {block.block_type!r}.",
                remedy="Models behind SSDLLM read text only: give strings or text blocks.",
            )
    return "\n".join(parts)  # As ChatMessage.content joins them.


def _tool_calls(message: ChatMessage) -> list[dict[str, Any]]:
    blocks = [block for block in message.blocks if isinstance(block, ToolCallBlock)]
    return [
        {
            "id": block.tool_call_id or f"call_{index}",
            "name": block.tool_name,
            "arguments": _arguments(block),
        }
        for index, block in enumerate(blocks)
    ]


def _arguments(block: ToolCallBlock) -> dict[str, Any]:
    arguments: Any = block.tool_kwargs
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):  # no JSON, or too many levels of it
            arguments = None
    if not isinstance(arguments, dict):
        raise InvalidRequestError(
            f"An assistant message holds a call of {block.tool_name!r} "
            "whose arguments are not a JSON object.",
            remedy="Take the call out of the history, or correct its arguments.",
        )
    return arguments
