"""The engine in this process: the embedded default, no server needed."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import queue
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

from ssd_integrations.backends.by_options import ByOptions
from ssd_integrations.errors import MissingExtraError, SSDError
from ssd_integrations.protocol import (
    Event,
    FailedEvent,
    GenerationRequest,
    ModelInfo,
    is_terminal,
)

if TYPE_CHECKING:
    from ssd_workers.engine.config import EngineConfig
    from ssd_workers.engine.service import EngineService
    from ssd_workers.progress import Progress


logger = logging.getLogger(__name__)


class LocalBackend:
    """Runs requests on an engine in this process.

    Backends with the same options share one engine. The models load at the first request, not in
    the constructor; options are checked at once.

    Parameters:
      progress: told how far loading is; see :class:`ssd_workers.progress.Progress`.
      options: those of :class:`ssd_workers.engine.config.EngineConfig`.

    Raises:
      InvalidRequestError: an option is unknown or out of bounds.
      MissingExtraError: the ``worker`` extra is not installed.
    """

    def __init__(self, *, progress: Progress | None = None, **options: Any) -> None:
        _require_worker_extra()
        from ssd_workers.engine.config import build_engine_config

        self._config = build_engine_config(**options)
        self._progress = progress

    def generate(self, request: GenerationRequest) -> Iterator[Event]:
        """Yield started, delta... and finished; closing the generator cancels the request."""
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        service = self._service()
        service.submit(request, events.put)
        ended = False
        try:
            while not ended:
                event = events.get()
                ended = is_terminal(event)
                yield _raise_failure(event)
        finally:
            if not ended:
                service.cancel(request.request_id)

    async def agenerate(self, request: GenerationRequest) -> AsyncIterator[Event]:
        """The same on an event loop; loading and tokenising happen on another thread."""
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Event] = asyncio.Queue()

        def on_event(event: Event) -> None:
            try:
                loop.call_soon_threadsafe(events.put_nowait, event)
            except RuntimeError:  # the loop was closed: nobody waits any more
                service.cancel(request.request_id)

        abandoned = threading.Event()

        def submit() -> None:
            service.submit(request, on_event)
            # The task may have been cancelled in the meantime, before there was a request.
            if abandoned.is_set():
                service.cancel(request.request_id)

        service = await asyncio.to_thread(self._service)
        ended = False
        try:
            await asyncio.to_thread(submit)
            while not ended:
                event = await events.get()
                ended = is_terminal(event)
                yield _raise_failure(event)
        finally:
            if not ended:
                abandoned.set()
                service.cancel(request.request_id)

    def cancel(self, request_id: str) -> bool:
        """Ask for a stop at the next step boundary; False if the request is not known here."""
        service = _engines.running(self._config)
        return service is not None and service.cancel(request_id)

    def models(self) -> list[ModelInfo]:
        """The model of this backend; loads it if needed."""
        return [self._service().info()]

    def count_tokens(self, request: GenerationRequest) -> int:
        """How many tokens the prompt of ``request`` has; loads the model if needed."""
        return self._service().count_tokens(request)

    def use_drafters(self, name: str, *, fresh: bool = False) -> None:
        """Let requests from now on use a set of drafters of their own, called ``name``.

        Suffix drafts learn from finished answers. What one set has learnt, no other knows, so
        that measurements do not help each other. ``fresh`` begins with nothing learnt. Backends
        that share an engine share its choice. Loads the model if needed.
        """
        self._service().use_drafters(name, fresh=fresh)

    def close(self) -> None:
        """Stop the engine that backends with these options share, and free its models.

        A later request loads them again.
        """
        _engines.close(self._config)

    def _service(self) -> EngineService:
        return _engines.get(self._config, lambda: _start_engine(self._config, self._progress))


def _raise_failure(event: Event) -> Event:
    if isinstance(event, FailedEvent):
        raise event.error.to_error()
    return event


def _require_worker_extra() -> None:
    from importlib.util import find_spec

    if find_spec("torch") is None or find_spec("transformers") is None:
        raise MissingExtraError(
            "Running a model in this process needs packages that are not installed.",
            remedy="Run: pip install 'ssd-integrations[worker]'. Or send requests to workers "
            "elsewhere: broker_url= (of the command: --broker-url).",
        )


class _Engines(ByOptions["EngineConfig", "EngineService"]):
    """The engines of this process, one for each set of options."""

    forked = False

    def running(self, config: EngineConfig) -> EngineService | None:
        """The engine for ``config`` if it is loaded."""
        return self.find(config)

    def close(self, config: EngineConfig) -> None:
        """Close the engine for ``config``, if there is one."""
        service = self.take(config)
        if service is not None:
            service.close()

    def close_all(self) -> None:
        """Close every engine."""
        for service in self.take_all():
            service.close()

    def after_fork(self) -> None:
        """Start anew in a forked child, whose engine threads stayed in the parent."""
        self.forked = "torch" in sys.modules
        self.forget()


def _start_engine(config: EngineConfig, progress: Progress | None) -> EngineService:
    from ssd_workers.engine.service import EngineService
    from ssd_workers.progress import no_progress

    if _engines.forked and config.num_threads != 1:
        # OpenMP's threads stayed in the parent: the first loop to want one would wait for ever.
        logger.warning(
            "This process was forked from one that had loaded torch, so its engine uses one "
            "thread. Start processes by 'spawn', or load models only after the fork, to use more."
        )
        config = config.model_copy(update={"num_threads": 1})
    service = EngineService(config, progress=progress or no_progress)
    try:
        service.start()
    except SSDError:
        service.close()
        raise
    return service


_engines = _Engines()
atexit.register(_engines.close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_engines.after_fork)
