"""The engine as a service: cancellation, deadlines, shutdown, failures that stay put."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ssd_integrations.errors import (
    InvalidRequestError,
    OverloadedError,
)
from ssd_integrations.protocol import (
    Event,
    FailedEvent,
    FinishedEvent,
    StartedEvent,
    build_sampling,
)
from ssd_workers.engine.config import EngineConfig
from ssd_workers.engine.service import EngineService
from tests.unit.service_support import Reader, finish, request


def test_cancel_while_running_and_while_waiting(service: EngineService) -> None:
    running = [Reader(service, request(service, max_tokens=4000)) for _ in range(4)]
    for reader in running:
        assert isinstance(reader.next(), StartedEvent)
    waiting_request = request(service, max_tokens=5)
    waiting = Reader(service, waiting_request)
    assert service.cancel(waiting_request.request_id)
    ended = waiting.until_terminal()
    assert isinstance(ended, FinishedEvent)
    assert (ended.finish_reason, ended.usage.completion_tokens) == ("cancelled", 0)
    for reader in running:
        assert service.cancel(reader.events[0].request_id)
        ended = reader.until_terminal()
        assert isinstance(ended, FinishedEvent)
        assert ended.finish_reason == "cancelled"
        assert 0 < ended.usage.completion_tokens < 4000
    assert not service.cancel("never-seen")
    assert not service.cancel(waiting_request.request_id)


def test_deadlines(service: EngineService) -> None:
    blockers = [Reader(service, request(service, max_tokens=4000)) for _ in range(4)]
    for reader in blockers:
        reader.next()
    late = Reader(service, request(service, queue_timeout_s=0.05)).until_terminal()
    assert isinstance(late, FailedEvent)
    assert late.error.code == "overloaded"
    assert late.error.retryable
    assert "0.05" in late.error.message
    for reader in blockers:
        service.cancel(reader.events[0].request_id)
        reader.until_terminal()
    slow = Reader(service, request(service, max_tokens=4000, timeout_s=0.2)).until_terminal()
    assert isinstance(slow, FailedEvent)
    assert slow.error.code == "deadline_exceeded"


def test_same_id_twice_is_refused_while_it_lives(service: EngineService) -> None:
    req = request(service, max_tokens=4000, request_id="twice")
    reader = Reader(service, req)
    reader.next()
    with pytest.raises(InvalidRequestError, match="'twice'"):
        service.submit(req, lambda event: None)
    service.cancel("twice")
    reader.until_terminal()
    deadline = time.monotonic() + 5
    while service.cancel("twice") and time.monotonic() < deadline:
        time.sleep(0.01)
    assert finish(service, req.model_copy(update={"sampling": build_sampling(max_tokens=2)}))


def test_a_callback_that_raises_hurts_only_itself(service: EngineService) -> None:
    called = threading.Event()

    def broken(event: Event) -> None:
        called.set()
        raise RuntimeError("broken callback")

    neighbour = Reader(service, request(service, max_tokens=40))
    service.submit(request(service, max_tokens=4000, request_id="broken"), broken)
    assert called.wait(10)
    assert isinstance(neighbour.until_terminal(), FinishedEvent)
    deadline = time.monotonic() + 10
    while service.cancel("broken"):
        assert time.monotonic() < deadline, "the request with the broken callback still runs"
        time.sleep(0.01)


def test_nan_logits_fail_one_row_and_leave_the_others(roomy_model: Path) -> None:
    with EngineService(EngineConfig(model=str(roomy_model), max_num_seqs=4)) as own:
        good = request(own, prompt="The cable", max_tokens=30)
        expected = finish(own, good).text
        engine = own._engine
        assert engine is not None
        runner = engine._target.runner
        original = runner.forward

        def poisoned(blocks: Any) -> torch.Tensor:
            logits = original(blocks).clone()
            at = 0
            for block in blocks:
                if block.cache.nbytes and getattr(block.cache, "poison", False):
                    logits[at : at + block.keep] = float("nan")
                at += block.keep
            return logits

        runner.forward = poisoned  # type: ignore[method-assign]
        bad = Reader(own, request(own, prompt="Poison", max_tokens=4000, request_id="bad"))
        bad.next()
        neighbour = Reader(own, good.model_copy(update={"request_id": "good"}))
        victim = next(s for s in engine.sequences if s.request_id == "bad")
        victim.cache.poison = True  # type: ignore[union-attr]
        failed = bad.until_terminal()
        assert isinstance(failed, FailedEvent)
        assert failed.error.code == "engine_error"
        assert "NaN" in failed.error.message
        result = neighbour.until_terminal()
        assert isinstance(result, FinishedEvent)
        assert result.text == expected


def test_a_step_that_raises_fails_its_requests_and_the_engine_goes_on(roomy_model: Path) -> None:
    with EngineService(EngineConfig(model=str(roomy_model))) as own:
        expected = finish(own, request(own)).text
        runner = own._engine._target.runner  # type: ignore[union-attr]
        original = runner.forward

        def explode(blocks: Any) -> torch.Tensor:
            runner.forward = original  # type: ignore[method-assign]
            raise RuntimeError("out of memory, say")

        runner.forward = explode  # type: ignore[method-assign]
        failed = Reader(own, request(own)).until_terminal()
        assert isinstance(failed, FailedEvent)
        assert "out of memory, say" in failed.error.message
        assert finish(own, request(own)).text == expected


def test_drain_waits_and_refuses_new_requests(roomy_model: Path) -> None:
    own = EngineService(EngineConfig(model=str(roomy_model)))
    own.start()
    reader = Reader(own, request(own, max_tokens=60))
    assert own.drain(30)
    assert isinstance(reader.until_terminal(), FinishedEvent)
    with pytest.raises(OverloadedError, match="shutting down"):
        own.submit(request(own), lambda event: None)
    own.close()
    own.close()


def test_close_cancels_what_runs(roomy_model: Path) -> None:
    own = EngineService(EngineConfig(model=str(roomy_model)))
    own.start()
    reader = Reader(own, request(own, max_tokens=4000))
    reader.next()
    own.close()
    ended = reader.until_terminal()
    assert isinstance(ended, FinishedEvent)
    assert ended.finish_reason == "cancelled"
