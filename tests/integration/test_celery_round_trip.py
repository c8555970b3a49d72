"""A real worker behind a real broker: the same events as in this process, and typed errors."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ssd_integrations.backends.celery import CeleryBackend
from ssd_integrations.backends.local import LocalBackend
from ssd_integrations.backends.wire import queue_name, stream_key
from ssd_integrations.errors import (
    BrokerUnavailableError,
    ContextLengthError,
    DeadlineExceededError,
    InvalidRequestError,
    RequestCancelledError,
    WorkerUnavailableError,
)
from ssd_integrations.protocol import (
    DeltaEvent,
    Event,
    FinishedEvent,
    GenerationRequest,
    StartedEvent,
    build_sampling,
)
from ssd_workers.embedded import EmbeddedValkey
from tests.worker_support import Worker, client, request, wait_until

LONG = 1500


@pytest.fixture(scope="module")
def local(long_model: Path) -> Iterator[LocalBackend]:
    backend = LocalBackend(model=str(long_model), dtype="float32", max_num_seqs=2, num_threads=1)
    yield backend
    backend.close()


def text_of(events: list[Event]) -> str:
    """The deltas' text, after checking the shape of the whole sequence."""
    assert isinstance(events[0], StartedEvent)
    assert isinstance(events[-1], FinishedEvent)
    deltas = events[1:-1]
    assert all(isinstance(event, DeltaEvent) for event in deltas)
    text = "".join(event.text for event in deltas if isinstance(event, DeltaEvent))
    assert text == events[-1].text
    return text


@pytest.mark.parametrize(
    "sampling",
    [
        build_sampling(max_tokens=32),
        build_sampling(max_tokens=32, temperature=0.8, seed=5, top_p=0.9),
        build_sampling(max_tokens=64, stop=("e",)),
    ],
    ids=["greedy", "seeded", "stop"],
)
def test_same_text_as_in_process(
    shared_backend: CeleryBackend, local: LocalBackend, long_model: Path, sampling: object
) -> None:
    mine = list(local.generate(request(long_model, sampling=sampling)))
    theirs = list(shared_backend.generate(request(long_model, sampling=sampling)))
    assert text_of(theirs) == text_of(mine)
    first, second = mine[-1], theirs[-1]
    assert isinstance(first, FinishedEvent)
    assert isinstance(second, FinishedEvent)
    assert second.usage == first.usage
    assert second.finish_reason == first.finish_reason
    assert second.stop_sequence == first.stop_sequence


def test_unseeded_sampling_is_a_fresh_draw(shared_backend: CeleryBackend, long_model: Path) -> None:
    sampling = build_sampling(max_tokens=24, temperature=1.5)
    texts = {
        text_of(list(shared_backend.generate(request(long_model, sampling=sampling))))
        for _ in range(3)
    }
    assert len(texts) > 1


def test_async_equals_sync_over_several_event_loops(
    shared_backend: CeleryBackend, long_model: Path
) -> None:
    expected = text_of(list(shared_backend.generate(request(long_model))))

    async def three_at_once() -> list[str]:
        async def one() -> str:
            return text_of([e async for e in shared_backend.agenerate(request(long_model))])

        return await asyncio.gather(one(), one(), one())

    for _ in range(2):
        assert asyncio.run(three_at_once()) == [expected] * 3


def test_many_threads_share_one_backend(shared_backend: CeleryBackend, long_model: Path) -> None:
    expected = text_of(list(shared_backend.generate(request(long_model))))
    texts: list[str] = []

    def one() -> None:
        texts.append(text_of(list(shared_backend.generate(request(long_model)))))

    threads = [threading.Thread(target=one) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == [expected] * 12


def test_a_forked_process_uses_the_same_backend(
    shared_backend: CeleryBackend, long_model: Path
) -> None:
    expected = text_of(list(shared_backend.generate(request(long_model))))
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            text = text_of(list(shared_backend.generate(request(long_model))))
            os.write(write_end, b"same" if text == expected else b"other")
        finally:
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        assert pipe.read() == b"same"
    os.waitpid(pid, 0)
    assert text_of(list(shared_backend.generate(request(long_model)))) == expected


def test_workers_error_arrives_as_its_class(
    shared_backend: CeleryBackend, long_model: Path
) -> None:
    with pytest.raises(ContextLengthError, match="16384"):
        list(shared_backend.generate(request(long_model, prompt="x " * 20_000)))


def test_models_names_what_is_served(shared_backend: CeleryBackend, long_model: Path) -> None:
    (model,) = shared_backend.models()
    assert model.name == str(long_model)
    assert model.context_length == 16_384


def test_closing_the_generator_frees_the_slot(
    shared_backend: CeleryBackend, shared_broker: EmbeddedValkey, long_model: Path
) -> None:
    sent = request(long_model, max_tokens=LONG)
    stream = shared_backend.generate(sent)
    assert isinstance(next(stream), StartedEvent)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    last = shared_backend.result(sent.request_id, timeout=5)
    assert last.finish_reason == "cancelled"
    assert last.usage.completion_tokens < LONG / 2
    with client(shared_broker.url) as redis:
        wait_until(lambda: redis.hlen("ssd:unacked") == 0, 5, "the message is acknowledged")


def test_leaving_an_async_generator_cancels(
    shared_backend: CeleryBackend, long_model: Path
) -> None:
    sent = request(long_model, max_tokens=LONG)

    async def leave_early() -> None:
        stream = shared_backend.agenerate(sent)
        await anext(stream)
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]

    asyncio.run(leave_early())
    assert shared_backend.result(sent.request_id, timeout=5).finish_reason == "cancelled"


def test_cancelling_an_async_task_cancels_the_request(
    shared_backend: CeleryBackend, long_model: Path
) -> None:
    sent = request(long_model, max_tokens=LONG)

    async def run_and_cancel() -> None:
        got_text = asyncio.Event()

        async def read() -> None:
            async for event in shared_backend.agenerate(sent):
                if isinstance(event, DeltaEvent):
                    got_text.set()

        task = asyncio.create_task(read())
        await got_text.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run_and_cancel())
    assert shared_backend.result(sent.request_id, timeout=5).finish_reason == "cancelled"


def test_cancelling_while_the_task_is_being_sent(
    shared_backend: CeleryBackend, long_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message is published after the cancellation, and still nobody decodes for nobody."""
    sent = request(long_model, max_tokens=LONG)
    entered, go_on = threading.Event(), threading.Event()
    original = shared_backend._sender.send

    def slow(req: GenerationRequest) -> None:
        entered.set()
        go_on.wait(10)
        original(req)

    monkeypatch.setattr(shared_backend._sender, "send", slow)

    async def run_and_cancel() -> None:
        async def read() -> None:
            async for _ in shared_backend.agenerate(sent):
                pass

        task = asyncio.create_task(read())
        await asyncio.to_thread(entered.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()

    asyncio.run(run_and_cancel())
    with pytest.raises(RequestCancelledError, match="in the queue"):
        shared_backend.result(sent.request_id, timeout=10)


def test_cancel_knows_running_from_unknown(shared_backend: CeleryBackend, long_model: Path) -> None:
    sent = request(long_model, max_tokens=LONG)
    stream = shared_backend.generate(sent)
    next(stream)
    assert shared_backend.cancel(sent.request_id)
    last = list(stream)[-1]
    assert isinstance(last, FinishedEvent)
    assert last.finish_reason == "cancelled"
    assert not shared_backend.cancel(sent.request_id)
    assert not shared_backend.cancel("never-sent")


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


def test_batch_jobs_outlive_their_submitter(
    shared_broker: EmbeddedValkey, shared_worker: Worker, long_model: Path
) -> None:
    submitter = CeleryBackend(shared_broker.url)
    ids = [submitter.submit(request(long_model)) for _ in range(3)]
    submitter.close()
    other = CeleryBackend(shared_broker.url)
    texts = [text_of(list(other.collect(job))) for job in ids]
    assert len(set(texts)) == 1
    # A second reader finds everything again, and the stream does not stay for ever.
    assert [other.result(job).text for job in ids] == texts
    with client(shared_broker.url) as redis:
        assert 0 < redis.ttl(stream_key(ids[0])) <= 3600
    other.close()


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


def test_cancelled_in_the_queue_never_runs(backend: CeleryBackend, long_model: Path) -> None:
    job = backend.submit(request(long_model))
    assert backend.cancel(job)
    with pytest.raises(DeadlineExceededError):
        backend.result(job, timeout=0.3)


def test_a_retry_would_draw_the_same_sample(
    backend: CeleryBackend, broker: EmbeddedValkey, long_model: Path
) -> None:
    backend.submit(request(long_model, sampling=build_sampling(temperature=0.7)))
    with client(broker.url) as redis:
        envelope = json.loads(redis.lindex(f"ssd:{queue_name(str(long_model), 'batch')}", 0))
    (body, _, _) = json.loads(base64.b64decode(envelope["body"]))
    assert json.loads(body[0])["sampling"]["seed"] is not None
    # The prompt is in the body only, not in headers that monitors show.
    assert "router" not in json.dumps(envelope["headers"])


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


def test_queue_names_are_readable_and_distinct() -> None:
    names = {
        queue_name(model, kind)
        for model in ("demo", "Demo", "org/de-mo", "org/de_mo", "모델")
        for kind in ("interactive", "batch")
    }
    assert len(names) == 10
    assert any(name.startswith("org-de-mo-") for name in names)


def test_a_cancelled_queue_entry_is_reported(
    backend: CeleryBackend, start_worker: object, long_model: Path
) -> None:
    job = backend.submit(request(long_model))
    backend.cancel(job)
    start_worker()  # type: ignore[operator]
    with pytest.raises(RequestCancelledError, match="in the queue"):
        backend.result(job, timeout=10)


def test_event_loops_leave_no_connections(
    shared_broker: EmbeddedValkey, shared_backend: CeleryBackend, long_model: Path
) -> None:
    async def answer() -> None:
        async for _ in shared_backend.agenerate(request(long_model, 2)):
            pass

    def connections() -> int:
        with client(shared_broker.url) as redis:
            return len(redis.client_list())

    asyncio.run(answer())
    before = connections()
    for _ in range(5):
        asyncio.run(answer())
    assert connections() <= before
    left = asyncio.new_event_loop()  # one that is closed without a shutdown
    left.run_until_complete(answer())
    left.close()
    asyncio.run(answer())
    assert left not in shared_backend._clients._by_loop
