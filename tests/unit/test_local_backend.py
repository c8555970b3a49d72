"""The in-process backend: one engine for all, sync and async, and nobody decodes for nobody."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from ssd_integrations.backends import Backend, local, open_backend
from ssd_integrations.backends.local import LocalBackend
from ssd_integrations.errors import ContextLengthError, InvalidRequestError, ModelNotFoundError
from ssd_integrations.protocol import (
    FinishedEvent,
    GenerationRequest,
    build_request,
    build_sampling,
)
from ssd_workers.engine.service import EngineService


@pytest.fixture
def folder(roomy_model: Path) -> str:
    return str(roomy_model)


@pytest.fixture
def backend(folder: str) -> Iterator[LocalBackend]:
    made = LocalBackend(model=folder)
    yield made
    made.close()


def request(folder: str, max_tokens: int = 20, **fields: Any) -> GenerationRequest:
    sampling = build_sampling(max_tokens=max_tokens, temperature=1.0, seed=7)
    return build_request(model=folder, prompt="The router", sampling=sampling, **fields)


def text_of(backend: LocalBackend, req: GenerationRequest) -> str:
    *_, last = backend.generate(req)
    assert isinstance(last, FinishedEvent)
    return last.text


def wait_until_idle(service: EngineService) -> None:
    deadline = time.monotonic() + 10
    while service._live:
        assert time.monotonic() < deadline, f"still decoding {service._live}"
        time.sleep(0.01)


def test_is_a_backend_and_options_are_checked_at_once(folder: str) -> None:
    assert isinstance(open_backend(model=folder), Backend)
    with pytest.raises(InvalidRequestError, match="max_num_seqs=-1"):
        open_backend(model=folder, max_num_seqs=-1)
    with pytest.raises(InvalidRequestError, match="unknown_option"):
        open_backend(model=folder, unknown_option=1)


def test_unknown_model_fails_at_the_first_use_each_time() -> None:
    broken = open_backend(model="no-such-model-anywhere")
    for _ in range(2):
        with pytest.raises(ModelNotFoundError, match="no-such-model-anywhere"):
            list(broken.generate(request("no-such-model-anywhere")))


def test_many_first_callers_load_one_engine(
    folder: str, backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    original = EngineService.start

    def counting(self: EngineService) -> None:
        started.append(self)
        original(self)

    monkeypatch.setattr(EngineService, "start", counting)
    others = [LocalBackend(model=folder) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        texts = set(pool.map(lambda b: text_of(b, request(folder)), others))
    assert len(started) == 1
    assert len(texts) == 1


async def test_async_equals_sync(folder: str, backend: LocalBackend) -> None:
    expected = text_of(backend, request(folder))

    async def once() -> str:
        last = None
        async for event in backend.agenerate(request(folder)):
            last = event
        assert isinstance(last, FinishedEvent)
        return last.text

    assert set(await asyncio.gather(*(once() for _ in range(20)))) == {expected}


def test_closing_the_generator_cancels(folder: str, backend: LocalBackend) -> None:
    stream = backend.generate(request(folder, 4000))
    next(stream)
    service = local._engines.running(backend._config)
    assert service is not None
    assert service._live
    stream.close()  # type: ignore[attr-defined]
    wait_until_idle(service)


async def test_a_task_cancelled_while_it_submits_leaves_nothing_running(
    folder: str, backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    text_of(backend, request(folder, 1))
    service = local._engines.running(backend._config)
    assert service is not None
    original, entered, go_on = service.submit, threading.Event(), threading.Event()

    def slow(*args: Any) -> None:
        entered.set()
        go_on.wait(10)
        original(*args)

    monkeypatch.setattr(service, "submit", slow)

    async def consume() -> None:
        async for _ in backend.agenerate(request(folder, 4000)):
            pass

    task = asyncio.create_task(consume())
    await asyncio.to_thread(entered.wait, 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go_on.set()
    await asyncio.sleep(0.2)
    wait_until_idle(service)


async def test_errors_are_raised_not_yielded(folder: str, backend: LocalBackend) -> None:
    too_long = request(folder, 5000)
    with pytest.raises(ContextLengthError):
        list(backend.generate(too_long))
    with pytest.raises(ContextLengthError):
        async for _ in backend.agenerate(too_long):
            pass


def test_closed_backend_loads_again(folder: str, backend: LocalBackend) -> None:
    before = text_of(backend, request(folder))
    backend.close()
    assert local._engines.running(backend._config) is None
    assert text_of(backend, request(folder)) == before


def test_a_forked_child_starts_its_own_engine(folder: str, backend: LocalBackend) -> None:
    text_of(backend, request(folder))
    child = os.fork()
    if child == 0:
        os._exit(0 if local._engines.running(backend._config) is None else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert local._engines.running(backend._config) is not None


def test_a_forked_child_decodes_after_its_parent_used_threads(
    folder: str, backend: LocalBackend
) -> None:
    before = text_of(backend, request(folder))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.randn(500, 500) @ torch.randn(500, 500)
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # a child that waits for its parent's threads would wait for ever
        same = text_of(LocalBackend(model=folder), request(folder)) == before
        torch.randn(500, 500) @ torch.randn(500, 500)  # what a model with wide layers does
        os._exit(0 if same else 1)
    torch.set_num_threads(threads)
    assert os.waitpid(child, 0)[1] == 0
