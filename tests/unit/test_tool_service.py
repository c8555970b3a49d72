"""Tools in the engine of this process: calls, pieces of them, and what is no valid one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from ssd_integrations.backends.local import LocalBackend
from ssd_integrations.errors import InvalidRequestError, InvalidStructureError
from ssd_integrations.protocol import (
    DeltaEvent,
    Event,
    FinishedEvent,
    InvalidToolCall,
    build_request,
    build_sampling,
)
from ssd_workers.engine.config import build_engine_config
from tests.json_schema import conforms
from tests.tools import NOW, PARAMETERS, PERSON, THINKING_TEMPLATE, WEATHER, make_tool_model

HELLO = [{"role": "user", "content": "Hello"}]
TOOLS = [WEATHER, PERSON, NOW]


@pytest.fixture(scope="module")
def backend(tool_model: Path) -> Iterator[LocalBackend]:
    made = LocalBackend(model=str(tool_model), dtype="float32", num_threads=1)
    yield made
    made.close()


def run(backend: LocalBackend, **fields: Any) -> tuple[list[Event], FinishedEvent]:
    (info,) = backend.models()
    fields.setdefault("sampling", build_sampling(max_tokens=200, temperature=0.8, seed=1))
    fields = {"messages": HELLO, "tools": TOOLS, **fields}
    events = list(backend.generate(build_request(model=info.name, **fields)))
    assert isinstance(events[-1], FinishedEvent)
    return events, events[-1]


def streamed_calls(events: list[Event]) -> list[tuple[str, str, str]]:
    """(id, name, arguments) of each call, as a client puts the pieces together."""
    calls: dict[int, list[str]] = {}
    for event in events:
        for piece in event.tool_calls if isinstance(event, DeltaEvent) else ():
            if piece.index not in calls:
                assert piece.id
                assert piece.name
                calls[piece.index] = [piece.id, piece.name, ""]
            else:
                assert piece.id is None
                assert piece.name is None
            calls[piece.index][2] += piece.arguments
    return [(id_, name, text) for id_, name, text in calls.values()]


def test_a_named_tool_is_called_once(backend: LocalBackend) -> None:
    events, end = run(backend, tool_choice="add-person")
    (call,) = end.tool_calls
    assert call.name == "add-person"
    assert conforms(call.arguments, PARAMETERS["add-person"])
    assert end.finish_reason == "tool_calls"
    assert end.text == ""
    assert not end.invalid_tool_calls
    ((id_, name, text),) = streamed_calls(events)
    assert (id_, name, json.loads(text)) == (call.id, call.name, call.arguments)
    pieces = [e for e in events if isinstance(e, DeltaEvent) and e.tool_calls]
    assert len(pieces) > 3
    tokens = [t for e in events if isinstance(e, DeltaEvent) for t in e.token_ids]
    assert len(tokens) == end.usage.completion_tokens


def test_required_with_and_without_parallel_calls(backend: LocalBackend) -> None:
    counts = set()
    for seed in range(6):
        sampling = build_sampling(max_tokens=400, temperature=1.0, seed=seed)
        _, end = run(backend, tool_choice="required", sampling=sampling)
        counts.add(len(end.tool_calls))
        assert len({call.id for call in end.tool_calls}) == len(end.tool_calls)
        _, single = run(
            backend, tool_choice="required", sampling=sampling, parallel_tool_calls=False
        )
        assert len(single.tool_calls) == 1
        assert single.finish_reason == "tool_calls"
    assert max(counts) > 1


def test_the_token_limit_within_a_call(backend: LocalBackend) -> None:
    events, end = run(backend, tool_choice="get_weather", sampling=build_sampling(max_tokens=50))
    assert end.finish_reason == "length"
    assert not end.tool_calls
    (bad,) = end.invalid_tool_calls
    assert isinstance(bad, InvalidToolCall)
    assert bad.name == "get_weather"
    assert "token limit" in bad.reason
    assert bad.text.startswith('{"name": "get_weather"')
    assert all(id_ == bad.id for id_, _, _ in streamed_calls(events))


def test_auto_is_text_until_a_call_begins(backend: LocalBackend, tool_model: Path) -> None:
    trigger = AutoTokenizer.from_pretrained(tool_model).convert_tokens_to_ids("<tool_call>")
    likely = build_sampling(max_tokens=300, temperature=1.0, seed=4, logit_bias={trigger: 6.0})
    events, end = run(backend, sampling=likely)
    assert end.tool_calls
    assert "".join(e.text for e in events if isinstance(e, DeltaEvent)) == end.text
    assert "<tool_call>" not in end.text
    never = build_sampling(max_tokens=30, logit_bias={trigger: -100.0})
    _, plain = run(backend, sampling=never)
    assert not plain.tool_calls
    # Drafts change nothing.
    for mode in ("off", "ngram", "suffix"):
        _, again = run(backend, sampling=likely, speculation={"mode": mode})
        assert [(c.name, c.arguments) for c in again.tool_calls] == [
            (c.name, c.arguments) for c in end.tool_calls
        ]
        assert again.text == end.text


def test_none_leaves_the_text_as_it_is(backend: LocalBackend) -> None:
    sampling = build_sampling(max_tokens=20)
    _, with_tools = run(backend, tool_choice="none", sampling=sampling)
    _, without = run(backend, tools=[], sampling=sampling)
    assert with_tools.text == without.text
    assert with_tools.usage.prompt_tokens == without.usage.prompt_tokens


@pytest.mark.parametrize(
    ("parameters", "fault"),
    [
        ({"properties": {"a": {"type": "foo"}}}, "Invalid type: foo"),
        ({"properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "without an end"),
        ({"properties": {"a": {"not": {}}}}, "not"),
    ],
)
def test_parameters_that_cannot_be_kept_fail_before_decoding(
    backend: LocalBackend, parameters: dict[str, Any], fault: str
) -> None:
    for choice in ("auto", "required"):
        with pytest.raises(InvalidStructureError, match="tool 'bad'") as caught:
            run(backend, tools=[NOW, {"name": "bad", "parameters": parameters}], tool_choice=choice)
        assert fault in str(caught.value)


def test_a_stop_string_within_a_call_makes_it_invalid(
    backend: LocalBackend, tool_model: Path
) -> None:
    trigger = AutoTokenizer.from_pretrained(tool_model).convert_tokens_to_ids("<tool_call>")
    sampling = build_sampling(max_tokens=100, logit_bias={trigger: 100.0}, stop=("now",))
    _, end = run(backend, tools=[NOW], sampling=sampling)
    assert (end.finish_reason, end.stop_sequence) == ("stop", "now")
    assert not end.tool_calls
    assert "the answer ended before it did" in end.invalid_tool_calls[0].reason


@pytest.mark.parametrize("form", ["mistral", "mistral-args", "llama3", "json"])
def test_the_format_can_be_set(tool_model: Path, form: str) -> None:
    """Of these, some begin with special tokens, whose text is not shown elsewhere."""
    backend = LocalBackend(model=str(tool_model), dtype="float32", num_threads=1, tool_format=form)
    try:
        _, end = run(backend, tool_choice="get_weather")
        assert [call.name for call in end.tool_calls] == ["get_weather"]
        assert conforms(end.tool_calls[0].arguments, PARAMETERS["get_weather"])
        assert end.text == ""
        _, several = run(backend, tool_choice="required")
        assert several.tool_calls
        assert several.text == ""
    finally:
        backend.close()


def test_unknown_formats_are_named() -> None:
    for option in ("tool_format", "reasoning_format"):
        with pytest.raises(InvalidRequestError, match=f"{option}='xml'"):
            build_engine_config(model="demo", **{option: "xml"})


def test_a_reasoning_model(tmp_path: Path) -> None:
    model = make_tool_model(tmp_path, template=THINKING_TEMPLATE)
    close = AutoTokenizer.from_pretrained(model).convert_tokens_to_ids("</think>")
    sampling = build_sampling(max_tokens=300, temperature=1.0, seed=2, logit_bias={close: 4.0})
    backend = LocalBackend(model=str(model), dtype="float32", num_threads=1)
    try:
        events, end = run(backend, tool_choice="required", sampling=sampling)
        assert end.reasoning
        assert end.tool_calls
        assert end.text == ""
        deltas = [event for event in events if isinstance(event, DeltaEvent)]
        assert "".join(delta.reasoning for delta in deltas) == end.reasoning
        # Reasoning is told apart without tools as well, but not in a form or a raw prompt.
        _, plain = run(backend, tools=[], sampling=sampling)
        assert plain.reasoning
        assert "</think>" not in plain.reasoning
        assert plain.text
        form = {"tools": [], "structured_output": {"choice": ["yes", "no"]}}
        assert run(backend, **form)[1].text in ("yes", "no")
        _, raw = run(backend, tools=[], messages=None, prompt="Hello", sampling=sampling)
        assert raw.reasoning == ""
    finally:
        backend.close()
