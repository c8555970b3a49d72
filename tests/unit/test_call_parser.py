"""Calls of tools in a model's text: every format, every split, and nothing lost."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_integrations.protocol import FinishReason, ToolCall
from ssd_workers.engine.output_parsers.formats import FORMATS
from ssd_workers.engine.output_parsers.parts import CallArguments, CallStart, Part
from ssd_workers.engine.output_parsers.thinking import ThinkingParser
from tests.tools import PARAMETERS, parsed, raw_text

KOELN = {"city": 'Köln </tool_call> "}', "days": 3}
ARGUMENTS = json.dumps(KOELN, ensure_ascii=False)
ESCAPED = json.dumps(ARGUMENTS)

# (format, text, the answer's text, the calls)
VALID: dict[str, tuple[str, str, str, list[tuple[str, Any]]]] = {
    "hermes": (
        "hermes",
        f'Let me see.\n<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n'
        '</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n',
        "Let me see.",
        [("get_weather", KOELN), ("now", {})],
    ),
    "hermes, two in one tag, no arguments": (
        "hermes",
        '<tool_call>{"name":"now"}\n{"arguments":null,"name":"now"}</tool_call>Done.',
        "Done.",
        [("now", {}), ("now", {})],
    ),
    "hermes, closing tag missing": (
        "hermes",
        '<tool_call>{"name": "now", "arguments": {}}<tool_call>{"name": "now", "arguments": {}}',
        "",
        [("now", {}), ("now", {})],
    ),
    "hermes, doubled braces": (
        "hermes",
        f'<tool_call>\n{{{{"name": "get_weather", "arguments": {ARGUMENTS}}}}}\n</tool_call>\n'
        '{{"name": "now", "arguments": {}}}\n{{"name": "now", "arguments": {}}',
        "",
        [("get_weather", KOELN), ("now", {}), ("now", {})],
    ),
    "llama3, tag": (
        "llama3",
        f'<|python_tag|>{{"name": "get_weather", "parameters": {ARGUMENTS}}}; '
        '{"name": "now", "parameters": {}}',
        "",
        [("get_weather", KOELN), ("now", {})],
    ),
    "llama3, bare": (
        "llama3",
        f'{{"type": "function", "name": "get_weather", "parameters": {ARGUMENTS}}}',
        "",
        [("get_weather", KOELN)],
    ),
    "mistral": (
        "mistral",
        f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {ARGUMENTS}}}, '
        '{"name": "now", "arguments": {}}]',
        "",
        [("get_weather", KOELN), ("now", {})],
    ),
    "mistral, one object": (
        "mistral",
        'Yes. [TOOL_CALLS] {"name": "now", "arguments": {}, "id": "abc"}',
        "Yes.",
        [("now", {})],
    ),
    "mistral, names before arguments": (
        "mistral-args",
        f"[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}[TOOL_CALLS]now[CALL_ID]aB3[ARGS]{{}}",
        "",
        [("get_weather", KOELN), ("now", {})],
    ),
    "fenced": (
        "hermes",
        f'Sure:\n```json\n{{\n  "name": "get_weather",\n  "arguments": {ARGUMENTS}\n}}\n```\n'
        "That is it.",
        "Sure:\nThat is it.",
        [("get_weather", KOELN)],
    ),
    "fenced list": (
        "json",
        '```\n[{"name": "now", "arguments": {}},\n {"name": "now", "arguments": {}}]\n```',
        "",
        [("now", {}), ("now", {})],
    ),
    "bare, arguments first, as a text": (
        "json",
        f' \n{{"arguments": {ESCAPED}, "name": "get_weather"}}\n'
        '{"name": "now", "arguments": {}}',
        "",
        [("get_weather", KOELN), ("now", {})],
    ),
    "bare, with commas between them": (
        "json",
        '{"name": "now", "arguments": {}}, {"name": "now", "arguments": {}}; and so on',
        "; and so on",
        [("now", {}), ("now", {})],
    ),
    "bare list after text": (
        "json",
        'I call it.\n\n[{"name": "now", "arguments": {}}]\n',
        "I call it.",
        [("now", {})],
    ),
}
# Text that has what calls begin with, and is none.
TEXTS = [
    ("hermes", "Qwen writes <tool_call> and </tool_call> around a call.\n"),
    ("hermes", "a < b <tool_cal <tool_<tool_call"),
    ("hermes", "<tool_call>\nnow()\n</tool_call>"),
    ("llama3", "<|python_tag|>print(1)"),
    ("mistral", "[TOOL_CALLS] are what Mistral writes. [TOOL_CALLS]"),
    ("mistral", "[TOOL_CALLS]now and then\n[1, 2]\n[link](x)"),
    ("mistral-args", "[TOOL_CALLS]now[ARGS]"),
    ("json", '{"answer": 42, "name": "now", "arguments": {}}'),
    ("json", '{"name": "nobody", "arguments": {}}'),
    ("json", '{"name": "now"}'),
    ("json", "{{ name }} {{{"),
    ("json", '{ {"name": "nobody"}}\n{{"name": "now"}}'),
    ("json", '{"name": "now", "description": "The time.", "parameters": {}}'),
    ("json", '{"name": ["now"], "arguments": {}}'),
    ("json", 'Say {"name": "now", "arguments": {}} to call it.'),
    ("json", '```python\n{"name": "now", "arguments": {}}\n```\n```json\n{"a": 1}\n```  \n'),
    ("json", '```json\n{\n"a":\n{"name": "now", "arguments": {}}\n}\n```'),
    ("json", '[[{"name": "now"}]]\n[{"x": 1}]\n``\n````\n{'),
    ("json", '  \n {"name": "no'),
    ("json", ""),
    ("json", " \n "),
]
# (format, text, a part of the reason, the name, what is left as text)
INVALID: list[tuple[str, str, str, str | None, str]] = [
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>ok', "no name", None, "ok"),
    *(
        ("hermes", f"<tool_call>{call}</tool_call>", reason, name, "")
        for call, reason, name in [
            ('{"name": "nobody", "arguments": {}}', "no tool", "nobody"),
            ('{"name": "now", "arguments": [1]}', "not an object", "now"),
            ('{"name": 3, "arguments": {}}', "not a text", None),
            ('{"name": "now", "name": "now"}', "twice", "now"),
            ('{"name": "now", "arguments": {}, "parameters": {}}', "twice", "now"),
            ('{"name": "now", "arguments": {"a": tru}}', "JSON", "now"),
            ('{"name": "now", "arguments": {"a": NaN}}', "JSON", "now"),
            ('{"name": "now", "arguments": {"a": 1,}}', "JSON", "now"),
            ('{"name": "now", "arguments": "{"}', "JSON", "now"),
            ('{"name": "now", "arguments": {"a": ]}}', "']'", "now"),
            ('{"name": "now", "arguments": {"a": 1}', "'<'", "now"),
            ('{"name": "now", "arguments": {"a": "b}}\n', "line", "now"),
            ('{"name": "n\\ud800", "arguments": {}}', "JSON", None),
            ('{"name": "now", "arguments": {"a": 1e999}}', "passed on", "now"),
            ('{"name": "now", "arguments": ' + '{"a":' * 250 + "1" + "}" * 251, "JSON", "now"),
        ]
    ),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"\n</tool_call>x', "line", "now", "x"),
    ("mistral", '[TOOL_CALLS][{"name": "now", "arguments": {a: 1}}]\nthen', "JSON", "now", "then"),
    ("json", '{"name": "now", "arguments": {"a": @}}\nthen', "'@'", "now", "then"),
]  # fmt: skip


def shown(form: str, pieces: list[str], **options: Any) -> tuple[Any, ...]:
    """All that does not depend on how the text is cut into pieces."""
    output, parts = parsed(form, pieces, **options)
    assert raw_text(parts) == "".join(pieces)
    streamed: dict[int, list[str]] = {}
    for part in parts:
        if isinstance(part, CallStart):
            streamed[part.index] = [part.id, part.name, ""]
        elif isinstance(part, CallArguments):
            streamed[part.index][2] += part.text
    for call in output.tool_calls:
        (found,) = [
            text for id_, name, text in streamed.values() if (id_, name) == (call.id, call.name)
        ]
        assert json.loads(found) == call.arguments
    return output.text, output.reasoning, output.tool_calls, output.invalid_tool_calls, streamed


def every_split(form: str, text: str, **options: Any) -> tuple[Any, ...]:
    """What is found, after making sure that it is the same for every cut."""
    whole = shown(form, [text], **options)
    for cut in range(1, len(text)):
        assert shown(form, [text[:cut], text[cut:]], **options) == whole, text[:cut]
    assert shown(form, list(text), **options) == whole
    return whole


@pytest.mark.parametrize("name", VALID)
def test_calls_in_every_format(name: str) -> None:
    form, text, answer, calls = VALID[name]
    found, _, valid, invalid, streamed = every_split(form, text)
    assert found == answer
    assert [(call.name, call.arguments) for call in valid] == calls
    assert [call.id for call in valid] == [f"id{n}" for n in range(len(calls))]
    assert not invalid
    assert list(streamed) == list(range(len(calls)))


@pytest.mark.parametrize(("form", "text"), TEXTS)
def test_what_is_no_call_is_text_unchanged(form: str, text: str) -> None:
    found, _, valid, invalid, streamed = every_split(form, text)
    assert found == text
    assert not valid
    assert not invalid
    assert not streamed


@pytest.mark.parametrize(("form", "text", "reason", "name", "rest"), INVALID)
def test_invalid_calls_are_told_apart(
    form: str, text: str, reason: str, name: str | None, rest: str
) -> None:
    found, _, valid, invalid, _ = every_split(form, text)
    assert found == rest
    assert not valid
    (call,) = invalid
    assert reason in call.reason
    assert call.name == name
    assert call.text.strip() in text


@pytest.mark.parametrize("reason", ["length", "cancelled"])
@pytest.mark.parametrize("name", VALID)
def test_what_is_cut_off_is_never_valid(name: str, reason: FinishReason) -> None:
    form, text, _, calls = VALID[name]
    for end in range(len(text)):
        output, parts = parsed(form, list(text[:end]), reason=reason)
        assert raw_text(parts) == text[:end]
        assert len(output.invalid_tool_calls) <= 1
        for call, (called, arguments) in zip(output.tool_calls, calls, strict=False):
            assert (call.name, call.arguments) == (called, arguments)
        for bad in output.invalid_tool_calls:
            expected = "token limit" if reason == "length" else "cancelled"
            assert expected in bad.reason
            assert not bad.arguments or bad.arguments in text


def test_a_trigger_at_the_token_limit_is_a_call_that_was_cut_off() -> None:
    output, _ = parsed("hermes", ["<tool_call>", "\n"], reason="length")
    assert [call.text for call in output.invalid_tool_calls] == ["<tool_call>\n"]
    assert output.text == ""


def test_one_call_only_if_more_are_not_wanted() -> None:
    form, text, _, _ = VALID["hermes"]
    _, _, valid, invalid, streamed = every_split(form, text, parallel=False)
    assert [call.name for call in valid] == ["get_weather"]
    assert [(call.name, call.arguments) for call in invalid] == [("now", "{}")]
    assert "one call more" in invalid[0].reason
    assert len(streamed) == 1


def test_arguments_come_as_they_are_written() -> None:
    parts = parsed("hermes", list('<tool_call>{"name": "now", "arguments": {"a": [1, 2]}}'))[1]
    texts = [part.text for part in parts if isinstance(part, CallArguments)]
    assert "".join(texts) == '{"a": [1, 2]}'
    assert len(texts) == len("".join(texts))


def test_text_is_not_held_back_longer_than_needed() -> None:
    def given_out(form: str, text: str) -> str:
        return "".join(
            part.text for part in _pushed(form, text) if type(part).__name__ == "TextPart"
        )

    assert given_out("hermes", "The answer is 42") == "The answer is 42"
    assert given_out("hermes", "a <tool") == "a"
    assert given_out("hermes", "a <b> c") == "a <b> c"
    assert given_out("json", '{"answer": 4') == '{"answer": 4'
    assert given_out("json", '{"name": "nobody", ') == '{"name": "nobody",'


def _pushed(form: str, text: str) -> list[Part]:
    from ssd_workers.engine.output_parsers.calls import CallParser

    parser = CallParser(FORMATS[form], {"now"}, parallel=True, make_id=str)
    return parser.push(text)


# What JSON can say; UTF-8 has no lone surrogates.
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
TRICKY = st.sampled_from(["</tool_call>", '"}}', "\\", "```", "[TOOL_CALLS]", "\n{", "</think>"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | NAMES | TRICKY,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES | TRICKY, inner, max_size=3),
    max_leaves=6,
)
CALLS = st.builds(
    ToolCall,
    id=st.just("i"),
    name=st.sampled_from(sorted(PARAMETERS)),
    arguments=st.dictionaries(NAMES | TRICKY, VALUES, max_size=3),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(CALLS, min_size=1, max_size=3), st.sampled_from(sorted(FORMATS)), st.data())
def test_what_a_format_writes_its_parser_reads(
    calls: list[ToolCall], form: str, data: st.DataObject
) -> None:
    text = FORMATS[form].render(tuple(calls))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    pieces = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    answer, _, valid, invalid, _ = shown(form, pieces)
    assert answer == ""
    assert not invalid
    assert [(c.name, c.arguments) for c in valid] == [(c.name, c.arguments) for c in calls]


FRAGMENTS = st.sampled_from(
    ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "```", "```json\n",
     '{"name": "now", "arguments": {', '{"name": "now"', '"arguments": ', "{}", "}", "]", "[", "{",
     '"', "\\", ",", ":", "; ", "\n", " ", "1", "now", "<think>", "</think>", "é", "🙂", "\x00",
     '{"name": "now", "arguments": {}}', '{{"name": "now", "arguments": {}', "}}", "true", "<tool",
     "`"]
)  # fmt: skip


@settings(max_examples=600, deadline=None)
@given(
    st.lists(FRAGMENTS | st.text(max_size=4), max_size=25),
    st.sampled_from(sorted(FORMATS)),
    st.sampled_from(["stop", "length", "cancelled"]),
    st.sampled_from([None, False, True]),
    st.booleans(),
)
def test_any_text_is_accounted_for_and_its_pieces_do_not_matter(
    pieces: list[str], form: str, reason: FinishReason, opened: bool | None, parallel: bool
) -> None:
    text = "".join(pieces)

    def run(pieces: list[str]) -> tuple[Any, ...]:
        thinking = None if opened is None else ThinkingParser(opened=opened)
        return shown(form, pieces, reason=reason, parallel=parallel, thinking=thinking)

    whole = run([text])
    assert run(pieces) == whole
    assert run(list(text)) == whole
