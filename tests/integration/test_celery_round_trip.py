"""A real worker behind a real broker: the same events as in this process."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ssd_integrations.backends.celery import CeleryBackend
from ssd_integrations.backends.local import LocalBackend
from ssd_integrations.backends.wire import queue_name, stream_key
from ssd_integrations.protocol import (
    DeltaEvent,
    Event,
    FinishedEvent,
    StartedEvent,
    build_sampling,
)
from ssd_workers.embedded import EmbeddedValkey
from tests.worker_support import Worker, client, request


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


def test_models_names_what_is_served(shared_backend: CeleryBackend, long_model: Path) -> None:
    (model,) = shared_backend.models()
    assert model.name == str(long_model)
    assert model.context_length == 16_384


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


def test_queue_names_are_readable_and_distinct() -> None:
    names = {
        queue_name(model, kind)
        for model in ("demo", "Demo", "org/de-mo", "org/de_mo", "모델")
        for kind in ("interactive", "batch")
    }
    assert len(names) == 10
    assert any(name.startswith("org-de-mo-") for name in names)


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
