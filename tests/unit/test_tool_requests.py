"""Tools on their way: the contract and the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ssd_integrations.errors import InvalidRequestError
from ssd_integrations.protocol import (
    MAX_STRUCTURE_BYTES,
    MAX_TOOLS,
    DeltaEvent,
    GenerationRequest,
    ToolCall,
    ToolCallDelta,
    build_request,
    event_from_json,
)
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
from tests.tools import NOW, PARAMETERS, PERSON, WEATHER

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


# --- the command ---


def test_ssd_generate(run_ssd: RunSSD, tool_model: Path, tmp_path: Path) -> None:
    weather, others = tmp_path / "weather.json", tmp_path / "others.json"
    weather.write_text(json.dumps({"type": "function", "function": WEATHER}), encoding="utf-8")
    others.write_text(json.dumps([PERSON, NOW]), encoding="utf-8")

    def answer(*options: str) -> str:
        result = run_ssd(
            "generate", "Hello", "--model", str(tool_model), "--dtype", "float32",
            "--max-tokens", "200", "--tool", str(weather), "--tool", str(others), *options,
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
