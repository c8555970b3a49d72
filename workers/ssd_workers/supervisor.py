"""Keeps one worker process running: starts it, waits for it, starts it again after a crash."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType

import redis

from ssd_integrations.backends.wire import unreachable, worker_key
from ssd_workers.lifetime import stop_process
from ssd_workers.settings import (
    EXIT_BAD_SETTINGS,
    EXIT_LOAD_FAILED,
    PARENT_VARIABLE,
    WorkerSettings,
)

logger = logging.getLogger(__name__)

_POLL_S = 0.2
#: Beyond the grace period: one decoding step, the last acknowledgements, freeing the model.
_STOP_MARGIN_S = 15.0
_BACKOFF_S = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
_HEALTHY_AFTER_S = 60.0

#: Exit codes that a restart would only repeat: wrong settings, a model that cannot be loaded.
_FINAL_CODES = (EXIT_BAD_SETTINGS, EXIT_LOAD_FAILED)


class Supervisor:
    """Runs ``python -m ssd_workers.process`` with ``settings`` and restarts it when it dies.

    A message that is not even JSON ends a Celery worker, and so does running out of memory;
    the requests it had taken go to the next process.

    Parameters:
      settings: passed to the process through its environment, never as arguments.
      on_ready: called once, with the process id, when the first process takes requests.
      on_poll: called several times a second; what it raises stops the worker.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        on_ready: Callable[[int], None] | None = None,
        on_poll: Callable[[], None] = lambda: None,
    ) -> None:
        self._settings = settings
        self._on_ready = on_ready
        self._on_poll = on_poll
        self._stopping = False
        self._process: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        """Supervise until SIGTERM or SIGINT, or until a restart makes no sense.

        Call it from the main thread.

        Returns:
          0 after an orderly stop, else the exit code of the last process.

        Raises:
          BrokerUnavailableError: the broker is away at the start.
        """
        self._check_broker()
        with _on_stop_signals(self._stop):
            failures = 0
            while True:
                started = time.monotonic()
                code = self._run_once()
                if self._stopping or code == 0 or code in _FINAL_CODES:
                    return 0 if self._stopping and code <= 0 else code
                if time.monotonic() - started > _HEALTHY_AFTER_S:
                    failures = 0
                pause_s = _BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)]
                failures += 1
                logger.warning("The worker ended with %d; next start in %g s.", code, pause_s)
                self._pause(pause_s)
                if self._stopping:
                    return 0

    def _run_once(self) -> int:
        process = self._process = subprocess.Popen(
            [sys.executable, "-m", "ssd_workers.process"],
            env={
                **os.environ,
                **self._settings.to_environment(),
                PARENT_VARIABLE: str(os.getpid()),
            },
            stdin=subprocess.DEVNULL,
            # Ctrl-C in a terminal reaches this process only, which then asks politely.
            start_new_session=True,
        )
        try:
            while process.poll() is None and not self._stopping:
                self._on_poll()
                self._report_ready(process)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_POLL_S)
        finally:
            code = stop_process(process, self._settings.grace_s + _STOP_MARGIN_S)
        return code

    def _report_ready(self, process: subprocess.Popen[bytes]) -> None:
        if self._on_ready is None:
            return
        with contextlib.suppress(redis.RedisError), self._client() as client:
            if client.exists(worker_key(self._settings.worker_id)):
                ready, self._on_ready = self._on_ready, None
                ready(process.pid)

    def _check_broker(self) -> None:
        try:
            with self._client() as client:
                client.ping()
        except (redis.RedisError, OSError) as error:
            raise unreachable(self._settings.broker_url, error) from error

    def _client(self) -> redis.Redis:
        return redis.Redis.from_url(
            self._settings.broker_url, socket_timeout=3.0, socket_connect_timeout=3.0
        )

    def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self._stopping and time.monotonic() < end:
            self._on_poll()
            time.sleep(_POLL_S)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        if self._stopping and self._process is not None:
            # Asked twice: no more patience. What runs is redelivered.
            self._process.kill()
        self._stopping = True


@contextlib.contextmanager
def _on_stop_signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    previous = {
        number: signal.signal(number, handler) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, old in previous.items():
            signal.signal(number, old)
