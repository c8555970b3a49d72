"""The grammar of one sequence: masks, drafts, rollback, the end, and what cannot be compiled."""

from __future__ import annotations

import json
import re

import pytest

from ssd_integrations.errors import (
    EngineError,
    IncompleteStructureError,
    InvalidRequestError,
    InvalidStructureError,
)
from ssd_integrations.protocol import StructuredOutput
from ssd_workers.engine.grammar import GrammarState
from ssd_workers.engine.grammar_compiler import GrammarCompiler
from tests.structures import PERSON, SUM_GRAMMAR
from tests.tiny import VOCAB_SIZE, make_tokenizer

TOKENIZER = make_tokenizer()
END = 2


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER, VOCAB_SIZE, {END})


def ids(text: str) -> list[int]:
    found: list[int] = TOKENIZER.encode(text, add_special_tokens=False)
    return found


def allowed(state: GrammarState, drafted: list[int] | None = None) -> set[int]:
    mask = state.allowed(drafted or [])
    assert mask is not None
    return set(mask.nonzero().flatten().tolist())


def texts(state: GrammarState, drafted: list[int] | None = None) -> set[str]:
    return {TOKENIZER.decode([token]) for token in allowed(state, drafted)}


def test_each_row_of_a_draft_has_the_mask_of_its_place(compiler: GrammarCompiler) -> None:
    state = compiler.start(StructuredOutput(regex="[ab]1[cd]"))
    draft = [*ids("a"), *ids("1"), *ids("d")]
    assert texts(state) == {"a", "b"}
    assert texts(state, draft[:1]) == {"1"}
    assert texts(state, draft[:2]) == {"c", "d"}
    assert allowed(state, draft) == {END}
    # Back, and along another draft, whatever was looked at before.
    assert texts(state) == {"a", "b"}
    assert texts(state, ids("b")) == {"1"}


def test_what_cannot_follow_has_no_mask_and_does_no_harm(compiler: GrammarCompiler) -> None:
    state = compiler.start(StructuredOutput(regex="[ab]1[cd]"))
    assert state.allowed(ids("x")) is None
    assert state.allowed([*ids("a"), END, *ids("1")]) is None
    assert state.allowed([10**6]) is None
    assert texts(state) == {"a", "b"}


def test_drafts_are_cut_and_forced_tokens_added(compiler: GrammarCompiler) -> None:
    state = compiler.start(StructuredOutput(regex="[ab]123[cd]"))
    a, one, x = ids("a")[0], ids("1")[0], ids("x")[0]
    rest = [ids(c)[0] for c in "123"]
    assert state.fit([a, one, x], 8, force=False) == [a, one]
    assert state.num_forced == 0
    assert state.fit([x], 8, force=True) == []
    assert state.fit([a, x], 8, force=True) == [a, *rest]
    assert state.num_forced == 3
    assert state.fit([a, one, x], 8, force=True) == [a, *rest]
    assert state.num_forced == 2
    assert state.fit([a], 2, force=True) == [a, one]
    whole = [a, *rest, ids("c")[0]]
    assert state.fit([*whole, END, a], 8, force=True) == [*whole, END]
    assert state.fit(whole, 8, force=True) == whole  # the end is not drafted unasked


def test_the_state_follows_what_was_put_out(compiler: GrammarCompiler) -> None:
    state = compiler.start(StructuredOutput(regex="[ab]{3}[cd]"))
    a, b, c = (ids(letter)[0] for letter in "abc")
    assert state.fit([a, a, a, c], 8, force=True) == [a, a, a, c]
    assert state.advance([a, b], None) is None  # the second was another one
    assert texts(state) == {"a", "b"}
    assert state.advance([b], None) is None
    assert texts(state) == {"c", "d"}
    assert state.advance([c, END], "stop") == "stop"


def test_the_end_is_allowed_only_where_the_text_may_end(compiler: GrammarCompiler) -> None:
    state = compiler.start(StructuredOutput(regex="a(bb)?"))
    a, b = ids("a")[0], ids("b")[0]
    assert END not in allowed(state)
    assert END in allowed(state, [a])
    assert END not in allowed(state, [a, b])
    assert allowed(state, [a, b, b]) == {END}


def test_the_token_limit(compiler: GrammarCompiler) -> None:
    a, b = ids("a")[0], ids("b")[0]

    def at_limit(tokens: list[int]) -> str | None:
        return compiler.start(StructuredOutput(regex="a(bb)?")).advance(tokens, "length")

    assert at_limit([a]) == "length"  # more could have come
    assert at_limit([a, b, b]) == "stop"
    with pytest.raises(IncompleteStructureError, match="complete regex") as caught:
        at_limit([a, b])
    assert "max_tokens" in caught.value.remedy


def test_a_token_that_is_not_allowed_is_an_engine_error(compiler: GrammarCompiler) -> None:
    state = compiler.start(StructuredOutput(regex="ab"))
    with pytest.raises(EngineError, match="does not allow"):
        state.advance(ids("x"), None)


@pytest.mark.parametrize(
    "text", ["yes", "no/maybe", 'q"uo\\te', "new\nline", "한국 🙂", "\t\x00\x7f", "a b", "(x|y)*"]
)
def test_choices_are_taken_literally(compiler: GrammarCompiler, text: str) -> None:
    state = compiler.start(StructuredOutput(choice=("other", text)))
    assert state.advance(ids(text), "length") == "stop"
    with pytest.raises(EngineError):
        compiler.start(StructuredOutput(choice=("other", text))).advance(ids("xyx"), None)


@pytest.mark.parametrize("grammar", [SUM_GRAMMAR, 'root ::= num "+" num\nnum ::= [1-9] [0-9]?'])
def test_grammars_in_lark_and_ebnf(compiler: GrammarCompiler, grammar: str) -> None:
    state = compiler.start(StructuredOutput(grammar=grammar))
    state.advance(ids("12+"), None)
    assert all(text[0] in "123456789" for text in texts(state))
    assert state.advance(ids("7"), "length") == "length"


def test_json_has_no_whitespace_whatever_the_schema_says(compiler: GrammarCompiler) -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}
    loose = {**schema, "x-guidance": {"whitespace_pattern": "[ ]*", "item_separator": ";"}}
    for asked in (schema, loose):
        state = compiler.start(StructuredOutput(json_schema=asked))
        state.advance(ids("[1"), None)
        assert not any(re.search(r"[\s;]", text) for text in texts(state))
        assert state.advance(ids(",2]"), "length") == "stop"


@pytest.mark.parametrize(
    ("structure", "named"),
    [
        ({"json_schema": {"type": "foo"}}, "Invalid type: foo"),
        (
            {"json_schema": {"$schema": "http://json-schema.org/draft-03/schema#", "disallow": 1}},
            "draft 3 of JSON Schema is not supported",
        ),
        ({"json_schema": {"type": "integer", "minimum": 5, "maximum": 3}}, "minimum (5)"),
        ({"json_schema": {"enum": []}}, "{'enum': []}"),
        ({"json_schema": {"$ref": "#"}}, "no text satisfies it"),
        ({"json_schema": {"$ref": "#/$defs/lost"}}, "/$defs/lost"),
        ({"json_schema": {"$ref": "http://localhost/x"}}, "http://localhost/x"),
        ({"json_schema": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        (
            {
                "json_schema": {
                    "type": "array",
                    "uniqueItems": True,
                    "x-guidance": {"lenient": True},
                }
            },
            "uniqueItems",
        ),
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": r"[^\s\S]"}, "no text satisfies it"),
        ({"grammar": "start: lost"}, "lost"),
        ({"grammar": "nothing"}, "start:"),
        ({"grammar": 'root ::= "a'}, "Unexpected end"),
        ({"grammar": "root ::= lost"}, "'lost' not found"),
    ],
)
def test_what_cannot_be_satisfied_is_named(
    compiler: GrammarCompiler, structure: dict[str, object], named: str
) -> None:
    with pytest.raises(InvalidStructureError) as caught:
        compiler.start(StructuredOutput.model_validate(structure))
    assert named in str(caught.value)
    assert next(iter(structure)) in caught.value.message
    assert len(str(caught.value)) < 600


def test_deep_schemas_are_an_error_and_not_a_crash(compiler: GrammarCompiler) -> None:
    text = '{"type":"integer"}'
    for _ in range(150):
        text = '{"type":"array","items":' + text + "}"
    with pytest.raises((InvalidStructureError, ValueError)) as caught:
        compiler.start(StructuredOutput(json_schema=json.loads(text)))
    assert "recursion" in str(caught.value)


def test_compiled_grammars_are_kept_up_to_a_number() -> None:
    compiler = GrammarCompiler(TOKENIZER, VOCAB_SIZE, {END}, capacity=2)
    one, two, three = (StructuredOutput(regex=letter) for letter in "abc")
    for structure in (one, two, one, three):
        compiler.start(structure)
    kept = set(compiler._compiled)
    assert kept == {one.to_json(), three.to_json()}
    first, second = compiler.start(one), compiler.start(one)
    first.advance(ids("a"), None)
    assert texts(second) == {"a"}  # sequences share the grammar, not the state


def test_a_model_without_an_end_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="end-of-sequence"):
        GrammarCompiler(TOKENIZER, VOCAB_SIZE, set()).start(PERSON)
