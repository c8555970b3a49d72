"""Fetches a request's stream entries from Redis, blocking or in an event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from ssd_integrations.backends.redis_clients import TRANSIENT_ERRORS, RedisClients
from ssd_integrations.backends.stream_reader import Entry, StreamCursor, StreamWatch
from ssd_integrations.backends.submission import describe_workers
from ssd_integrations.backends.wire import WorkerRecord, stream_key
from ssd_integrations.errors import WorkerUnavailableError
from ssd_integrations.protocol import Event

_MAX_ENTRIES = 512


class StreamSource:
    """Reads streams until their last event, a deadline, or the loss of broker or workers.

    Parameters:
      clients: connections to the broker.
      workers: looks up the live workers, blocking.
    """

    def __init__(self, clients: RedisClients, workers: Callable[[], list[WorkerRecord]]) -> None:
        self._clients = clients
        self._workers = workers

    def read(self, cursor: StreamCursor, watch: StreamWatch, model: str) -> Iterator[Event]:
        """Yield the events of ``cursor``'s request, from where it stands.

        Raises:
          BrokerUnavailableError, WorkerUnavailableError, DeadlineExceededError: see ``watch``.
          SSDError: what the request's failure says.
        """
        key = stream_key(cursor.request_id)
        while not cursor.finished:
            client = self._clients.sync()
            try:
                with self._clients.refusals_translated():
                    reply = client.xread(
                        {key: cursor.last_id}, count=_MAX_ENTRIES, block=_block_ms(watch, cursor)
                    )
            except TRANSIENT_ERRORS as error:
                time.sleep(self._pause_s(watch, error))
                continue
            entries = _entries(reply)
            watch.heard(bool(entries))
            yield from cursor.feed(entries)
            if not entries and watch.needs_workers(cursor):
                _check_workers(cursor, watch, model, self._workers())
            watch.check_deadline(cursor)

    async def aread(
        self, cursor: StreamCursor, watch: StreamWatch, model: str
    ) -> AsyncIterator[Event]:
        """Like :meth:`read`, without blocking the event loop."""
        key = stream_key(cursor.request_id)
        while not cursor.finished:
            client = self._clients.of_running_loop()
            try:
                with self._clients.refusals_translated():
                    reply = await self._clients.call(
                        client.xread(
                            {key: cursor.last_id},
                            count=_MAX_ENTRIES,
                            block=_block_ms(watch, cursor),
                        )
                    )
            except TRANSIENT_ERRORS as error:
                await asyncio.sleep(self._pause_s(watch, error))
                continue
            entries = _entries(reply)
            watch.heard(bool(entries))
            for event in cursor.feed(entries):
                yield event
            if not entries and watch.needs_workers(cursor):
                workers = await asyncio.to_thread(self._workers)
                _check_workers(cursor, watch, model, workers)
            watch.check_deadline(cursor)

    def _pause_s(self, watch: StreamWatch, error: Exception) -> float:
        """How long to wait before the next try at an absent broker."""
        pause_s = watch.lost()
        if pause_s is None:
            raise self._clients.unavailable(error) from error
        return pause_s


def _block_ms(watch: StreamWatch, cursor: StreamCursor) -> int:
    return max(1, int(watch.block_s(cursor) * 1000))


def _entries(reply: Any) -> list[Entry]:
    """The entries of the one stream in an XREAD reply (RESP2: ``[[key, entries]]``)."""
    return reply[0][1] if reply else []


def _check_workers(
    cursor: StreamCursor, watch: StreamWatch, model: str, workers: list[WorkerRecord]
) -> None:
    """Raise WorkerUnavailableError if nobody took the request in time, or its worker is gone."""
    if watch.queue_deadline_passed(cursor):
        raise WorkerUnavailableError(
            f"No worker of model {model!r} took request {cursor.request_id} within "
            f"{watch.queue_timeout_s:g} s. {describe_workers(model, workers)}"
        )
    if watch.worker_missing(any(worker.queue_model == model for worker in workers)):
        raise WorkerUnavailableError(
            f"The worker of model {model!r} that ran request {cursor.request_id} is gone, and no "
            f"other came within {watch.queue_timeout_s:g} s. {describe_workers(model, workers)}"
        )
