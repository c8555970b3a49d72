"""A backend for the length of a command, and one request streamed through it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from typing import cast

from ssd_integrations.backends.base import Backend
from ssd_integrations.cli.progress import LoadingBar
from ssd_integrations.cli.request_options import AnswerOptions
from ssd_integrations.errors import EngineError, SSDError
from ssd_integrations.protocol import DeltaEvent, Event, FinishedEvent, GenerationRequest


@contextmanager
def open_session(options: AnswerOptions, bar: LoadingBar) -> Iterator[Backend]:
    """The backend that ``options`` ask for, closed at the end; ``bar`` shows it loading."""
    from ssd_integrations.backends import open_backend

    # Behind a broker nothing loads here, and the worker has no use for a bar.
    local = {"progress": bar} if options.broker_url is None else {}
    backend = open_backend(
        model=options.model, broker_url=options.broker_url, **local, **options.engine_options()
    )
    try:
        yield backend
    finally:
        backend.close()


def stream(
    backend: Backend,
    request: GenerationRequest,
    on_delta: Callable[[DeltaEvent], None],
    bar: LoadingBar | None = None,
) -> FinishedEvent:
    """Run ``request``, hand every delta to ``on_delta`` and return the end.

    An exception on the way (an interrupt, say) cancels the request; an error also ends the line
    that the text has begun. ``bar`` is closed as soon as the first event shows that the model
    is loaded.
    """
    finished: FinishedEvent | None = None
    written = ""
    with closing(cast(Generator[Event, None, None], backend.generate(request))) as events:
        try:
            for event in events:
                if bar is not None:
                    bar.close()
                if isinstance(event, DeltaEvent):
                    on_delta(event)
                    written = event.text or written
                elif isinstance(event, FinishedEvent):
                    finished = event
        except SSDError:
            if written and not written.endswith("\n"):
                on_delta(DeltaEvent(request_id=request.request_id, text="\n"))
            raise
    if finished is None:
        raise EngineError(f"The stream of request {request.request_id} ended without a result.")
    return finished
