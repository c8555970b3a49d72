"""A broker that answers with errors (full disk, missing replicas), or not at all."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from ssd_integrations.backends.celery import CeleryBackend
from ssd_integrations.errors import BrokerUnavailableError
from ssd_integrations.protocol import FinishedEvent
from ssd_workers.embedded import EmbeddedValkey
from tests.worker_fixtures import StartWorker
from tests.worker_support import client, request, wait_until


def test_writes_refused_for_a_while_are_written_later(
    broker: EmbeddedValkey, backend: CeleryBackend, start_worker: StartWorker, long_model: Path
) -> None:
    start_worker()
    *_, expected = backend.generate(request(long_model, 300))
    events = backend.generate(request(long_model, 300))
    text = [next(events) for _ in range(5)]
    with client(broker.url) as redis:
        # As with a full disk (MISCONF): reads go on, every write is answered with an error.
        redis.config_set("min-replicas-to-write", 1)
        with pytest.raises(BrokerUnavailableError, match=r"refused a command: NOREPLICAS"):
            next(iter(backend.generate(request(long_model))))
        time.sleep(2.5)
        redis.config_set("min-replicas-to-write", 0)
    *_, last = [*text, *events]
    assert isinstance(expected, FinishedEvent)
    assert isinstance(last, FinishedEvent)
    assert last.text == expected.text
    # The worker's heartbeat has survived it: the announcement comes back once it has expired.
    with client(broker.url) as redis:
        redis.delete(*redis.keys("ssd:worker:*"))
    wait_until(lambda: backend.workers(), 10, "the worker announces itself again")


@pytest.mark.slow
def test_a_frozen_broker_is_given_up_in_time(
    broker: EmbeddedValkey, start_worker: StartWorker, long_model: Path
) -> None:
    start_worker()
    assert broker.pid is not None
    backend = CeleryBackend(broker.url, reconnect_timeout_s=4.0)
    events = backend.generate(request(long_model, 2000))
    for _ in range(5):
        next(events)
    os.kill(broker.pid, signal.SIGSTOP)
    try:
        started = time.monotonic()
        with pytest.raises(BrokerUnavailableError, match="cannot be reached"):
            list(events)
        # Two tries of five seconds, and none of a cancellation that cannot arrive.
        assert time.monotonic() - started < 15
    finally:
        os.kill(broker.pid, signal.SIGCONT)
    backend.close()
