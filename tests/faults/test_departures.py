"""Brokers and parents that vanish: no process stays behind, whatever it was doing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ssd_integrations.backends.celery import CeleryBackend
from ssd_workers.embedded import EmbeddedValkey
from ssd_workers.settings import PARENT_VARIABLE, build_worker_settings
from tests.conftest import SSD, ssd_environment
from tests.worker_fixtures import StartWorker
from tests.worker_support import START_TIMEOUT_S, children_of, is_alive, request, wait_until


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


@pytest.mark.slow
def test_kill_9_of_ssd_up_leaves_nothing(tmp_path: Path, long_model: Path) -> None:
    up = subprocess.Popen(
        [
            *SSD, "up", "--json", "--port", "0", "--data-dir", str(tmp_path / "broker"),
            "--model", str(long_model), "--dtype", "float32", "--grace-s", "1",
        ],
        env=ssd_environment(), stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert up.stdout is not None
        url = json.loads(up.stdout.readline())["broker_url"]
        backend = CeleryBackend(url)
        events = backend.generate(request(long_model, 2000))
        for _ in range(10):
            next(events)
        children = children_of(up.pid)
        assert len(children) == 2
        up.kill()
        up.wait()
        wait_until(lambda: not any(map(is_alive, children)), START_TIMEOUT_S, "all have ended")
        backend.close()
    finally:
        up.kill()
        up.wait()
