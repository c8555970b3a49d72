"""LangChain messages on their way to the contract."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
)

from ssd_integrations import ChatSSD
from ssd_integrations.errors import InvalidRequestError
from ssd_integrations.protocol import Message, ToolCall
from tests.unit.scripted_backend import ScriptedBackend


def sent(*messages: BaseMessage) -> tuple[Message, ...]:
    backend = ScriptedBackend()
    ChatSSD(backend=backend).invoke(list(messages))
    found = backend.requests[0].messages
    assert found is not None
    return found


def test_roles_in_order_and_repeated() -> None:
    found = sent(
        SystemMessage("s1"),
        SystemMessage("s2"),
        HumanMessage("h1", name="ann"),
        HumanMessage("h2"),
        AIMessage("a1"),
        AIMessage("a2"),
    )
    assert [(m.role, m.content, m.name) for m in found] == [
        ("system", "s1", None),
        ("system", "s2", None),
        ("user", "h1", "ann"),
        ("user", "h2", None),
        ("assistant", "a1", None),
        ("assistant", "a2", None),
    ]


def test_a_tool_loop_may_end_with_a_tool_message() -> None:
    call, result = sent(
        AIMessage("", tool_calls=[{"id": "c1", "name": "add", "args": {"a": 1, "b": [2]}}]),
        ToolMessage("3", tool_call_id="c1", name="add", status="error"),
    )
    assert call.tool_calls == (ToolCall(id="c1", name="add", arguments={"a": 1, "b": [2]}),)
    assert (result.role, result.content, result.tool_call_id) == ("tool", "3", "c1")


def test_calls_without_ids_get_distinct_ones() -> None:
    calls: Any = [{"id": None, "name": "f", "args": {}}, {"id": None, "name": "f", "args": {}}]
    (message,) = sent(AIMessage("", tool_calls=calls))
    assert [call.id for call in message.tool_calls] == ["call_0", "call_1"]


@pytest.mark.parametrize(
    ("role", "expected"),
    [("user", "user"), ("Human", "user"), ("developer", "system"), ("assistant", "assistant")],
)
def test_chat_message_roles(role: str, expected: str) -> None:
    assert sent(ChatMessage(content="x", role=role))[0].role == expected


def test_text_blocks_are_joined() -> None:
    (message,) = sent(HumanMessage(["a", {"type": "text", "text": "b"}, "c"]))
    assert message.content == "abc"


def test_blocks_that_repeat_tool_calls_are_left_out() -> None:
    blocks: Any = [
        {"type": "thinking", "thinking": "hm"},
        {"type": "text", "text": "Let me add."},
        {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}},
    ]
    (message,) = sent(AIMessage(blocks, tool_calls=[{"id": "c1", "name": "add", "args": {"a": 1}}]))
    assert message.content == "Let me add."
    assert message.tool_calls[0].arguments == {"a": 1}


@pytest.mark.parametrize(
    ("message", "named"),
    [
        (HumanMessage([{"type": "image_url", "image_url": {"url": "x"}}]), "'image_url'"),
        (HumanMessage([{"type": "audio", "base64": "x"}]), "'audio'"),
        (HumanMessage([{"type": "tool_use", "id": "1"}]), "'tool_use'"),
        (HumanMessage([{"text": "no type"}]), "None"),
        (ChatMessage(content="x", role="narrator"), "'narrator'"),
        (RemoveMessage(id="1"), "RemoveMessage"),
        (
            AIMessage(
                "",
                invalid_tool_calls=[
                    {"id": "1", "name": "add", "args": "{", "error": None,
                     "type": "invalid_tool_call"}
                ],
            ),
            "'add'",
        ),
        (HumanMessage("x", name="n" * 300), "messages.0.name"),
    ],
)  # fmt: skip
def test_what_cannot_be_sent_is_named(message: BaseMessage, named: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        sent(message)
    assert named in str(caught.value)
