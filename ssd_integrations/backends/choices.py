"""Several answers to one request, and reading a request's events to their end."""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
import uuid
from collections.abc import AsyncGenerator, Generator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import aclosing, closing

from ssd_integrations.backends.base import Backend
from ssd_integrations.errors import BrokerUnavailableError, EngineError, InvalidRequestError
from ssd_integrations.protocol import Event, GenerationRequest, is_terminal

MAX_CHOICES = 16
# Between two attempts to cancel a request that its thread may not have sent yet.
_CANCEL_AGAIN_S = 0.05


def check_choices(n: object) -> int:
    """``n`` as a number of answers.

    Raises:
      InvalidRequestError: it is not a whole number from 1 to ``MAX_CHOICES``.
    """
    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= MAX_CHOICES:
        raise InvalidRequestError(
            f"n={n!r} is not a whole number from 1 to {MAX_CHOICES}.",
            remedy="Ask for that many answers at most; for more, ask again with another seed.",
        )
    return n


def choices(request: GenerationRequest, n: int) -> list[GenerationRequest]:
    """``n`` requests for as many answers to ``request``; the first is ``request`` itself.

    The others have ids of their own and seeds that follow from the request's seed and their
    place, so that a seed gives the same ``n`` texts each time. Without a seed all are fresh draws.

    Raises:
      InvalidRequestError: ``n`` is out of bounds.
    """
    return [request, *(_choice(request, index) for index in range(1, check_choices(n)))]


def _choice(request: GenerationRequest, index: int) -> GenerationRequest:
    changes: dict[str, object] = {"request_id": uuid.uuid4().hex}
    seed = request.sampling.seed
    if seed is not None:
        digest = hashlib.sha256(f"{seed}:{index}".encode()).digest()
        derived = int.from_bytes(digest[:8], "big") >> 1  # seeds have 63 bits
        changes["sampling"] = request.sampling.model_copy(update={"seed": derived})
    return request.model_copy(update=changes)


def read(backend: Backend, request: GenerationRequest) -> Generator[Event]:
    """The events of ``request``; closing the generator cancels the request.

    Raises:
      EngineError: the stream ended before the answer did.
      SSDError: as the backend does.
    """
    stream = backend.generate(request)
    finished = False
    try:
        for event in stream:
            finished = is_terminal(event)
            yield event
    finally:
        if isinstance(stream, Generator):
            stream.close()
    if not finished:
        raise _unfinished(request)


async def aread(backend: Backend, request: GenerationRequest) -> AsyncGenerator[Event]:
    """:func:`read` for an event loop."""
    stream = backend.agenerate(request)
    finished = False
    try:
        async for event in stream:
            finished = is_terminal(event)
            yield event
    finally:
        if isinstance(stream, AsyncGenerator):
            await stream.aclose()
    if not finished:
        raise _unfinished(request)


def read_all(backend: Backend, requests: Sequence[GenerationRequest]) -> list[list[Event]]:
    """The events of each of ``requests``, which run at the same time.

    When one fails, or the caller is interrupted, all others are cancelled before this returns.

    Raises:
      SSDError: of the request that failed first.
    """
    if len(requests) == 1:
        return [list(read(backend, requests[0]))]
    leaving = threading.Event()
    live: set[str] = set()

    def collect(request: GenerationRequest) -> list[Event]:
        events: list[Event] = []
        live.add(request.request_id)
        try:
            # Noted first, then looked: whoever leaves sees this request, or is seen here.
            if leaving.is_set():
                return events
            with closing(read(backend, request)) as stream:
                for event in stream:
                    events.append(event)
                    if leaving.is_set():
                        break
        finally:
            live.discard(request.request_id)
        return events

    with ThreadPoolExecutor(len(requests), thread_name_prefix="ssd-choice") as pool:
        # An interrupt may come at any point, also while the threads are being started.
        try:
            futures = [pool.submit(collect, request) for request in requests]
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
        finally:
            leaving.set()
            pool.shutdown(wait=False, cancel_futures=True)
            _cancel(backend, live)
    return [future.result() for future in futures]


def _cancel(backend: Backend, live: set[str]) -> None:
    """Cancel what still runs and wait until its threads have seen it."""
    while live:
        # Again and again: a request that is on its way is not known to the backend yet.
        for request_id in list(live):
            try:
                backend.cancel(request_id)
            except BrokerUnavailableError:
                break  # The threads lose the broker too, and end by themselves.
        time.sleep(_CANCEL_AGAIN_S)


async def aread_all(backend: Backend, requests: Sequence[GenerationRequest]) -> list[list[Event]]:
    """:func:`read_all` for an event loop; cancelling the task cancels all requests."""

    async def collect(request: GenerationRequest) -> list[Event]:
        async with aclosing(aread(backend, request)) as stream:
            return [event async for event in stream]

    tasks = [asyncio.ensure_future(collect(request)) for request in requests]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _unfinished(request: GenerationRequest) -> EngineError:
    return EngineError(f"The stream of request {request.request_id} ended before its answer did.")
