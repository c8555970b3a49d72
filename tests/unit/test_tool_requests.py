"""Tools on their way: the contract, the engine in this process and the command line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ssd_integrations.backends.local import LocalBackend
from ssd_integrations.errors import InvalidRequestError, InvalidStructureError
from ssd_integrations.protocol import (
    MAX_STRUCTURE_BYTES,
    MAX_TOOLS,
    DeltaEvent,
    Event,
    FinishedEvent,
    GenerationRequest,
    InvalidToolCall,
    ToolCall,
    ToolCallDelta,
    build_request,
    build_sampling,
    event_from_json,
)
from ssd_workers.engine.config import build_engine_config
from ssd_workers.engine.output_parsers.output import call_id, delta_events
from ssd_workers.engine.output_parsers.parts import (
    CallArguments,
    CallEnd,
    CallStart,
    ReasoningPart,
    SyntaxPart,
    TextPart,
)
from tests.conftest import RunSSD
from tests.json_schema import conforms
from tests.tools import NOW, PARAMETERS, PERSON, THINKING_TEMPLATE, WEATHER, make_tool_model

HELLO = [{"role": "user", "content": "Hello"}]
TOOLS = [WEATHER, PERSON, NOW]


def request(model: str = "m", **fields: Any) -> GenerationRequest:
    fields = {"messages": HELLO, "tools": TOOLS, **fields}
    return build_request(model=model, **fields)


# --- the contract ---


def test_round_trip_on_the_wire() -> None:
    sent = request(tool_choice="get_weather", parallel_tool_calls=False)
    assert GenerationRequest.from_json(sent.to_json()) == sent
    wire = json.loads(sent.to_json())
    assert wire["tool_choice"] == "get_weather"
    assert wire["tools"][0]["parameters"] == WEATHER["parameters"]
    assert wire["tools"][2]["parameters"]["additionalProperties"] is False
    # The order of properties is the order in which a model writes them.
    received = GenerationRequest.from_json(sent.to_json()).tools[1].parameters
    assert list(received["properties"]) == list(PERSON["parameters"]["properties"])


def test_without_tools_nothing_of_them_is_on_the_wire() -> None:
    wire = json.loads(request(tools=[]).to_json())
    assert not [name for name in wire if "tool" in name]
    delta = DeltaEvent(request_id="r", text="x")
    assert set(json.loads(delta.to_json())) == {
        "type", "request_id", "text", "token_ids", "logprobs"
    }  # fmt: skip
    full = delta.model_copy(
        update={"reasoning": "y", "tool_calls": (ToolCallDelta(index=0, id="a", name="b"),)}
    )
    assert event_from_json(full.to_json()) == full


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tools": [{"name": "a b"}]}, "tools.0.name='a b'"),
        ({"tools": [{"name": ""}]}, "tools.0.name=''"),
        ({"tools": [{"name": "x" * 65}]}, "tools.0.name"),
        ({"tools": [{"name": "now\n"}]}, "tools.0.name"),
        ({"tools": [{"name": "auto"}]}, "value of tool_choice"),
        ({"tools": [NOW, WEATHER, NOW]}, "two tools have the name 'now'"),
        ({"tools": [{"name": f"t{i}"} for i in range(MAX_TOOLS + 1)]}, f"{MAX_TOOLS} are taken"),
        ({"tool_choice": "nobody"}, "tool_choice='nobody' is none of auto, none, required, get_we"),
        ({"tools": [], "tool_choice": "required"}, "without tools"),
        ({"tools": [{"name": "a", "parameters": {"type": "string"}}]}, "has to be 'object'"),
        ({"tools": [{"name": "a", "parameters": [1]}]}, "a JSON schema"),
        ({"tools": [{"name": "a", "parameters": {"const": float("nan")}}]}, "parameters"),
        ({"tools": [{"name": "a", "parameters": {"x": "y" * MAX_STRUCTURE_BYTES}}]}, "are taken"),
        ({"tools": [{"name": "a", "surplus": 1}]}, "surplus"),
        ({"messages": None, "prompt": "x"}, "tools go with messages"),
        ({"structured_output": {"regex": "a"}}, "tools and structured_output"),
        ({"sampling": {"ignore_eos": True}}, "ignore_eos does not go with tools"),
        ({"sampling": {"min_tokens": 2}}, "min_tokens does not go with tools"),
        ({"sampling": {"stop_token_ids": [4]}}, "stop_token_ids does not go with tools"),
        ({"sampling": {"stop": ["x"]}, "tool_choice": "required"}, "stop does not go with tools"),
        ({"sampling": {"stop": ["x"]}, "tool_choice": "now"}, "tool_choice='now'"),
    ],
)
def test_what_does_not_go_together_is_refused(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        request(**fields)
    assert named in str(caught.value)
    assert len(str(caught.value)) < 500


def test_what_goes_together() -> None:
    assert request(sampling={"stop": ["x"]}).tool_choice == "auto"
    assert request(sampling={"ignore_eos": True}, tool_choice="none").tools
    none = request(tools=[{"name": "a", "parameters": None, "strict": None}]).tools[0]
    assert none == request(tools=[{"name": "a", "parameters": {}}]).tools[0]


def test_events_tell_parts_in_their_order() -> None:
    parts = [
        ReasoningPart("r"), SyntaxPart("\n"), TextPart("a"), TextPart("b"), CallStart(0, "i", "n"),
        CallArguments(0, "{"), CallArguments(0, "}"), CallEnd("i", "n", "{}", {}), TextPart("c"),
        CallStart(1, "j", "m"), ReasoningPart("s"),
    ]  # fmt: skip
    first, second, third = delta_events("r", parts, [7, 8], None)
    assert (first.reasoning, first.text, first.token_ids) == ("r", "ab", (7, 8))
    assert first.tool_calls == (ToolCallDelta(index=0, id="i", name="n", arguments="{}"),)
    assert (second.text, second.tool_calls[0].index, second.token_ids) == ("c", 1, ())
    assert third.reasoning == "s"
    assert [e.token_ids for e in delta_events("r", [SyntaxPart(" ")], [7], None)] == [(7,)]
    assert list(delta_events("r", [SyntaxPart(" ")], [], None)) == []


def test_ids_are_those_of_the_request() -> None:
    ids = [call_id(request_id, n) for request_id in ("a", "b") for n in range(50)]
    assert len(set(ids)) == 100
    assert all(len(i) == 9 and i.isalnum() and i.isascii() for i in ids)
    assert call_id("a", 0) == ids[0]


# --- the engine in this process ---


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tool_model(tmp_path_factory.mktemp("models") / "tools")


@pytest.fixture(scope="module")
def backend(model: Path) -> Iterator[LocalBackend]:
    made = LocalBackend(model=str(model), dtype="float32", num_threads=1)
    yield made
    made.close()


def run(backend: LocalBackend, **fields: Any) -> tuple[list[Event], FinishedEvent]:
    (info,) = backend.models()
    fields.setdefault("sampling", build_sampling(max_tokens=200, temperature=0.8, seed=1))
    events = list(backend.generate(request(info.name, **fields)))
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


def test_auto_is_text_until_a_call_begins(backend: LocalBackend, model: Path) -> None:
    from transformers import AutoTokenizer

    trigger = AutoTokenizer.from_pretrained(model).convert_tokens_to_ids("<tool_call>")
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


def test_a_stop_string_within_a_call_makes_it_invalid(backend: LocalBackend, model: Path) -> None:
    from transformers import AutoTokenizer

    trigger = AutoTokenizer.from_pretrained(model).convert_tokens_to_ids("<tool_call>")
    sampling = build_sampling(max_tokens=100, logit_bias={trigger: 100.0}, stop=("now",))
    _, end = run(backend, tools=[NOW], sampling=sampling)
    assert (end.finish_reason, end.stop_sequence) == ("stop", "now")
    assert not end.tool_calls
    assert "the answer ended before it did" in end.invalid_tool_calls[0].reason


@pytest.mark.parametrize("form", ["mistral", "mistral-args", "llama3", "json"])
def test_the_format_can_be_set(model: Path, form: str) -> None:
    """Of these, some begin with special tokens, whose text is not shown elsewhere."""
    backend = LocalBackend(model=str(model), dtype="float32", num_threads=1, tool_format=form)
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
    from transformers import AutoTokenizer

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


# --- the command ---


def test_ssd_generate(run_ssd: RunSSD, model: Path, tmp_path: Path) -> None:
    weather, others = tmp_path / "weather.json", tmp_path / "others.json"
    weather.write_text(json.dumps({"type": "function", "function": WEATHER}), encoding="utf-8")
    others.write_text(json.dumps([PERSON, NOW]), encoding="utf-8")

    def answer(*options: str) -> str:
        result = run_ssd(
            "generate", "Hello", "--model", str(model), "--dtype", "float32", "--max-tokens", "200",
            "--tool", str(weather), "--tool", str(others), *options,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        return result.stdout

    name, _, arguments = answer("--tool-choice", "get_weather").strip().partition(" ")
    assert name == "get_weather"
    summary = json.loads(answer("--tool-choice", "get_weather", "--json"))
    (call,) = [ToolCall(**call) for call in summary["tool_calls"]]
    assert call.arguments == json.loads(arguments)
    assert conforms(call.arguments, PARAMETERS["get_weather"])
    assert summary["finish_reason"] == "tool_calls"
    cut = json.loads(answer("--tool-choice", "now", "--max-tokens", "12", "--json"))
    assert "token limit" in cut["invalid_tool_calls"][0]["reason"]
    assert "tool_calls" not in cut


@pytest.mark.parametrize(
    ("text", "options", "named"),
    [
        ("{", [], "is not JSON"),
        ("[1]", [], "holds 1, which is no tool"),
        ('{"name": "a b"}', [], "tools.0.name='a b'"),
        ('{"name": "a"}', ["--tool-choice", "b"], "tool_choice='b'"),
        ('{"name": "a"}', ["--raw"], "tools go with messages"),
        ('{"name": "a"}', ["--regex", "x"], "tools and structured_output"),
        (None, [], "cannot be read"),
    ],
)
def test_bad_options_fail_before_anything_loads(
    run_ssd: RunSSD, tmp_path: Path, text: str | None, options: list[str], named: str
) -> None:
    file = tmp_path / "tool.json"
    if text is not None:
        file.write_text(text, encoding="utf-8")
    result = run_ssd("generate", "hi", "--model", "/no/model", "--tool", str(file), *options)
    assert result.returncode == 2, result.stderr
    assert named in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr
