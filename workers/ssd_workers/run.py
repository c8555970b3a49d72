"""One attempt at one request inside a worker: engine events in, stream entries out."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Literal

from ssd_integrations.errors import DeadlineExceededError
from ssd_integrations.protocol import (
    ErrorInfo,
    Event,
    FailedEvent,
    FinishedEvent,
    GenerationRequest,
    is_terminal,
)
from ssd_workers.streams import StreamPublisher, StreamWriter

#: Why the worker itself stops a run: its time is up, the worker shuts down and gives the
#: request back to the queue, or a later attempt has taken over.
StopReason = Literal["deadline", "hand_back", "fenced"]


class Run:
    """Relays the engine's events of one attempt and decides what its last entry says.

    Parameters:
      request: what runs.
      publisher, writer: where the events go.
      cancel: stops the engine's work on the request at the next step boundary.
    """

    def __init__(
        self,
        request: GenerationRequest,
        publisher: StreamPublisher,
        writer: StreamWriter,
        cancel: Callable[[], object],
    ) -> None:
        self._request = request
        self._publisher = publisher
        self._writer = writer
        self._cancel = cancel
        self._lock = threading.Lock()
        self._reason: StopReason | None = None
        self._ended = threading.Event()
        self.handed_back = False

    def on_event(self, event: Event) -> None:
        """Take one event on the engine's thread; never blocks on Redis."""
        if not is_terminal(event):
            self._publisher.put(self._writer, event)
            return
        last = self._last_entry(event)
        if last is None:
            self.handed_back = self._reason == "hand_back"
            self._writer.settled.set()
        else:
            self._publisher.put(self._writer, last)
        self._ended.set()

    def stop(self, reason: StopReason) -> None:
        """Stop at the next step boundary; the first reason counts."""
        with self._lock:
            if self._reason is None:
                self._reason = reason
        self._cancel()

    def wait(self, time_left_s: float | None) -> None:
        """Wait until the last entry is on Redis, and stop the run when its time is up."""
        if not self._ended.wait(time_left_s):
            self.stop("deadline")
            self._ended.wait()
        self._writer.settled.wait()

    def _last_entry(self, event: Event) -> Event | None:
        stopped = isinstance(event, FinishedEvent) and event.finish_reason == "cancelled"
        if not stopped or self._reason is None:
            return event
        if self._reason == "deadline":
            error = DeadlineExceededError(
                f"Request {self._request.request_id} did not finish within "
                f"{self._request.timeout_s:g} s."
            )
            return FailedEvent(
                request_id=self._request.request_id, error=ErrorInfo.from_error(error)
            )
        return None
