"""ChatSSD: nobody decodes for nobody."""

from __future__ import annotations

from typing import Any

from langchain_core.messages import HumanMessage

from ssd_integrations import ChatSSD
from tests.unit.adapter_support import cancel_once_sent, until_cancelled
from tests.unit.scripted_backend import ScriptedBackend


def test_break_cancels() -> None:
    backend = ScriptedBackend()
    for _ in ChatSSD(backend=backend).stream("Hi"):
        break
    assert backend.cancelled == [backend.requests[0].request_id]


def test_close_cancels_at_once() -> None:
    backend = ScriptedBackend()
    stream: Any = ChatSSD(backend=backend)._stream([HumanMessage("Hi")])
    next(stream)
    stream.close()
    assert backend.cancelled == [backend.requests[0].request_id]


def test_a_stream_read_to_its_end_is_not_cancelled() -> None:
    backend = ScriptedBackend()
    list(ChatSSD(backend=backend).stream("Hi"))
    assert backend.cancelled == []


async def test_aclose_cancels_before_it_returns() -> None:
    backend = ScriptedBackend()
    stream: Any = ChatSSD(backend=backend)._astream([HumanMessage("Hi")])
    await anext(stream)
    await stream.aclose()
    assert backend.cancelled == [backend.requests[0].request_id]


async def test_break_in_async_for_cancels() -> None:
    backend = ScriptedBackend()
    async for _ in ChatSSD(backend=backend).astream("Hi"):
        break
    await until_cancelled(backend)


async def test_cancelling_the_task_cancels_the_request() -> None:
    backend = ScriptedBackend(pieces=("x",) * 100_000)
    await cancel_once_sent(backend, ChatSSD(backend=backend).ainvoke("Hi"))
    assert backend.cancelled == [backend.requests[0].request_id]


async def test_closing_the_event_stream_cancels() -> None:
    backend = ScriptedBackend(pieces=("x",) * 100_000)
    events = await ChatSSD(backend=backend).astream_events("Hi", version="v3")
    async for _ in events:
        break
    await events.aclose()
    await until_cancelled(backend)
