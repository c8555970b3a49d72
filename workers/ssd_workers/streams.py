"""Events onto Redis Streams: one thread writes what the engine emitted, a pipeline at a time."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

import redis

from ssd_integrations.backends.wire import EVENT_FIELD, entry_id, parse_entry_id, stream_key
from ssd_integrations.protocol import Event, is_terminal
from ssd_workers.claims import FINISH_SCRIPT, finish_arguments
from ssd_workers.redis_connection import TRANSIENT_ERRORS, is_transient

logger = logging.getLogger(__name__)

_MAX_BATCH = 512
_RETRY_S = 0.2


@dataclass
class StreamWriter:
    """One attempt's end of a request's stream.

    ``settled`` is set once nothing more will be written: the last entry is in Redis, a later
    attempt has taken over (``fenced``), Redis refuses the entries for good, or the worker stops
    while Redis is away (``lost``).
    """

    request_id: str
    attempt: int
    max_len: int
    on_fenced: Callable[[], None]
    settled: threading.Event = field(default_factory=threading.Event)
    fenced: bool = False
    lost: bool = False
    last_sequence: int = 0


@dataclass(frozen=True)
class _Entry:
    writer: StreamWriter
    id: str
    event: str
    last: bool


class StreamPublisher:
    """Writes events in order without ever blocking the thread that emits them.

    While Redis is away the entries wait in memory (bounded by the tokens of the running
    requests) and go out when it is back; an entry that had arrived all the same is refused
    by its id.
    """

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._queue: SimpleQueue[tuple[StreamWriter, Event] | None] = SimpleQueue()
        self._stopping = threading.Event()
        self._give_up_at = math.inf
        self._thread = threading.Thread(target=self._loop, name="ssd-streams", daemon=True)

    def start(self) -> None:
        """Start the writing thread."""
        self._thread.start()

    def put(self, writer: StreamWriter, event: Event) -> None:
        """Queue ``event``; returns at once."""
        self._queue.put((writer, event))

    def give_up_after(self, seconds: float) -> None:
        """From then on, what an absent Redis does not take is lost instead of waited for."""
        self._give_up_at = time.monotonic() + seconds

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what is queued and stop; gives up on an absent Redis after ``timeout_s``."""
        self._queue.put(None)
        self._thread.join(timeout_s)
        self._stopping.set()

    def _loop(self) -> None:
        going = True
        while going:
            items = [self._queue.get()]
            while len(items) < _MAX_BATCH:
                try:
                    items.append(self._queue.get_nowait())
                except Empty:
                    break
            going = None not in items
            self._write([self._entry(*item) for item in items if item is not None])

    def _entry(self, writer: StreamWriter, event: Event) -> _Entry:
        writer.last_sequence += 1
        return _Entry(
            writer,
            entry_id(writer.attempt, writer.last_sequence),
            event.to_json(),
            is_terminal(event),
        )

    def _write(self, entries: list[_Entry]) -> None:
        entries = [entry for entry in entries if not entry.writer.settled.is_set()]
        while entries and not self._stopping.is_set():
            try:
                replies = self._send(entries)
                problem = next((r for r in replies if is_transient(r)), None)
                if problem is None:
                    self._settle(entries, replies)
                    return
            except TRANSIENT_ERRORS as error:
                problem = error
            if time.monotonic() >= self._give_up_at:
                self._lose(entries)
                return
            logger.warning("Streams wait for Redis: %s", problem)
            self._stopping.wait(_RETRY_S)

    def _send(self, entries: list[_Entry]) -> list[object]:
        with self._client.pipeline(transaction=False) as pipe:
            for entry in entries:
                writer = entry.writer
                if entry.last:
                    arguments = finish_arguments(writer.request_id, entry.id, entry.event)
                    pipe.eval(FINISH_SCRIPT, 2, *arguments)
                else:
                    pipe.xadd(
                        stream_key(writer.request_id),
                        {EVENT_FIELD: entry.event},
                        id=entry.id,
                        maxlen=writer.max_len,
                        approximate=True,
                    )
            return list(pipe.execute(raise_on_error=False))

    def _settle(self, entries: list[_Entry], replies: list[object]) -> None:
        for entry, reply in zip(entries, replies, strict=True):
            writer = entry.writer
            if isinstance(reply, Exception) and not writer.settled.is_set():
                if not _is_stale_id(reply):
                    logger.error("Redis refuses entries of %s: %s", writer.request_id, reply)
                    self._give_up(writer)
                elif self._newest_attempt(writer.request_id) > writer.attempt:
                    logger.warning(
                        "Attempt %d of %s ends: a later one runs.",
                        writer.attempt,
                        writer.request_id,
                    )
                    writer.fenced = True
                    self._give_up(writer)
            if entry.last:
                writer.settled.set()

    def _lose(self, entries: list[_Entry]) -> None:
        for writer in {id(entry.writer): entry.writer for entry in entries}.values():
            logger.warning("The end of %s is lost, Redis is away.", writer.request_id)
            writer.lost = True
            self._give_up(writer)

    def _newest_attempt(self, request_id: str) -> int:
        newest: Any = self._client.xrevrange(stream_key(request_id), count=1)
        return parse_entry_id(newest[0][0])[0] if newest else 0

    def _give_up(self, writer: StreamWriter) -> None:
        writer.settled.set()
        writer.on_fenced()


def _is_stale_id(error: Exception) -> bool:
    """Whether Redis refused an id because the stream already holds it or a higher one."""
    return isinstance(error, redis.ResponseError) and "equal or smaller" in str(error)
