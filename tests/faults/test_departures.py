"""Brokers and parents that vanish: no process stays behind, whatever it was doing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ssd_integrations.backends.celery import CeleryBackend
from ssd_integrations.protocol import FinishedEvent
from ssd_workers.embedded import EmbeddedValkey
from ssd_workers.settings import PARENT_VARIABLE, build_worker_settings
from tests.conftest import SSD, ssd_environment
from tests.worker_fixtures import StartWorker
from tests.worker_support import (
    START_TIMEOUT_S,
    children_of,
    client,
    is_alive,
    request,
    wait_until,
)


def test_a_worker_stops_although_the_broker_is_gone(
    broker: EmbeddedValkey, backend: CeleryBackend, start_worker: StartWorker, long_model: Path
) -> None:
    worker = start_worker(grace_s=1.0)
    events = backend.generate(request(long_model, 2000))
    for _ in range(10):
        next(events)
    assert broker.pid is not None
    os.kill(broker.pid, signal.SIGKILL)
    time.sleep(0.5)
    # Running or already waiting to write its end, the request must not hold the worker back.
    assert worker.stop(timeout_s=30) == 0
    assert "Traceback" not in worker.log.read_text()


def test_a_worker_whose_supervisor_died_while_it_started_ends_at_once(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    settings = build_worker_settings(engine={"model": str(tmp_path)})
    worker = subprocess.run(
        [sys.executable, "-m", "ssd_workers.process"],
        env=ssd_environment(**settings.to_environment(), **{PARENT_VARIABLE: str(gone.pid)}),
        timeout=60,
        check=False,
    )
    assert worker.returncode == 1


@pytest.fixture
def up(tmp_path: Path, long_model: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A running ``ssd up`` and its broker's URL."""
    process = subprocess.Popen(
        [
            *SSD, "up", "--json", "--port", "0", "--data-dir", str(tmp_path / "broker"),
            "--model", str(long_model), "--dtype", "float32", "--grace-s", "1",
        ],
        env=ssd_environment(), stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    yield process, json.loads(process.stdout.readline())["broker_url"]
    process.kill()
    process.wait()


@pytest.mark.slow
def test_kill_9_of_ssd_up_leaves_nothing(
    up: tuple[subprocess.Popen[bytes], str], long_model: Path
) -> None:
    process, url = up
    backend = CeleryBackend(url)
    events = backend.generate(request(long_model, 2000))
    for _ in range(10):
        next(events)
    children = children_of(process.pid)
    assert len(children) == 2
    process.kill()
    process.wait()
    wait_until(lambda: not any(map(is_alive, children)), START_TIMEOUT_S, "all have ended")
    backend.close()


@pytest.mark.slow
def test_ssd_up_starts_a_killed_broker_again(
    up: tuple[subprocess.Popen[bytes], str], long_model: Path
) -> None:
    process, url = up
    backend = CeleryBackend(url)
    *_, expected = backend.generate(request(long_model, 600))
    events = backend.generate(request(long_model, 600))
    first = [next(events) for _ in range(10)]
    time.sleep(1.2)  # the append-only file is synced every second
    with client(url) as redis:
        os.kill(redis.info("server")["process_id"], signal.SIGKILL)
    *_, last = [*first, *events]
    assert isinstance(expected, FinishedEvent)
    assert isinstance(last, FinishedEvent)
    assert last.text == expected.text
    backend.close()
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0
