"""Fixtures that start brokers and workers; a folder's conftest imports what it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ssd_integrations.backends.celery import CeleryBackend
from ssd_workers.embedded import EmbeddedValkey
from tests.tiny import make_tiny_model
from tests.worker_support import Worker

StartWorker = Callable[..., Worker]


@pytest.fixture(scope="session")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model slow enough to be interrupted: after PROMPT it writes 1,500 tokens and more."""
    path = tmp_path_factory.mktemp("models") / "long"
    return make_tiny_model(path, seed=5, num_hidden_layers=8, max_position_embeddings=16_384)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[EmbeddedValkey]:
    """A Valkey of the test's own."""
    with EmbeddedValkey(data_dir=tmp_path / "broker") as server:
        yield server


@pytest.fixture
def start_worker(broker: EmbeddedValkey, long_model: Path, tmp_path: Path) -> Iterator[StartWorker]:
    """Start workers of ``long_model`` on ``broker``; they are stopped after the test."""
    started: list[Worker] = []

    def start(**options: float | bool) -> Worker:
        log = tmp_path / f"worker-{len(started)}.log"
        worker = Worker(broker.url, long_model, log, **options)  # type: ignore[arg-type]
        started.append(worker)
        worker.wait_ready()
        return worker

    yield start
    for worker in started:
        worker.process.kill()
        worker.process.wait()


@pytest.fixture
def backend(broker: EmbeddedValkey) -> Iterator[CeleryBackend]:
    """A backend on ``broker``."""
    with_broker = CeleryBackend(broker.url)
    yield with_broker
    with_broker.close()


@pytest.fixture(scope="session")
def shared_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedValkey]:
    """A Valkey that tests which break nothing share."""
    with EmbeddedValkey(data_dir=tmp_path_factory.mktemp("broker")) as server:
        yield server


@pytest.fixture(scope="session")
def shared_worker(
    shared_broker: EmbeddedValkey, long_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Worker]:
    """A worker that tests which break nothing share."""
    log = tmp_path_factory.mktemp("log") / "worker.log"
    with Worker(shared_broker.url, long_model, log, max_num_seqs=4) as worker:
        yield worker


@pytest.fixture
def shared_backend(shared_broker: EmbeddedValkey, shared_worker: Worker) -> Iterator[CeleryBackend]:
    """A backend that reaches ``shared_worker``."""
    with_broker = CeleryBackend(shared_broker.url)
    yield with_broker
    with_broker.close()
