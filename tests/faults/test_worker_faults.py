"""Workers that are killed, stopped, frozen or fed garbage: no request is lost or done twice."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from ssd_integrations.backends.celery import CeleryBackend
from ssd_integrations.backends.wire import TASK_NAME, queue_name, state_key, stream_key
from ssd_integrations.errors import (
    AttemptsExhaustedError,
    MalformedMessageError,
    WorkerUnavailableError,
)
from ssd_integrations.protocol import DeltaEvent, Event, FinishedEvent, GenerationRequest
from ssd_workers.embedded import EmbeddedValkey
from tests.worker_fixtures import StartWorker
from tests.worker_support import Worker, client, is_alive, request, wait_until

TOKENS = 400
VISIBILITY_S = 2.0


class Reader(threading.Thread):
    """Reads one request in a thread and keeps its events."""

    def __init__(self, backend: CeleryBackend, sent: GenerationRequest) -> None:
        super().__init__(daemon=True)
        self._backend = backend
        self._request = sent
        self.events: list[Event] = []
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            for event in self._backend.generate(self._request):
                self.events.append(event)
        except Exception as error:  # noqa: BLE001 - handed to the test by finish()
            self.error = error

    def wait_for_text(self) -> None:
        wait_until(lambda: len(self.events) > 10 or self.error, 30, "text arrives")
        assert self.error is None

    def finish(self, timeout_s: float = 60) -> FinishedEvent:
        self.join(timeout_s)
        assert not self.is_alive(), "the reader is still waiting"
        if self.error is not None:
            raise self.error
        last = self.events[-1]
        assert isinstance(last, FinishedEvent)
        deltas = [event for event in self.events if isinstance(event, DeltaEvent)]
        assert "".join(event.text for event in deltas) == last.text
        assert sum(len(event.token_ids) for event in deltas) == last.usage.completion_tokens
        return last


def attempts(broker: EmbeddedValkey, request_id: str) -> int:
    with client(broker.url) as redis:
        return int(redis.hget(state_key(request_id), "attempt") or 0)


def owner(broker: EmbeddedValkey, request_id: str) -> str:
    with client(broker.url) as redis:
        (_, fields) = redis.xrange(stream_key(request_id), count=1)[0]
    return str(fields[b"taken"].decode())


def queue_is_clean(broker: EmbeddedValkey) -> bool:
    with client(broker.url) as redis:
        return not redis.hlen("ssd:unacked") and not redis.zcard("ssd:unacked_index")


def push(broker: EmbeddedValkey, model: Path, message: bytes) -> None:
    with client(broker.url) as redis:
        redis.lpush(f"ssd:{queue_name(str(model), 'interactive')}", message)


def test_kill_9_mid_decode_gives_the_same_text_once(
    broker: EmbeddedValkey, backend: CeleryBackend, start_worker: StartWorker, long_model: Path
) -> None:
    workers = [start_worker(visibility_timeout_s=VISIBILITY_S) for _ in range(2)]
    expected = list(backend.generate(request(long_model, TOKENS)))[-1]
    sent = request(long_model, TOKENS)
    reader = Reader(backend, sent)
    reader.wait_for_text()
    (killed,) = [w for w in workers if w.settings.worker_id == owner(broker, sent.request_id)]
    killed.process.send_signal(signal.SIGKILL)
    wait_until(lambda: attempts(broker, sent.request_id) == 2, VISIBILITY_S + 3, "redelivery")
    last = reader.finish()
    assert isinstance(expected, FinishedEvent)
    assert last.text == expected.text
    wait_until(lambda: queue_is_clean(broker), 10, "everything is acknowledged")
    assert attempts(broker, sent.request_id) == 2


def test_sigterm_lets_running_requests_finish_and_keeps_the_queue(
    broker: EmbeddedValkey, backend: CeleryBackend, start_worker: StartWorker, long_model: Path
) -> None:
    worker = start_worker(grace_s=60.0, max_num_seqs=1)
    running = Reader(backend, request(long_model, TOKENS))
    running.wait_for_text()
    worker.process.send_signal(signal.SIGTERM)
    wait_until(lambda: not backend.workers(), 5, "the worker takes its announcement back")
    late = backend.submit(request(long_model))
    assert running.finish().usage.completion_tokens == TOKENS
    assert worker.process.wait(20) == 0
    assert attempts(broker, late) == 0
    assert queue_is_clean(broker)
    with client(broker.url) as redis:
        assert redis.llen(f"ssd:{queue_name(str(long_model), 'batch')}") == 1


def test_garbage_on_the_queue_does_not_stop_the_worker(
    broker: EmbeddedValkey, backend: CeleryBackend, start_worker: StartWorker, long_model: Path
) -> None:
    worker = start_worker()
    running = Reader(backend, request(long_model, TOKENS))
    running.wait_for_text()
    garbage = [b"not json", b"\xff\xfe", b"[]", b"3", b'{"body": 1}', b"null", b'"text"', b"{}"]
    for message in garbage:
        push(broker, long_model, message)
    envelope = {
        "body": "e30=",
        "content-encoding": "utf-8",
        "content-type": "application/x-python-serialize",
        "headers": {"task": TASK_NAME, "id": "stranger"},
        "properties": {
            "delivery_tag": "stranger",
            "delivery_info": {"exchange": "", "routing_key": "x"},
            "body_encoding": "base64",
        },
    }
    push(broker, long_model, json.dumps(envelope).encode())
    push(broker, long_model, json.dumps({**envelope, "headers": {}}).encode())
    started = time.monotonic()
    assert list(backend.generate(request(long_model)))[-1].type == "finished"
    assert time.monotonic() - started < 5.0
    assert running.finish().usage.completion_tokens == TOKENS
    assert attempts(broker, running.events[0].request_id) == 1
    assert worker.process.poll() is None
    wait_until(lambda: queue_is_clean(broker), 10, "nothing is left unacknowledged")


def test_wrong_messages_are_typed_errors_for_their_sender(
    broker: EmbeddedValkey, backend: CeleryBackend, start_worker: StartWorker, long_model: Path
) -> None:
    from celery import Celery

    start_worker()
    sender = Celery("stranger", broker=broker.url, set_as_current=False)
    sender.conf.broker_transport_options = {"global_keyprefix": "ssd:"}
    queue = queue_name(str(long_model), "interactive")
    newer = {**json.loads(request(long_model).to_json()), "version": 2, "request_id": "newer"}
    sender.send_task(TASK_NAME, args=[json.dumps(newer)], task_id="newer", queue=queue)
    sender.send_task("ssd.unheard_of", args=[], task_id="unknown", queue=queue)
    sender.send_task(TASK_NAME, args=["{}"], task_id="empty", queue=queue)
    sender.send_task(TASK_NAME, args=[], task_id="bare", queue=queue)
    other = request(Path("another-model"), request_id="astray")
    sender.send_task(TASK_NAME, args=[other.to_json()], task_id="astray", queue=queue)
    with client(broker.url) as redis:
        for name in ("newer", "unknown", "empty", "bare", "astray"):
            wait_until(lambda name=name: redis.xlen(stream_key(name)) > 1, 10, f"{name} ends")
            entries = redis.xrange(stream_key(name))
            event = json.loads(entries[-1][1][b"event"])
            assert event["type"] == "failed"
            assert event["error"]["code"] == MalformedMessageError.code, name
    assert list(backend.generate(request(long_model)))[-1].type == "finished"
    sender.close()


def test_a_request_that_takes_its_workers_down_is_given_up(
    broker: EmbeddedValkey, backend: CeleryBackend, start_worker: StartWorker, long_model: Path
) -> None:
    job = backend.submit(request(long_model))
    with client(broker.url) as redis:
        # What three crashes leave behind; the message comes back as redelivered.
        redis.hset(state_key(job), mapping={"attempt": 3, "owner": "dead"})
        key = f"ssd:{queue_name(str(long_model), 'batch')}"
        message = json.loads(redis.rpop(key))
        message["properties"]["delivery_info"]["redelivered"] = True
        redis.lpush(key, json.dumps(message))
    # A deadline that passes in the queue counts for the first attempt only.
    patient = backend.submit(request(long_model, queue_timeout_s=0.2))
    expired = backend.submit(request(long_model, queue_timeout_s=0.2))
    with client(broker.url) as redis:
        redis.hset(state_key(patient), mapping={"attempt": 1, "owner": "dead"})
        for _ in range(2):
            message = json.loads(redis.rpop(key))
            if message["headers"]["id"] == job:
                redis.lpush(key, json.dumps(message))
                message = json.loads(redis.rpop(key))
            message["properties"]["delivery_info"]["redelivered"] = True
            redis.lpush(key, json.dumps(message))
    start_worker()
    with pytest.raises(AttemptsExhaustedError, match="3 times"):
        backend.result(job, timeout=10)
    assert backend.result(patient, timeout=10).finish_reason == "length"
    with pytest.raises(WorkerUnavailableError, match="queue deadline"):
        backend.result(expired, timeout=10)


@pytest.mark.slow
def test_beyond_the_grace_period_requests_go_back_to_the_queue(
    broker: EmbeddedValkey, backend: CeleryBackend, start_worker: StartWorker, long_model: Path
) -> None:
    worker = start_worker(grace_s=0.5)
    sent = request(long_model, 600)
    reader = Reader(backend, sent)
    reader.wait_for_text()
    stopped = time.monotonic()
    assert worker.stop() == 0
    assert time.monotonic() - stopped < 5.0
    assert len(reader.events) < 600
    log = worker.log.read_text()
    assert f"Request {sent.request_id} goes back to the queue." in log
    assert "Traceback" not in log
    start_worker()
    assert reader.finish().usage.completion_tokens == 600
    assert attempts(broker, sent.request_id) == 2
    with client(broker.url) as redis:
        assert redis.hget(state_key(sent.request_id), "released") == b"1"


@pytest.mark.slow
def test_a_request_longer_than_the_visibility_timeout_starts_once(
    broker: EmbeddedValkey, backend: CeleryBackend, start_worker: StartWorker, long_model: Path
) -> None:
    for _ in range(2):
        start_worker(visibility_timeout_s=1.0)
    sent = request(long_model, 1500)
    started = time.monotonic()
    last = list(backend.generate(sent))[-1]
    assert isinstance(last, FinishedEvent)
    assert time.monotonic() - started > 4.0
    assert attempts(broker, sent.request_id) == 1


@pytest.mark.slow
def test_a_frozen_worker_that_wakes_up_is_fenced(
    broker: EmbeddedValkey, backend: CeleryBackend, start_worker: StartWorker, long_model: Path
) -> None:
    frozen = start_worker(visibility_timeout_s=VISIBILITY_S)
    expected = list(backend.generate(request(long_model, TOKENS)))[-1]
    sent = request(long_model, TOKENS)
    reader = Reader(backend, sent)
    reader.wait_for_text()
    os.kill(frozen.process.pid, signal.SIGSTOP)
    other = start_worker(visibility_timeout_s=VISIBILITY_S)
    wait_until(lambda: attempts(broker, sent.request_id) == 2, 20, "the other worker takes it")
    os.kill(frozen.process.pid, signal.SIGCONT)
    last = reader.finish()
    assert isinstance(expected, FinishedEvent)
    assert last.text == expected.text
    assert attempts(broker, sent.request_id) == 2
    with client(broker.url) as redis:
        numbers = [int(raw.split(b"-")[0]) for raw, _ in redis.xrange(stream_key(sent.request_id))]
    assert numbers == sorted(numbers)
    # The fenced one is healthy: alone, it serves the next request.
    assert other.stop() == 0
    assert list(backend.generate(request(long_model)))[-1].type == "finished"
    wait_until(lambda: queue_is_clean(broker), 10, "everything is acknowledged")


@pytest.mark.slow
def test_a_broker_that_crashes_and_returns_loses_nothing(tmp_path: Path, long_model: Path) -> None:
    first = EmbeddedValkey(data_dir=tmp_path / "broker")
    first.start()
    port = int(first.url.rsplit(":", 1)[1].split("/")[0])
    worker = Worker(first.url, long_model, tmp_path / "worker.log")
    backend = CeleryBackend(first.url)
    try:
        worker.wait_ready()
        readers = [Reader(backend, request(long_model, 600)) for _ in range(2)]
        for reader in readers:
            reader.wait_for_text()
        queued = backend.submit(request(long_model))
        time.sleep(1.2)  # the append-only file is synced every second
        assert first.pid is not None
        os.kill(first.pid, signal.SIGKILL)
        first.stop()
        time.sleep(2.0)
        with EmbeddedValkey(port=port, data_dir=tmp_path / "broker"):
            texts = {reader.finish().text for reader in readers}
            assert len(texts) == 1
            assert backend.result(queued, timeout=20).finish_reason == "length"
            assert worker.stop() == 0
    finally:
        worker.process.kill()
        worker.process.wait()
        first.stop()
        backend.close()


@pytest.mark.slow
def test_interactive_requests_go_before_queued_batch_jobs(
    broker: EmbeddedValkey, backend: CeleryBackend, start_worker: StartWorker, long_model: Path
) -> None:
    jobs = [backend.submit(request(long_model, 200)) for _ in range(8)]
    reader = Reader(backend, request(long_model))
    wait_until(lambda: not reader.events, 1, "it is queued")
    time.sleep(0.5)
    start_worker(max_num_seqs=1)
    reader.finish()
    waiting = [job for job in jobs if attempts(broker, job) == 0]
    assert len(waiting) >= 4
    for job in jobs:
        backend.result(job, timeout=60)


@pytest.mark.slow
def test_a_reader_whose_worker_is_gone_for_good_is_told(
    backend: CeleryBackend, start_worker: StartWorker, long_model: Path
) -> None:
    worker = start_worker()
    reader = Reader(backend, request(long_model, 1500, queue_timeout_s=3.0))
    reader.wait_for_text()
    worker.process.send_signal(signal.SIGKILL)
    with pytest.raises(WorkerUnavailableError, match="is gone, and no other came within 3 s"):
        reader.finish()


@pytest.mark.slow
def test_supervisor_restarts_a_killed_process(
    broker: EmbeddedValkey, backend: CeleryBackend, start_worker: StartWorker, long_model: Path
) -> None:
    supervised = start_worker(supervised=True, visibility_timeout_s=VISIBILITY_S)
    (record,) = backend.workers()
    reader = Reader(backend, request(long_model, TOKENS))
    reader.wait_for_text()
    os.kill(record.pid, signal.SIGKILL)
    assert reader.finish().usage.completion_tokens == TOKENS
    (again,) = backend.workers()
    assert again.pid != record.pid
    assert supervised.stop() == 0
    assert not is_alive(again.pid)
    assert backend.workers() == []
