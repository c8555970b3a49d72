"""The contract: JSON round trips, bounds, unknown fields and the version."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_integrations.errors import InvalidRequestError, MalformedMessageError
from ssd_integrations.protocol import (
    PROTOCOL_VERSION,
    DeltaEvent,
    ErrorInfo,
    Event,
    FailedEvent,
    FinishedEvent,
    GenerationRequest,
    InvalidToolCall,
    Message,
    ModelInfo,
    SamplingParams,
    SpeculationParams,
    SpeculationStats,
    StartedEvent,
    Timing,
    ToolCall,
    ToolCallDelta,
    Usage,
    build_request,
    build_sampling,
    build_speculation,
    event_from_json,
    is_terminal,
)

# UTF-8 has no lone surrogates, so neither has a message.
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
ids = st.from_regex(r"[A-Za-z0-9_.-]{1,64}", fullmatch=True)
counts = st.integers(0, 10**9)
seconds = st.floats(0, 1e6)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)
tool_calls = st.builds(
    ToolCall,
    id=texts,
    name=texts.filter(bool),
    arguments=st.dictionaries(texts, json_values, max_size=3),
)
messages = st.builds(
    Message,
    role=st.sampled_from(["system", "user", "assistant", "tool"]),
    content=texts,
    name=st.none() | texts,
    tool_calls=st.lists(tool_calls, max_size=2).map(tuple),
    tool_call_id=st.none() | texts,
)
samplings = st.builds(
    SamplingParams,
    temperature=st.floats(0, 10),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=st.integers(0, 10**7),
    min_p=st.floats(0, 1),
    max_tokens=st.none() | st.integers(1, 10**6),
    stop=st.lists(texts.filter(bool), max_size=3).map(tuple),
    seed=st.none() | st.integers(0, 2**63 - 1),
)
speculations = st.builds(
    SpeculationParams,
    mode=st.sampled_from(["off", "ngram", "model", "auto"]),
    num_draft_tokens=st.none() | st.integers(1, 64),
)
inputs = st.one_of(
    st.fixed_dictionaries({"prompt": texts.filter(bool)}),
    st.fixed_dictionaries({"messages": st.lists(messages, min_size=1, max_size=3).map(tuple)}),
)
requests = st.builds(
    lambda given, **fields: GenerationRequest(**given, **fields),
    inputs,
    request_id=ids,
    model=texts.filter(bool),
    sampling=samplings,
    speculation=speculations,
    queue=st.sampled_from(["interactive", "batch"]),
    queue_timeout_s=st.floats(0.001, 1000),
    timeout_s=st.none() | st.floats(0.001, 1000),
)
models = st.builds(
    ModelInfo,
    name=texts,
    architecture=texts,
    context_length=st.integers(1, 10**6),
    vocab_size=st.integers(1, 10**6),
    dtype=texts,
    device=texts,
    draft_model=st.none() | texts,
    has_chat_template=st.booleans(),
)
events: st.SearchStrategy[Event] = st.one_of(
    st.builds(StartedEvent, request_id=ids, model=texts, prompt_tokens=counts),
    st.builds(
        DeltaEvent,
        request_id=ids,
        text=texts,
        token_ids=st.lists(counts, max_size=5).map(tuple),
        reasoning=texts,
        tool_calls=st.lists(
            st.builds(ToolCallDelta, index=counts, id=st.none() | ids, arguments=texts), max_size=2
        ).map(tuple),
    ),
    st.builds(
        FinishedEvent,
        request_id=ids,
        text=texts,
        finish_reason=st.sampled_from(["stop", "length", "cancelled", "tool_calls"]),
        reasoning=texts,
        tool_calls=st.lists(tool_calls, max_size=2).map(tuple),
        invalid_tool_calls=st.lists(
            st.builds(InvalidToolCall, id=ids, name=st.none() | texts, text=texts, reason=texts),
            max_size=2,
        ).map(tuple),
        stop_sequence=st.none() | texts,
        usage=st.builds(Usage, prompt_tokens=counts, completion_tokens=counts, total_tokens=counts),
        speculation=st.builds(
            SpeculationStats,
            method=st.sampled_from(["off", "ngram", "model"]),
            num_spec_steps=counts,
            num_draft_tokens=counts,
            num_accepted_tokens=counts,
            mean_acceptance_length=st.floats(1, 65),
            draft_acceptance_rate=st.floats(0, 1),
            acceptance_histogram=st.lists(counts, max_size=9).map(tuple),
        ),
        timing=st.builds(
            Timing,
            queue_s=seconds,
            time_to_first_token_s=seconds,
            decode_s=seconds,
            total_s=seconds,
            tokens_per_second=seconds,
        ),
        model=models,
    ),
    st.builds(
        FailedEvent,
        request_id=ids,
        error=st.builds(
            ErrorInfo,
            code=st.sampled_from(["engine_error", "overloaded"]),
            message=texts,
            remedy=texts,
            retryable=st.booleans(),
        ),
    ),
)


@settings(max_examples=100, deadline=None)
@given(requests)
def test_requests_round_trip(request: GenerationRequest) -> None:
    wire = request.to_json()
    assert GenerationRequest.from_json(wire) == request
    assert json.loads(wire)["version"] == PROTOCOL_VERSION


@settings(max_examples=100, deadline=None)
@given(events)
def test_events_round_trip_as_their_own_kind(event: Event) -> None:
    back = event_from_json(event.to_json())
    assert back == event
    assert type(back) is type(event)
    assert is_terminal(back) == isinstance(event, FinishedEvent | FailedEvent)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=80) | texts | json_values.map(json.dumps))
def test_garbage_is_a_malformed_message_and_nothing_else(data: bytes | str) -> None:
    with pytest.raises(MalformedMessageError):
        GenerationRequest.from_json(data)
    with pytest.raises(MalformedMessageError):
        event_from_json(data)


@pytest.mark.parametrize(
    ("build", "field", "value"),
    [
        (build_sampling, "temperature", -0.1),
        (build_sampling, "temperature", 10.1),
        (build_sampling, "temperature", float("nan")),
        (build_sampling, "temperature", float("inf")),
        (build_sampling, "temperature", "warm"),
        (build_sampling, "top_p", 0.0),
        (build_sampling, "top_p", 1.01),
        (build_sampling, "top_k", -1),
        (build_sampling, "min_p", -0.01),
        (build_sampling, "min_p", 1.01),
        (build_sampling, "max_tokens", 0),
        (build_sampling, "max_tokens", 1_000_001),
        (build_sampling, "stop", ("",)),
        (build_sampling, "stop", ("x",) * 33),
        (build_sampling, "stop", ("x" * 1025,)),
        (build_sampling, "seed", -1),
        (build_sampling, "seed", 2**63),
        (build_speculation, "mode", "magic"),
        (build_speculation, "num_draft_tokens", 0),
        (build_speculation, "num_draft_tokens", 65),
    ],
)
def test_out_of_bounds_names_the_field(build: Any, field: str, value: object) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        build(**{field: value})
    assert field in caught.value.message
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"prompt": "x", "model": ""}, "model"),
        ({"prompt": "x", "request_id": "a b"}, "request_id"),
        ({"prompt": "x", "request_id": "../../etc"}, "request_id"),
        ({"prompt": "x", "request_id": "x" * 65}, "request_id"),
        ({"prompt": "x", "queue": "vip"}, "queue"),
        ({"prompt": "x", "queue_timeout_s": 0.0}, "queue_timeout_s"),
        ({"prompt": "x", "timeout_s": -1.0}, "timeout_s"),
        ({"prompt": "x", "version": 2}, "version"),
        ({"prompt": "x", "temprature": 1}, "temprature"),
        ({}, "exactly one"),
        ({"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "exactly one"),
        ({"messages": []}, "messages is empty"),
        ({"prompt": ""}, "prompt is empty"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "text": "x"}]}, "text"),
    ],
)
def test_bad_requests_say_what_is_wrong(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        build_request(**{"model": "demo", **fields})
    assert named in caught.value.message


def test_a_long_value_is_cut_in_the_message() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        build_request(model="demo", prompt="x", queue="q" * 10_000)
    assert len(caught.value.message) < 300


def test_unknown_fields_and_other_versions_are_refused_on_the_wire() -> None:
    wire = json.loads(build_request(model="demo", prompt="x").to_json())
    for change in ({"surprise": 1}, {"version": 2}, {"version": "1.0"}):
        with pytest.raises(MalformedMessageError, match=next(iter(change))):
            GenerationRequest.from_json(json.dumps({**wire, **change}))


def test_an_unknown_event_type_is_refused() -> None:
    with pytest.raises(MalformedMessageError):
        event_from_json('{"type": "rumour", "request_id": "a"}')


def test_messages_cannot_be_changed() -> None:
    request = build_request(model="demo", prompt="x")
    with pytest.raises(ValueError, match="frozen"):
        request.model = "other"  # type: ignore[misc]


def test_request_ids_are_fresh() -> None:
    made = {build_request(model="demo", prompt="x").request_id for _ in range(50)}
    assert len(made) == 50


def _nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    "arguments",
    [
        {"x": object()},
        {"x": float("nan")},
        {"x": "\ud800"},
        {"x": 10**5000},
        _nested(5000),
        _nested(250),
    ],
    ids=["object", "nan", "surrogate", "digits", "deep", "too deep to be parsed"],
)
def test_tool_arguments_that_are_not_json_are_refused_at_once(arguments: dict[str, Any]) -> None:
    call = {"id": "1", "name": "f", "arguments": arguments}
    with pytest.raises(InvalidRequestError, match="arguments"):
        build_request(model="m", messages=[{"role": "assistant", "tool_calls": [call]}])


def test_tool_arguments_that_are_accepted_arrive() -> None:
    call = {"id": "1", "name": "f", "arguments": {"x": (1, 2), "deep": _nested(150)}}
    request = build_request(model="m", messages=[{"role": "assistant", "tool_calls": [call]}])
    assert GenerationRequest.from_json(request.to_json()) == request


def test_a_number_with_thousands_of_digits_is_refused_in_plain_words() -> None:
    with pytest.raises(InvalidRequestError, match="max_tokens=<int>"):
        build_sampling(max_tokens=10**5000)
