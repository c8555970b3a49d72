"""The Backend protocol: where a request goes, whatever runs it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Protocol, runtime_checkable

from ssd_integrations.protocol import Event, GenerationRequest, ModelInfo


@runtime_checkable
class Backend(Protocol):
    """Runs generation requests. Safe to share between threads and event loops.

    Closing a generator before its end (``break``, ``close()``, ``aclose()``, task cancellation)
    cancels the request.
    """

    def generate(self, request: GenerationRequest) -> Iterator[Event]:
        """Yield started, delta... and finished.

        Raises:
          SSDError: of the class that tells what went wrong; a FailedEvent is never yielded.
        """
        ...

    def agenerate(self, request: GenerationRequest) -> AsyncIterator[Event]:
        """The same without blocking the event loop."""
        ...

    def cancel(self, request_id: str) -> bool:
        """Ask for a stop at the next step boundary; False if the request is not known here."""
        ...

    def models(self) -> list[ModelInfo]:
        """The models that answer through this backend."""
        ...

    def close(self) -> None:
        """Release models, threads and connections. Running requests are cancelled."""
        ...
