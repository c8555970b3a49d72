"""Tools on a real worker behind a real broker: the same calls, the same errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from ssd_integrations.backends.celery import CeleryBackend
from ssd_integrations.backends.local import LocalBackend
from ssd_integrations.errors import InvalidStructureError
from ssd_integrations.protocol import DeltaEvent, FinishedEvent, build_sampling
from tests.json_schema import conforms
from tests.tools import NOW, PARAMETERS, WEATHER
from tests.worker_support import request

HELLO = {"prompt": None, "messages": [{"role": "user", "content": "Hello"}]}


@pytest.fixture(scope="module")
def local(long_model: Path) -> Iterator[LocalBackend]:
    backend = LocalBackend(model=str(long_model), dtype="float32", max_num_seqs=2, num_threads=1)
    yield backend
    backend.close()


def test_same_calls_as_in_process(
    shared_backend: CeleryBackend, local: LocalBackend, long_model: Path
) -> None:
    sampling = build_sampling(max_tokens=200, temperature=0.8, seed=3)
    sent = request(
        long_model, **HELLO, sampling=sampling, tools=[WEATHER, NOW], tool_choice="get_weather"
    )
    mine, theirs = list(local.generate(sent)), list(shared_backend.generate(sent))
    end = theirs[-1]
    assert isinstance(end, FinishedEvent)
    assert isinstance(mine[-1], FinishedEvent)
    assert end.tool_calls == mine[-1].tool_calls
    assert end.finish_reason == "tool_calls"
    (call,) = end.tool_calls
    assert conforms(call.arguments, PARAMETERS["get_weather"])
    pieces = [p for e in theirs if isinstance(e, DeltaEvent) for p in e.tool_calls]
    assert (pieces[0].id, pieces[0].name) == (call.id, call.name)
    assert json.loads("".join(piece.arguments for piece in pieces)) == call.arguments


def test_errors_arrive_as_their_classes(shared_backend: CeleryBackend, long_model: Path) -> None:
    tool = {"name": "bad", "parameters": {"properties": {"a": {"type": "foo"}}}}
    with pytest.raises(InvalidStructureError, match="tool 'bad'"):
        list(shared_backend.generate(request(long_model, **HELLO, tools=[tool])))
