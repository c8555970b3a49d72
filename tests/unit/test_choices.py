"""Several answers to one request: ids, seeds, running together, stopping together."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from ssd_integrations.backends.choices import aread_all, choices, read_all
from ssd_integrations.errors import BrokerUnavailableError, InvalidRequestError, OverloadedError
from ssd_integrations.protocol import (
    Event,
    FinishedEvent,
    GenerationRequest,
    build_request,
    build_sampling,
)
from tests.unit.scripted_backend import ScriptedBackend


def request(**sampling: Any) -> GenerationRequest:
    return build_request(model="m", prompt="Hi", sampling=build_sampling(**sampling))


class Meeting(ScriptedBackend):
    """Nobody gets an event before ``expected`` requests are there; then one of them may fail.

    The others go on until they are cancelled. ``cancel`` does not know a request at first, as
    a backend does not that is still sending it.
    """

    def __init__(self, expected: int, failing: int | None = None) -> None:
        super().__init__()
        self.failing = failing
        self.barrier = threading.Barrier(expected)
        self.everybody = asyncio.Event()
        self.expected = expected
        self.asked: list[str] = []

    def generate(self, request: GenerationRequest) -> Iterator[Event]:
        self.requests.append(request)
        place = self.barrier.wait(timeout=10)
        if self.failing is None:
            yield from self._script(request)
        elif place == self.failing:
            raise OverloadedError("Busy.")
        else:
            while request.request_id not in self.cancelled:
                time.sleep(0.001)
            yield from self._script(request)

    async def agenerate(self, request: GenerationRequest) -> AsyncIterator[Event]:
        self.requests.append(request)
        place = len(self.requests) - 1
        if len(self.requests) == self.expected:
            self.everybody.set()
        try:
            async with asyncio.timeout(10):
                await self.everybody.wait()
            if place == self.failing:
                raise OverloadedError("Busy.")
            if self.failing is not None:
                await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.cancelled.append(request.request_id)
            raise
        for event in self._script(request):
            yield event

    def cancel(self, request_id: str) -> bool:
        self.asked.append(request_id)
        if self.asked.count(request_id) < 3:
            return False
        return super().cancel(request_id)


def test_the_first_is_the_request_itself_and_seeds_follow_from_its_seed() -> None:
    base = request(temperature=0.8, seed=7)
    found = choices(base, 16)
    assert found[0] is base
    assert found[:4] != choices(base, 4)  # new ids each time
    assert [c.sampling for c in found[:4]] == [c.sampling for c in choices(base, 4)]
    assert len({c.request_id for c in found}) == len({c.sampling.seed for c in found}) == 16
    assert all(GenerationRequest.from_json(c.to_json()) == c for c in found)
    other = choices(request(temperature=0.8, seed=8), 16)
    assert not {c.sampling.seed for c in found} & {c.sampling.seed for c in other}


def test_without_a_seed_all_are_fresh_draws() -> None:
    assert {c.sampling.seed for c in choices(request(temperature=0.8), 3)} == {None}


@pytest.mark.parametrize("n", [0, 17, -1, True, 2.0, "2", None])
def test_a_count_out_of_bounds_is_named(n: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"n=.*from 1 to 16"):
        choices(request(), n)


async def test_all_run_at_the_same_time() -> None:
    for events in (
        read_all(Meeting(5), choices(request(), 5)),
        await aread_all(Meeting(5), choices(request(), 5)),
    ):
        assert [answer[-1].type for answer in events] == ["finished"] * 5
        assert len({answer[-1].request_id for answer in events}) == 5
        assert all(isinstance(answer[-1], FinishedEvent) for answer in events)


async def test_answers_come_in_the_order_of_the_requests() -> None:
    wanted = choices(request(), 4)
    for events in (read_all(Meeting(4), wanted), await aread_all(Meeting(4), wanted)):
        assert [answer[0].request_id for answer in events] == [r.request_id for r in wanted]


def test_when_one_fails_the_others_are_cancelled() -> None:
    backend = Meeting(4, failing=1)
    with pytest.raises(OverloadedError):
        read_all(backend, choices(request(), 4))
    assert len(set(backend.cancelled)) == 3


async def test_when_one_fails_the_others_are_cancelled_on_a_loop() -> None:
    backend = Meeting(4, failing=1)
    async with asyncio.timeout(20):
        with pytest.raises(OverloadedError):
            await aread_all(backend, choices(request(), 4))
    assert len(set(backend.cancelled)) == 3


def test_an_interrupt_cancels_all() -> None:
    backend = Meeting(3, failing=99)
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        while len(backend.requests) < 3:
            time.sleep(0.001)
        signal.pthread_kill(main, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        read_all(backend, choices(request(), 3))
    assert len(set(backend.cancelled)) == 3


async def test_cancelling_the_task_cancels_all() -> None:
    backend = Meeting(3, failing=99)
    task = asyncio.create_task(aread_all(backend, choices(request(), 3)))
    await backend.everybody.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(set(backend.cancelled)) == 3


def test_a_broker_that_is_gone_does_not_hide_the_error() -> None:
    class Gone(Meeting):
        def cancel(self, request_id: str) -> bool:
            self.cancelled.append(request_id)
            raise BrokerUnavailableError("Gone.")

    with pytest.raises(OverloadedError):
        read_all(Gone(2, failing=0), choices(request(), 2))
