"""Real brokers and real workers for tests: started as users start them, stopped for certain."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import redis

from ssd_integrations.backends.celery import CeleryBackend
from ssd_integrations.backends.wire import WorkerRecord
from ssd_integrations.protocol import GenerationRequest, build_request, build_sampling
from ssd_workers.settings import build_worker_settings
from tests.conftest import SSD, ssd_environment

PROMPT = "The router restarts when"

#: More tokens than an interrupted answer of the `long_model` gets to.
LONG = 1500

#: Loading torch and a tiny model, on a machine that is busy with other things.
START_TIMEOUT_S = 90.0


def wait_until(condition: Callable[[], object], timeout_s: float, what: str) -> None:
    """Poll ``condition`` until it holds; fail with ``what`` after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.02)


def request(model: Path, max_tokens: int = 24, **fields: object) -> GenerationRequest:
    """A raw-prompt request for a tiny model."""
    sampling = fields.pop("sampling", None) or build_sampling(max_tokens=max_tokens)
    defaults: dict[str, object] = {"prompt": PROMPT, "sampling": sampling}
    return build_request(model=str(model), **{**defaults, **fields})


class Worker:
    """A worker of ``model`` in a process of its own.

    ``supervised`` runs ``ssd worker``; otherwise only the process that holds the model, which
    a test may kill.
    """

    def __init__(
        self, broker_url: str, model: Path, log: Path, *, supervised: bool = False, **options: float
    ) -> None:
        engine = {"model": str(model), "dtype": "float32", "num_threads": 1}
        engine["max_num_seqs"] = int(options.pop("max_num_seqs", 2))
        self.settings = build_worker_settings(broker_url=broker_url, engine=engine, **options)
        self.log = log
        self._backend = CeleryBackend(broker_url)
        self._known = {worker.worker_id for worker in self._backend.workers()}
        command = [sys.executable, "-m", "ssd_workers.process"]
        environment = self.settings.to_environment()
        if supervised:
            command = [*SSD, "worker", *self._arguments()]
            environment = {"SSD_BROKER_URL": broker_url}
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                command, env=ssd_environment(**environment), stdout=output, stderr=output
            )

    def wait_ready(self) -> WorkerRecord:
        """Wait until the worker has announced itself."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            for worker in self._backend.workers():
                if worker.worker_id not in self._known:
                    return worker
            assert self.process.poll() is None, f"worker ended: {self.log.read_text()}"
            assert time.monotonic() < deadline, f"worker not ready: {self.log.read_text()}"
            time.sleep(0.1)

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = 60.0) -> int:
        """Send a signal, wait for the end and return the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise

    def __enter__(self) -> Worker:
        self.wait_ready()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._backend.close()

    def _arguments(self) -> list[str]:
        settings, engine = self.settings, self.settings.engine
        return [
            *("--model", engine.model),
            *("--dtype", engine.dtype),
            *("--max-num-seqs", str(engine.max_num_seqs)),
            *("--num-threads", "1"),
            *("--visibility-timeout-s", str(settings.visibility_timeout_s)),
            *("--grace-s", str(settings.grace_s)),
        ]


def children_of(pid: int) -> list[int]:
    """Process ids of the direct children of ``pid``."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(part) for part in text.split()]


def is_alive(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return state != "Z"


def client(broker_url: str) -> redis.Redis:
    """A plain Redis client of the test."""
    return redis.Redis.from_url(broker_url, socket_timeout=10)
