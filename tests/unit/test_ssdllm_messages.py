"""LlamaIndex messages on their way to the contract."""

from __future__ import annotations

from typing import Any

import pytest
from llama_index.core.base.llms.types import (
    AudioBlock,
    ChatMessage,
    ImageBlock,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)

from ssd_integrations import SSDLLM
from ssd_integrations.errors import InvalidRequestError
from ssd_integrations.protocol import Message, ToolCall
from tests.unit.scripted_backend import ScriptedBackend


def sent(*messages: ChatMessage) -> tuple[Message, ...]:
    backend = ScriptedBackend()
    SSDLLM(backend=backend).chat(list(messages))
    found = backend.requests[0].messages
    assert found is not None
    return found


@pytest.mark.parametrize("role", list(MessageRole))
def test_every_role_has_its_place(role: MessageRole) -> None:
    expected = {
        "system": "system", "developer": "system", "user": "user", "assistant": "assistant",
        "chatbot": "assistant", "model": "assistant", "tool": "tool", "function": "tool",
    }  # fmt: skip
    assert sent(ChatMessage(role=role, content="x"))[0].role == expected[role.value]


def test_several_of_a_role_in_a_row() -> None:
    messages = [
        ChatMessage(role=role, content=f"{role}{index}")
        for role in ("system", "user", "assistant")
        for index in (1, 2)
    ]
    assert [m.content for m in sent(*messages)] == [
        "system1", "system2", "user1", "user2", "assistant1", "assistant2",
    ]  # fmt: skip


def test_text_blocks_are_joined_as_the_framework_does() -> None:
    message = ChatMessage(role="user", content=[TextBlock(text="a"), TextBlock(text="b")])
    assert sent(message)[0].content == message.content == "a\nb"


def test_empty_message() -> None:
    assert sent(ChatMessage(role="user"))[0].content == ""


def test_tool_calls_and_results() -> None:
    call, result = sent(
        ChatMessage(
            role="assistant",
            content=[
                ThinkingBlock(content="hm"),
                TextBlock(text="Let me add."),
                ToolCallBlock(tool_call_id="c1", tool_name="add", tool_kwargs={"a": 1}),
                ToolCallBlock(tool_name="add", tool_kwargs='{"a": 2}'),
            ],
        ),
        ChatMessage(
            role="tool", content="3", additional_kwargs={"tool_call_id": "c1", "name": "add"}
        ),
    )
    assert call.content == "Let me add."
    assert call.tool_calls == (
        ToolCall(id="c1", name="add", arguments={"a": 1}),
        ToolCall(id="call_1", name="add", arguments={"a": 2}),
    )
    assert (result.content, result.tool_call_id, result.name) == ("3", "c1", "add")


@pytest.mark.parametrize(
    ("role", "block", "named"),
    [
        ("user", ImageBlock(url="https://example.com/x.png"), "'image'"),
        ("user", AudioBlock(url="https://example.com/x.wav"), "'audio'"),
        ("user", ThinkingBlock(content="x"), "'thinking'"),
        ("assistant", ToolCallBlock(tool_name="add", tool_kwargs="{"), "'add'"),
        ("assistant", ToolCallBlock(tool_name="add", tool_kwargs="[1]"), "'add'"),
    ],
)
def test_what_cannot_be_sent_is_named(role: str, block: Any, named: str) -> None:
    with pytest.raises(InvalidRequestError, match=named):
        sent(ChatMessage(role=role, content=[block]))
