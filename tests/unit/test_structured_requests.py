"""structured_output on its way: the contract, the adapters, the service and the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ssd_integrations import SSDLLM, ChatSSD
from ssd_integrations.backends.local import LocalBackend
from ssd_integrations.errors import (
    IncompleteStructureError,
    InvalidRequestError,
    InvalidStructureError,
)
from ssd_integrations.protocol import (
    MAX_STRUCTURE_BYTES,
    FinishedEvent,
    GenerationRequest,
    StructuredOutput,
    build_request,
    build_sampling,
)
from tests.conftest import RunSSD
from tests.json_schema import conforms
from tests.structures import SCHEMAS, SUM_GRAMMAR
from tests.unit.scripted_backend import ScriptedBackend

PERSON = SCHEMAS["person"]


def request(form: Any, **sampling: Any) -> GenerationRequest:
    return build_request(
        model="m", prompt="x", structured_output=form, sampling=build_sampling(**sampling)
    )


# --- the contract ---


@pytest.mark.parametrize(
    "form",
    [
        {"json_schema": PERSON},
        {"regex": "a+"},
        {"choice": ["yes", "no"]},
        {"grammar": SUM_GRAMMAR},
    ],
    ids=lambda form: next(iter(form)),
)
def test_round_trip_on_the_wire(form: dict[str, Any]) -> None:
    sent = request(form)
    assert GenerationRequest.from_json(sent.to_json()) == sent
    assert json.loads(sent.to_json())["structured_output"][next(iter(form))] is not None
    assert sent.structured_output is not None
    assert sent.structured_output.kind == next(iter(form))


def test_a_schema_keeps_its_order_and_may_be_text() -> None:
    as_text = request({"json_schema": json.dumps(PERSON)})
    assert as_text == request({"json_schema": PERSON}).model_copy(
        update={"request_id": as_text.request_id}
    )
    received = GenerationRequest.from_json(as_text.to_json()).structured_output
    assert received is not None
    assert received.json_schema is not None
    assert list(received.json_schema["properties"]) == list(PERSON["properties"])


@pytest.mark.parametrize(
    ("form", "named"),
    [
        ({}, "none given"),
        ({"regex": "a", "choice": ["b"]}, "regex, choice given"),
        ({"choice": []}, "choice is empty"),
        ({"choice": ["a", ""]}, "choice.1"),
        ({"regex": ""}, "regex"),
        ({"grammar": ""}, "grammar"),
        ({"json_schema": "{"}, "json_schema='{'"),
        ({"json_schema": "[1]"}, "an object"),
        ({"json_schema": [1]}, "an object"),
        ({"json_schema": {"const": float("nan")}}, "json_schema"),
        ({"json_schema": {"const": object()}}, "json_schema"),
        ({"json_schema": {"const": "x" * MAX_STRUCTURE_BYTES}}, f"{MAX_STRUCTURE_BYTES} are taken"),
        ({"regex": "é" * (MAX_STRUCTURE_BYTES // 2)}, "regex has"),
        ({"schema": {}}, "schema"),
    ],
)
def test_what_is_no_form_is_refused(form: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        request(form)
    assert named in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "sampling",
    [{"stop": ("x",)}, {"stop_token_ids": (5,)}, {"ignore_eos": True}, {"min_tokens": 3}],
)
def test_ends_of_other_kinds_are_refused(sampling: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=f"{next(iter(sampling))} does not go with"):
        request({"regex": "a"}, **sampling)


# --- the adapters ---


def test_at_construction_and_per_call_in_both_adapters() -> None:
    backend = ScriptedBackend()
    built, other = {"json_schema": PERSON}, {"choice": ["a", "b"]}
    for adapter in (
        ChatSSD(backend=backend, structured_output=built).invoke,
        SSDLLM(backend=backend, structured_output=built).complete,
    ):
        adapter("Hi")
        adapter("Hi", structured_output=other)
        adapter("Hi", structured_output=None)
    forms = [sent.structured_output for sent in backend.requests]
    expected = [StructuredOutput(json_schema=PERSON), StructuredOutput(choice=("a", "b")), None]
    assert forms == expected * 2


@pytest.mark.parametrize("adapter", [ChatSSD, SSDLLM])
def test_a_wrong_form_is_named_at_construction(adapter: Any) -> None:
    with pytest.raises(InvalidRequestError, match="choice is empty"):
        adapter(model="demo", structured_output={"choice": []})
    with pytest.raises(InvalidRequestError, match="stop does not go with"):
        adapter(model="demo", structured_output={"regex": "a"}, stop=["x"])


# --- the engine in this process ---


@pytest.fixture(scope="module")
def backend(tiny_model: Path) -> Any:
    made = LocalBackend(model=str(tiny_model), dtype="float32")
    yield made
    made.close()


def test_local_backend(backend: LocalBackend, tiny_model: Path) -> None:
    def run(form: dict[str, Any], max_tokens: int) -> Any:
        sent = build_request(
            model=str(tiny_model),
            prompt="The router",
            sampling=build_sampling(max_tokens=max_tokens),
            structured_output=form,
        )
        return list(backend.generate(sent))

    events = run({"json_schema": PERSON}, 120)
    assert isinstance(events[-1], FinishedEvent)
    assert conforms(json.loads(events[-1].text), PERSON)
    assert "".join(e.text for e in events if e.type == "delta") == events[-1].text
    with pytest.raises(IncompleteStructureError):
        run({"json_schema": PERSON}, 3)
    with pytest.raises(InvalidStructureError, match="Invalid type: foo"):
        run({"json_schema": {"type": "foo"}}, 20)
    assert run({"choice": ["yes", "no"]}, 20)[-1].text in ("yes", "no")


def test_adapters_on_the_engine(backend: LocalBackend, tiny_model: Path) -> None:
    chat = ChatSSD(model=str(tiny_model), backend=backend, max_tokens=120)
    form = {"json_schema": PERSON}
    text = chat.invoke("Who?", structured_output=form).text
    assert conforms(json.loads(text), PERSON)
    assert "".join(c.text for c in chat.stream("Who?", structured_output=form)) == text
    llm = SSDLLM(model=str(tiny_model), backend=backend, max_tokens=120, structured_output=form)
    assert llm.complete("Who?").text == text
    with pytest.raises(IncompleteStructureError):
        llm.complete("Who?", max_tokens=2)


# --- the command ---


def test_ssd_generate(run_ssd: RunSSD, tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "person.json").write_text(json.dumps(PERSON), encoding="utf-8")
    (tmp_path / "sum.lark").write_text(SUM_GRAMMAR, encoding="utf-8")

    def answer(*options: str) -> str:
        result = run_ssd(
            "generate", "Who?", "--model", str(tiny_model), "--max-tokens", "120", *options
        )
        assert result.returncode == 0, result.stderr
        return result.stdout.strip()

    from_file = answer("--json-schema", str(tmp_path / "person.json"))
    assert conforms(json.loads(from_file), PERSON)
    assert json.loads(answer("--json-schema", json.dumps(PERSON), "--json"))["text"] == from_file
    assert answer("--choice", "yes, no") in ("yes", "no")
    assert "+" in answer("--grammar", str(tmp_path / "sum.lark"))


def test_ssd_generate_tells_what_went_wrong(run_ssd: RunSSD, tiny_model: Path) -> None:
    args = ["generate", "Who?", "--model", str(tiny_model), "--json"]
    for options, code in (
        (["--regex", "[a-z]{50}", "--max-tokens", "5"], "incomplete_structure"),
        (["--regex", "(a"], "invalid_structure"),
    ):
        result = run_ssd(*args, *options)
        assert result.returncode == 1
        assert json.loads(result.stdout)["error"]["code"] == code
        assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--regex", "a", "--choice", "a,b"], "--regex and --choice"),
        (["--choice", "a,,b"], "--choice 'a,,b'"),
        (["--json-schema", "{"], "json_schema='{'"),
        (["--json-schema", "/no/such/file"], "'/no/such/file' cannot be read"),
        (["--grammar", "/no/such/file"], "--grammar '/no/such/file'"),
        (["--regex", "a", "--stop", "x"], "stop does not go with"),
    ],
)
def test_bad_options_fail_before_anything_loads(
    run_ssd: RunSSD, options: list[str], named: str
) -> None:
    result = run_ssd("generate", "hi", "--model", "/no/such/model", *options)
    assert result.returncode == 2, result.stderr
    assert named in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr
