"""Celery bootstep: the model is in memory before the first message is taken."""

from __future__ import annotations

import logging
import os
import signal
import sys
from types import FrameType
from typing import Any

from celery import bootsteps, signals

from ssd_integrations.cli.progress import LoadingBar
from ssd_integrations.errors import MalformedMessageError, SSDError
from ssd_workers.engine.service import EngineService
from ssd_workers.redis_connection import REDIS_ERRORS
from ssd_workers.runtime import WorkerRuntime
from ssd_workers.settings import EXIT_LOAD_FAILED, WorkerSettings

logger = logging.getLogger(__name__)


class EngineStep(bootsteps.StartStopStep):  # type: ignore[misc]
    """Loads the engine at start; at stop lets requests finish, or hands them back.

    ``app.runtime`` is the :class:`WorkerRuntime` from the start on.
    """

    requires = ("celery.worker.components:Pool",)
    label = "Engine"

    def __init__(self, worker: Any, **options: Any) -> None:
        super().__init__(worker, **options)
        self._runtime: WorkerRuntime | None = None

    def start(self, worker: Any) -> None:
        """Load the model; a failure is one sentence and exit code 78."""
        settings: WorkerSettings = worker.app.ssd_settings
        try:
            with _exit_on_sigterm(), LoadingBar() as progress:
                service = EngineService(settings.engine, progress=progress)
                service.start()
        except SSDError as error:
            print(f"The worker cannot load its model. {error}", file=sys.stderr, flush=True)
            raise SystemExit(EXIT_LOAD_FAILED) from error
        self._runtime = worker.app.runtime = WorkerRuntime(settings, service)
        self._runtime.start()
        signals.worker_ready.connect(self._on_ready, weak=False)
        signals.task_unknown.connect(self._on_unknown_task, weak=False)

    def close(self, worker: Any) -> None:
        """The worker has stopped taking messages: give running requests the grace period."""
        if self._runtime is None:
            return
        # A crash (such as a message that is not even JSON) is no time to be patient: the
        # restarted worker goes on where this one stops.
        crashed = bool(worker.exitcode)
        self._runtime.stop_within(0.0 if crashed else worker.app.ssd_settings.grace_s)

    def stop(self, worker: Any) -> None:
        """Wait for the running requests and release the engine; the pool stops after this."""
        del worker
        if self._runtime is not None:
            self._runtime.close()

    def terminate(self, worker: Any) -> None:
        """A cold shutdown: hand everything back at once."""
        if self._runtime is not None:
            self._runtime.hand_back_all()
        self.stop(worker)

    def _on_ready(self, **_: Any) -> None:
        assert self._runtime is not None
        self._runtime.announce()

    def _on_unknown_task(self, name: str = "", id: str = "", **_: Any) -> None:
        assert self._runtime is not None
        error = MalformedMessageError(f"This worker knows no task {name!r}.")
        try:
            self._runtime.fail(id, error)
        except REDIS_ERRORS as problem:
            logger.warning("The sender of task %s is not told: %s", id, problem)


class _exit_on_sigterm:  # noqa: N801 - reads as a statement
    """Makes SIGTERM end the process while the model loads, when nothing needs draining."""

    def __enter__(self) -> None:
        self._previous = signal.signal(signal.SIGTERM, self._exit)

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, self._previous)

    @staticmethod
    def _exit(number: int, frame: FrameType | None) -> None:
        del number, frame
        # Not SystemExit: a library's loader threads would hold the interpreter back.
        os._exit(0)
