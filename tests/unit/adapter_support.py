"""What the tests of both adapters share."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.scripted_backend import ScriptedBackend

if TYPE_CHECKING:
    from langchain_core.messages import AIMessageChunk

SECRET = "redis://:hunter2@gpu-box:6379/0"


def merged(chunks: list[AIMessageChunk]) -> AIMessageChunk:
    """The chunks of a LangChain stream as one."""
    first, *rest = chunks
    for chunk in rest:
        first += chunk
    return first


async def until_cancelled(backend: ScriptedBackend) -> None:
    """Wait until a request of ``backend`` is cancelled."""
    async with asyncio.timeout(5):
        while not backend.cancelled:
            await asyncio.sleep(0)


async def cancel_once_sent(backend: ScriptedBackend, call: Coroutine[Any, Any, object]) -> None:
    """Cancel the task of ``call`` as soon as its request is with ``backend``."""
    task = asyncio.create_task(call)
    while not backend.requests:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
