"""What goes wrong between an application and its workers, each under its own class."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from ssd_integrations.backends.celery import CeleryBackend
from ssd_integrations.errors import (
    BrokerUnavailableError,
    ContextLengthError,
    DeadlineExceededError,
    InvalidRequestError,
    WorkerUnavailableError,
)
from ssd_workers.embedded import EmbeddedValkey
from tests.worker_support import LONG, client, request, wait_until


def test_workers_error_arrives_as_its_class(
    shared_backend: CeleryBackend, long_model: Path
) -> None:
    with pytest.raises(ContextLengthError, match="16384"):
        list(shared_backend.generate(request(long_model, prompt="x " * 20_000)))


def test_total_deadline_stops_reader_and_worker(
    shared_backend: CeleryBackend, long_model: Path
) -> None:
    sent = request(long_model, max_tokens=LONG, timeout_s=1.0)
    started = time.monotonic()
    with pytest.raises(DeadlineExceededError, match="within 1 s"):
        list(shared_backend.generate(sent))
    assert time.monotonic() - started < 3.0
    wait_until(lambda: not shared_backend.cancel(sent.request_id), 5, "the worker ends it too")


def test_request_ids_are_used_once(shared_backend: CeleryBackend, long_model: Path) -> None:
    sent = request(long_model)
    list(shared_backend.generate(sent))
    with pytest.raises(InvalidRequestError, match="already sent"):
        list(shared_backend.generate(sent))


def test_collect_refuses_an_unknown_id(shared_backend: CeleryBackend) -> None:
    with pytest.raises(InvalidRequestError, match="'nothing-here'"):
        list(shared_backend.collect("nothing-here"))


def test_no_worker_is_an_error_at_the_queue_deadline(
    shared_backend: CeleryBackend, long_model: Path
) -> None:
    sent = request(Path("another-model"), queue_timeout_s=0.5)
    started = time.monotonic()
    with pytest.raises(WorkerUnavailableError) as caught:
        list(shared_backend.generate(sent))
    assert 0.4 < time.monotonic() - started < 2.0
    assert "'another-model'" in caught.value.message
    assert "0.5 s" in caught.value.message
    assert str(long_model) in caught.value.message


def test_no_worker_async(shared_backend: CeleryBackend) -> None:
    async def run() -> None:
        async for _ in shared_backend.agenerate(request(Path("x"), queue_timeout_s=0.3)):
            pass

    with pytest.raises(WorkerUnavailableError):
        asyncio.run(run())


def test_broker_away_is_an_error_without_the_password(long_model: Path) -> None:
    backend = CeleryBackend("redis://app:s3cret@127.0.0.1:1/0")
    started = time.monotonic()
    with pytest.raises(BrokerUnavailableError) as caught:
        list(backend.generate(request(long_model)))
    assert time.monotonic() - started < 5.0
    assert "s3cret" not in str(caught.value)
    assert "app:***@127.0.0.1:1" in str(caught.value)

    async def run() -> None:
        async for _ in backend.agenerate(request(long_model)):
            pass

    with pytest.raises(BrokerUnavailableError):
        asyncio.run(run())
    with pytest.raises(BrokerUnavailableError):
        backend.models()


def test_a_user_without_rights_is_told(broker: EmbeddedValkey, long_model: Path) -> None:
    with client(broker.url) as redis:
        redis.execute_command("ACL", "SETUSER", "guest", "on", ">pw", "~other:*", "+@all")
    backend = CeleryBackend(broker.url.replace("redis://", "redis://guest:pw@"))
    with pytest.raises(BrokerUnavailableError, match="refused a command") as caught:
        list(backend.generate(request(long_model)))
    assert "~ssd:*" in caught.value.remedy
    wrong = CeleryBackend(broker.url.replace("redis://", "redis://guest:no@"))
    with pytest.raises(BrokerUnavailableError):
        wrong.models()


def test_an_unknown_host_is_an_error(long_model: Path) -> None:
    with pytest.raises(BrokerUnavailableError, match="no-such-host"):
        list(CeleryBackend("redis://no-such-host.invalid:6379/0").generate(request(long_model)))


@pytest.mark.parametrize("url", ["amqp://host", "localhost:6379", "redis://", ""])
def test_other_urls_are_refused_at_once(url: str) -> None:
    with pytest.raises(InvalidRequestError, match="not a Redis URL"):
        CeleryBackend(url)
