"""A real worker behind a real broker: nobody decodes for nobody."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from ssd_integrations.backends.celery import CeleryBackend
from ssd_integrations.errors import (
    DeadlineExceededError,
    RequestCancelledError,
)
from ssd_integrations.protocol import (
    DeltaEvent,
    FinishedEvent,
    GenerationRequest,
    StartedEvent,
)
from ssd_workers.embedded import EmbeddedValkey
from tests.worker_support import LONG, client, request, wait_until


def test_closing_the_generator_frees_the_slot(
    shared_backend: CeleryBackend, shared_broker: EmbeddedValkey, long_model: Path
) -> None:
    sent = request(long_model, max_tokens=LONG)
    stream = shared_backend.generate(sent)
    assert isinstance(next(stream), StartedEvent)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    last = shared_backend.result(sent.request_id, timeout=5)
    assert last.finish_reason == "cancelled"
    assert last.usage.completion_tokens < LONG / 2
    with client(shared_broker.url) as redis:
        wait_until(lambda: redis.hlen("ssd:unacked") == 0, 5, "the message is acknowledged")


def test_leaving_an_async_generator_cancels(
    shared_backend: CeleryBackend, long_model: Path
) -> None:
    sent = request(long_model, max_tokens=LONG)

    async def leave_early() -> None:
        stream = shared_backend.agenerate(sent)
        await anext(stream)
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]

    asyncio.run(leave_early())
    assert shared_backend.result(sent.request_id, timeout=5).finish_reason == "cancelled"


def test_cancelling_an_async_task_cancels_the_request(
    shared_backend: CeleryBackend, long_model: Path
) -> None:
    sent = request(long_model, max_tokens=LONG)

    async def run_and_cancel() -> None:
        got_text = asyncio.Event()

        async def read() -> None:
            async for event in shared_backend.agenerate(sent):
                if isinstance(event, DeltaEvent):
                    got_text.set()

        task = asyncio.create_task(read())
        await got_text.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run_and_cancel())
    assert shared_backend.result(sent.request_id, timeout=5).finish_reason == "cancelled"


def test_cancelling_while_the_task_is_being_sent(
    shared_backend: CeleryBackend, long_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message is published after the cancellation, and still nobody decodes for nobody."""
    sent = request(long_model, max_tokens=LONG)
    entered, go_on = threading.Event(), threading.Event()
    original = shared_backend._sender.send

    def slow(req: GenerationRequest) -> None:
        entered.set()
        go_on.wait(10)
        original(req)

    monkeypatch.setattr(shared_backend._sender, "send", slow)

    async def run_and_cancel() -> None:
        async def read() -> None:
            async for _ in shared_backend.agenerate(sent):
                pass

        task = asyncio.create_task(read())
        await asyncio.to_thread(entered.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()

    asyncio.run(run_and_cancel())
    with pytest.raises(RequestCancelledError, match="in the queue"):
        shared_backend.result(sent.request_id, timeout=10)


def test_cancel_knows_running_from_unknown(shared_backend: CeleryBackend, long_model: Path) -> None:
    sent = request(long_model, max_tokens=LONG)
    stream = shared_backend.generate(sent)
    next(stream)
    assert shared_backend.cancel(sent.request_id)
    last = list(stream)[-1]
    assert isinstance(last, FinishedEvent)
    assert last.finish_reason == "cancelled"
    assert not shared_backend.cancel(sent.request_id)
    assert not shared_backend.cancel("never-sent")


def test_cancelled_in_the_queue_never_runs(backend: CeleryBackend, long_model: Path) -> None:
    job = backend.submit(request(long_model))
    assert backend.cancel(job)
    with pytest.raises(DeadlineExceededError):
        backend.result(job, timeout=0.3)


def test_a_cancelled_queue_entry_is_reported(
    backend: CeleryBackend, start_worker: object, long_model: Path
) -> None:
    job = backend.submit(request(long_model))
    backend.cancel(job)
    start_worker()  # type: ignore[operator]
    with pytest.raises(RequestCancelledError, match="in the queue"):
        backend.result(job, timeout=10)
