"""CeleryBackend: requests go out as Celery tasks, events come back over Redis Streams."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

from ssd_integrations.backends.submission import (
    CANCEL_SCRIPT,
    REGISTER_SCRIPT,
    STATE_SCRIPT,
    RequestState,
    cancel_arguments,
    check_registered,
    live_workers,
    parse_state,
    register_arguments,
    with_fixed_seed,
)
from ssd_integrations.backends.wire import (
    WORKERS_KEY,
    WorkerRecord,
    check_broker_url,
    state_key,
    worker_key,
)
from ssd_integrations.errors import (
    BrokerUnavailableError,
    DeadlineExceededError,
    InvalidRequestError,
    MissingExtraError,
)
from ssd_integrations.protocol import Event, FinishedEvent, GenerationRequest, ModelInfo

try:
    from ssd_integrations.backends.redis_clients import RedisClients
    from ssd_integrations.backends.stream_source import StreamSource
    from ssd_integrations.backends.task_sender import TaskSender
except ImportError as error:
    raise MissingExtraError.for_extra("The Celery backend", "celery") from error

from ssd_integrations.backends.stream_reader import StreamCursor, StreamWatch

logger = logging.getLogger(__name__)

#: Queue deadline of a submitted job whose request names none.
BATCH_QUEUE_TIMEOUT_S = 86_400.0


class CeleryBackend:
    """A :class:`~ssd_integrations.backends.base.Backend` whose engine runs on Celery workers.

    Safe to share between threads, event loops and forked processes; a copy, pickled or not, is
    a backend with connections of its own. The constructor opens no connection.

    Parameters:
      broker_url: ``redis://`` or ``rediss://`` URL of the Redis or Valkey server.
      connect_timeout_s: longest wait for one connection attempt.
      reconnect_timeout_s: how long a running stream survives a broker that is away.

    Raises:
      InvalidRequestError: ``broker_url`` is not a Redis URL.
    """

    def __init__(
        self,
        broker_url: str,
        *,
        connect_timeout_s: float = 2.0,
        reconnect_timeout_s: float = 10.0,
    ) -> None:
        check_broker_url(broker_url)
        self._clients = RedisClients(broker_url, connect_timeout_s=connect_timeout_s)
        self._sender = TaskSender(broker_url, connect_timeout_s=connect_timeout_s)
        self._source = StreamSource(self._clients, self.workers)
        self._broker_url = broker_url
        self._connect_timeout_s = connect_timeout_s
        self._reconnect_timeout_s = reconnect_timeout_s
        self._lock = threading.Lock()
        self._running: set[str] = set()
        self._closed = False

    def __reduce__(self) -> tuple[object, ...]:
        options = (self._broker_url, self._connect_timeout_s, self._reconnect_timeout_s)
        return _reopened, options

    # One request, read by its caller ------------------------------------------------------

    def generate(self, request: GenerationRequest) -> Iterator[Event]:
        """Send ``request`` and yield its events; closing the generator cancels it.

        Raises:
          BrokerUnavailableError: the broker is away.
          WorkerUnavailableError: no worker took the request before its queue deadline.
          DeadlineExceededError: it did not finish within ``timeout_s``.
          SSDError: whatever the worker reports.
        """
        request = self._send(request)
        cursor = StreamCursor(request.request_id)
        watch = self._watch(request.queue_timeout_s, request.timeout_s)
        self._note_running(request.request_id)
        try:
            yield from self._source.read(cursor, watch, request.model)
        finally:
            self._forget_running(request.request_id)
            if not (cursor.finished or watch.gave_up):
                self._cancel_quietly(request.request_id)

    async def agenerate(self, request: GenerationRequest) -> AsyncIterator[Event]:
        """Like :meth:`generate`, without blocking the event loop."""
        request = await self._aregister(request)
        cursor = StreamCursor(request.request_id)
        watch = self._watch(request.queue_timeout_s, request.timeout_s)
        self._note_running(request.request_id)
        try:
            # Celery publishes with blocking sockets only. A task cancelled meanwhile leaves the
            # thread sending; the mark of the cancellation is there before a worker takes it.
            await asyncio.to_thread(self._sender.send, request)
            async for event in self._source.aread(cursor, watch, request.model):
                yield event
        finally:
            self._forget_running(request.request_id)
            if not (cursor.finished or watch.gave_up):
                await self._acancel_quietly(request.request_id)

    # Jobs that outlive their submitter ----------------------------------------------------

    def submit(self, request: GenerationRequest) -> str:
        """Queue ``request`` as a batch job and return its id; nobody needs to wait for it.

        It waits in the queue for ``queue_timeout_s``, or for a day if the request does not
        set that.

        Raises:
          BrokerUnavailableError: the broker is away.
        """
        changes: dict[str, Any] = {"queue": "batch"}
        if "queue_timeout_s" not in request.model_fields_set:
            changes["queue_timeout_s"] = BATCH_QUEUE_TIMEOUT_S
        return self._send(request.model_copy(update=changes)).request_id

    def collect(self, request_id: str) -> Iterator[Event]:
        """Yield the events of a submitted job from its first on, as often as one likes.

        Closing this generator does not cancel the job; :meth:`cancel` does.

        Raises:
          InvalidRequestError: the id is unknown, or its results have expired.
          SSDError: as :meth:`generate` does.
        """
        state = self._state(request_id)
        watch = self._watch(state.queue_timeout_s, state.timeout_s)
        yield from self._source.read(StreamCursor(request_id), watch, state.model)

    def result(self, request_id: str, timeout: float | None = None) -> FinishedEvent:
        """Wait for the end of a submitted job.

        Raises:
          DeadlineExceededError: it is not done after ``timeout`` seconds; it goes on running.
          SSDError: as :meth:`collect` does.
        """
        state = self._state(request_id)
        limits = [limit for limit in (timeout, state.timeout_s) if limit is not None]
        watch = self._watch(state.queue_timeout_s, min(limits, default=None))
        for event in self._source.read(StreamCursor(request_id), watch, state.model):
            if isinstance(event, FinishedEvent):
                return event
        raise DeadlineExceededError(f"Request {request_id} has not finished.")

    # The rest of the protocol -------------------------------------------------------------

    def cancel(self, request_id: str) -> bool:
        """Ask the worker to stop; False if the request is unknown or done.

        Raises:
          BrokerUnavailableError: the broker is away.
        """
        keys, arguments = cancel_arguments(request_id)
        with self._clients.translated_errors():
            reply = self._clients.sync().eval(CANCEL_SCRIPT, len(keys), *keys, *arguments)
        return bool(reply)

    def models(self) -> list[ModelInfo]:
        """The models that a live worker serves, by name.

        Raises:
          BrokerUnavailableError: the broker is away.
        """
        by_name = {worker.queue_model: worker.model for worker in self.workers()}
        return [by_name[name] for name in sorted(by_name)]

    def workers(self) -> list[WorkerRecord]:
        """The workers that announced themselves within the last seconds.

        Raises:
          BrokerUnavailableError: the broker is away.
        """
        with self._clients.translated_errors():
            client = self._clients.sync()
            ids = sorted(_text(raw) for raw in client.smembers(WORKERS_KEY))
            return live_workers(client.mget([worker_key(name) for name in ids])) if ids else []

    def close(self) -> None:
        """Cancel the requests that this backend is reading and close its connections."""
        with self._lock:
            self._closed = True
            running = list(self._running)
        for request_id in running:
            self._cancel_quietly(request_id)
        self._sender.close()
        self._clients.close()

    async def aclose(self) -> None:
        """:meth:`close`, and the connections of the running event loop too."""
        await asyncio.to_thread(self.close)
        await self._clients.aclose()

    # Sending ------------------------------------------------------------------------------

    def _send(self, request: GenerationRequest) -> GenerationRequest:
        self._check_open()
        request = with_fixed_seed(request)
        keys, arguments = register_arguments(request)
        with self._clients.translated_errors():
            reply = self._clients.sync().eval(REGISTER_SCRIPT, len(keys), *keys, *arguments)
        check_registered(request.request_id, reply)
        self._sender.send(request)
        return request

    async def _aregister(self, request: GenerationRequest) -> GenerationRequest:
        self._check_open()
        request = with_fixed_seed(request)
        keys, arguments = register_arguments(request)
        client = self._clients.of_running_loop()
        with self._clients.translated_errors():
            reply = await self._clients.call(
                client.eval(REGISTER_SCRIPT, len(keys), *keys, *arguments)
            )
        check_registered(request.request_id, reply)
        return request

    def _state(self, request_id: str) -> RequestState:
        self._check_open()
        with self._clients.translated_errors():
            reply = self._clients.sync().eval(STATE_SCRIPT, 1, state_key(request_id))
        return parse_state(request_id, reply)

    # Bookkeeping --------------------------------------------------------------------------

    def _watch(self, queue_timeout_s: float, timeout_s: float | None) -> StreamWatch:
        return StreamWatch(queue_timeout_s, timeout_s, self._reconnect_timeout_s)

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidRequestError(
                "This CeleryBackend is closed.", remedy="Open a new one for further requests."
            )

    def _note_running(self, request_id: str) -> None:
        with self._lock:
            self._running.add(request_id)

    def _forget_running(self, request_id: str) -> None:
        with self._lock:
            self._running.discard(request_id)

    def _cancel_quietly(self, request_id: str) -> None:
        # The reader is leaving; an error here would hide the one that it leaves with.
        try:
            self.cancel(request_id)
        except BrokerUnavailableError as error:
            logger.warning("Request %s could not be cancelled: %s", request_id, error)

    async def _acancel_quietly(self, request_id: str) -> None:
        keys, arguments = cancel_arguments(request_id)
        client = self._clients.of_running_loop()
        try:
            with self._clients.translated_errors():
                await self._clients.call(client.eval(CANCEL_SCRIPT, len(keys), *keys, *arguments))
        except BrokerUnavailableError as error:
            logger.warning("Request %s could not be cancelled: %s", request_id, error)


def _reopened(url: str, connect_timeout_s: float, reconnect_timeout_s: float) -> CeleryBackend:
    return CeleryBackend(
        url, connect_timeout_s=connect_timeout_s, reconnect_timeout_s=reconnect_timeout_s
    )


def _text(raw: bytes | str) -> str:
    return raw.decode() if isinstance(raw, bytes) else raw
