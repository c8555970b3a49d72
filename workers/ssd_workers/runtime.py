"""What a worker process holds besides Celery: the engine, its streams, leases and runs."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

import redis

from ssd_integrations.backends.wire import WorkerRecord
from ssd_integrations.errors import (
    AttemptsExhaustedError,
    EngineError,
    MalformedMessageError,
    RequestCancelledError,
    SSDError,
    WorkerUnavailableError,
)
from ssd_integrations.protocol import ErrorInfo, FailedEvent, GenerationRequest
from ssd_workers import claims
from ssd_workers.cancellations import CancelListener
from ssd_workers.engine.service import EngineService
from ssd_workers.keeper import Keeper
from ssd_workers.redis_connection import REDIS_ERRORS, connect
from ssd_workers.run import Run
from ssd_workers.settings import WorkerSettings
from ssd_workers.streams import StreamPublisher, StreamWriter

logger = logging.getLogger(__name__)

_CLAIM_RETRY_S = 10.0
_SUCCESSOR_POLL_S = 1.0
#: How long a worker that stops waits for an absent Redis to take what it has to say.
_LAST_ENTRIES_S = 3.0
#: Stream entries beyond one per token: taken, started, finished, and earlier attempts' ones.
_SPARE_ENTRIES = 64


class HandBack(Exception):  # noqa: N818 - an outcome, not an error
    """The request belongs back on its queue: this worker stops, or Redis is away."""


@dataclass(frozen=True)
class Delivery:
    """A task as it came off the queue."""

    request_id: str
    body: str
    delivery_tag: str
    redelivered: bool


@dataclass
class _Active:
    """A request that this process is busy with."""

    run: Run | None = None
    over: threading.Event = field(default_factory=threading.Event)
    handed_back: bool = True


class WorkerRuntime:
    """Runs deliveries on one engine; ``execute`` is called from many task threads at once.

    Parameters:
      settings: the worker's settings.
      service: an engine that has been started.
    """

    def __init__(self, settings: WorkerSettings, service: EngineService) -> None:
        self._settings = settings
        self._service = service
        self._client: redis.Redis = connect(settings.broker_url)
        self._publisher = StreamPublisher(self._client)
        self._keeper = Keeper(self._client, self.cancel)
        self._listener = CancelListener(self._client, self.cancel)
        self._changed = threading.Condition()
        self._active: dict[str, _Active] = {}
        self._stopping = False

    def start(self) -> None:
        """Start the threads that write streams, renew leases and hear cancellations."""
        self._publisher.start()
        self._keeper.start()
        self._listener.start()

    def announce(self) -> None:
        """Tell applications that this worker takes requests."""
        info = self._service.info()
        model = self._settings.engine.model
        self._keeper.announce(
            WorkerRecord(
                worker_id=self._settings.worker_id,
                pid=os.getpid(),
                host=socket.gethostname(),
                queue_model=model,
                model=info.model_copy(update={"name": model}),
            )
        )

    def execute(self, delivery: Delivery) -> None:
        """Run a delivery to its end; returns once its last entry is on Redis.

        After a lost connection kombu delivers again what is still running here. Such a
        delivery joins the run instead of starting another one.

        Raises:
          HandBack: put the message back on its queue.
        """
        with self._changed:
            if self._stopping:
                raise HandBack(delivery.request_id)
            active = self._active.get(delivery.request_id)
            joined = active is not None
            if active is None:
                active = self._active[delivery.request_id] = _Active()
        if joined:
            active.over.wait()
        else:
            self._execute_alone(delivery, active)
        if active.handed_back:
            raise HandBack(delivery.request_id)

    def cancel(self, request_id: str) -> None:
        """Stop a request at the next step boundary, if it runs here."""
        self._service.cancel(request_id)

    def stop_within(self, grace_s: float) -> None:
        """Announce no more, and give back to the queue what still runs after ``grace_s``."""
        self._keeper.withdraw()
        timer = threading.Timer(grace_s, self.hand_back_all)
        timer.daemon = True
        timer.start()

    def close(self) -> None:
        """Wait for the running requests (see :meth:`stop_within`), then stop everything."""
        with self._changed:
            self._changed.wait_for(lambda: not self._active)
            self._stopping = True
        self._listener.close()
        self._keeper.close()
        self._publisher.close()
        self._service.close()
        self._client.close()

    def fail(self, request_id: str, error: SSDError) -> None:
        """Write ``error`` as the end of a request that cannot be run at all.

        Raises:
          redis.RedisError: Redis is away.
        """
        claim = self._claim(Delivery(request_id, "", "", redelivered=True))
        if claim.verdict != "done":
            writer = self._writer(claim, on_fenced=lambda: None)
            self._write_failure(writer, error)

    def _execute_alone(self, delivery: Delivery, active: _Active) -> None:
        self._keeper.hold(delivery.request_id, delivery.delivery_tag)
        try:
            fenced = self._attempt(delivery, active)
        finally:
            self._keeper.drop(delivery.request_id)
            with self._changed:
                del self._active[delivery.request_id]
                self._changed.notify_all()
            active.over.set()
        if fenced:
            self._outlive_successor(delivery.request_id)

    def _attempt(self, delivery: Delivery, active: _Active) -> bool:
        """Make one attempt; True if a later attempt took over."""
        claim = self._claim(delivery)
        if claim.verdict in ("done", "duplicate"):
            active.handed_back = False
            return False

        def on_fenced() -> None:
            if active.run is not None:
                active.run.stop("fenced")

        writer = self._writer(claim, on_fenced)
        handed_back = False
        try:
            self._check(claim)
            request = self._parse(delivery)
            run = Run(
                request,
                self._publisher,
                writer,
                cancel=lambda: self._service.cancel(request.request_id),
            )
            active.run = run
            self._service.submit(request, run.on_event)
        except SSDError as error:
            self._write_failure(writer, error)
        except Exception as error:
            logger.exception("Request %s could not be started", delivery.request_id)
            self._write_failure(writer, EngineError(f"{type(error).__name__}: {error}"))
        else:
            if self._stopping:
                run.stop("hand_back")
            left_s = None if request.timeout_s is None else request.timeout_s - claim.age_s
            run.wait(None if left_s is None else max(0.0, left_s))
            handed_back = run.handed_back
        if handed_back or writer.lost:
            self._release(delivery.request_id)
            return False
        active.handed_back = False
        return writer.fenced

    def _claim(self, delivery: Delivery) -> claims.Claim:
        owner = f"{self._settings.worker_id}:{uuid.uuid4().hex}"
        give_up_at = time.monotonic() + _CLAIM_RETRY_S
        while True:
            try:
                return claims.claim(
                    self._client,
                    delivery.request_id,
                    owner=owner,
                    worker_id=self._settings.worker_id,
                    redelivered=delivery.redelivered,
                    max_attempts=self._settings.max_attempts,
                )
            except REDIS_ERRORS as error:
                if self._stopping or time.monotonic() >= give_up_at:
                    raise HandBack(delivery.request_id) from error
                time.sleep(0.2)

    def _check(self, claim: claims.Claim) -> None:
        if claim.verdict == "cancelled":
            raise RequestCancelledError(f"Request {claim.request_id} was cancelled in the queue.")
        if claim.verdict == "expired":
            raise WorkerUnavailableError(
                f"Request {claim.request_id} waited {claim.age_s:.1f} s, longer than its "
                "queue deadline, before a worker was free."
            )
        if claim.verdict == "exhausted":
            raise AttemptsExhaustedError(
                f"Request {claim.request_id} took its worker down "
                f"{self._settings.max_attempts} times."
            )

    def _parse(self, delivery: Delivery) -> GenerationRequest:
        request = GenerationRequest.from_json(delivery.body)
        if request.request_id != delivery.request_id:
            raise MalformedMessageError(
                f"Task {delivery.request_id} carries request_id={request.request_id!r}."
            )
        if request.model != self._settings.engine.model:
            raise MalformedMessageError(
                f"Task {delivery.request_id} asks for model {request.model!r} on the queue of "
                f"{self._settings.engine.model!r}."
            )
        return request

    def _writer(self, claim: claims.Claim, on_fenced: Callable[[], None]) -> StreamWriter:
        return StreamWriter(
            request_id=claim.request_id,
            attempt=claim.attempt,
            max_len=self._service.info().context_length + _SPARE_ENTRIES,
            on_fenced=on_fenced,
        )

    def _write_failure(self, writer: StreamWriter, error: SSDError) -> None:
        event = FailedEvent(request_id=writer.request_id, error=ErrorInfo.from_error(error))
        self._publisher.put(writer, event)
        writer.settled.wait()

    def _release(self, request_id: str) -> None:
        try:
            claims.release(self._client, request_id)
        except REDIS_ERRORS as error:
            logger.warning("Attempt of %s counts as a crash: %s", request_id, error)

    def _outlive_successor(self, request_id: str) -> None:
        # Both deliveries carry the same tag: acknowledging this one would take the lease away
        # from the attempt that runs now, and its worker's death would lose the request.
        self._release(request_id)
        while not self._stopping:
            try:
                if claims.is_done(self._client, request_id):
                    return
            except REDIS_ERRORS as error:
                logger.warning("Waiting for the later attempt of %s: %s", request_id, error)
            time.sleep(_SUCCESSOR_POLL_S)

    def hand_back_all(self) -> None:
        """Stop every run at its next step boundary and put its message back."""
        with self._changed:
            self._stopping = True
            runs = [active.run for active in self._active.values() if active.run is not None]
        for run in runs:
            run.stop("hand_back")
        self._publisher.give_up_after(_LAST_ENTRIES_S)
