"""Which schemas can be satisfied by a finite text."""

from __future__ import annotations

from typing import Any

import pytest

from ssd_integrations.errors import InvalidStructureError
from ssd_integrations.protocol import StructuredOutput
from ssd_workers.engine.grammar_compiler import GrammarCompiler
from ssd_workers.engine.schema_recursion import is_endless
from tests.tiny import VOCAB_SIZE, make_tokenizer


def node(**changes: Any) -> dict[str, Any]:
    """An object that has another of its kind in it."""
    made = {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}
    return {**made, **changes}


def pair(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    return {"$defs": {"a": first, "b/c": second}, "$ref": "#/$defs/a"}


A, B = {"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b~1c"}
LIST = {"type": "array", "items": {"$ref": "#"}, "minItems": 1}
X = {"$ref": "#/properties/x"}
ENDLESS = [
    {"$ref": "#"},
    node(),
    node(properties={"next": {"allOf": [{"$ref": "#"}, {}]}}),
    node(properties={"next": {"anyOf": [{"$ref": "#"}, LIST]}}),
    {"type": "array", "items": {"$ref": "#"}, "minItems": 2},
    {"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1},
    pair(node(properties={"next": B}), node(properties={"next": A})),
    {"type": ["object"], "properties": {"x": node(properties={"next": X})}, "required": ["x"]},
]
FINITE = [
    {},
    node(required=[]),
    node(type=["object", "null"]),
    node(properties={"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}),
    node(properties={"next": {"oneOf": [{"type": "null"}, {"$ref": "#"}]}}),
    {"type": "array", "items": {"$ref": "#"}},
    {"type": "array", "prefixItems": [{"type": "null"}], "items": {"$ref": "#"}, "minItems": 1},
    pair(node(properties={"next": B}), node(properties={"next": A}, required=[])),
    {"$ref": "#/$defs/lost"},
    {"properties": {"$ref": {"type": "string"}}, "required": ["$ref"], "type": "object"},
]


@pytest.mark.parametrize("schema", ENDLESS)
def test_endless(schema: dict[str, Any]) -> None:
    assert is_endless(schema)
    compiler = GrammarCompiler(make_tokenizer(), VOCAB_SIZE, {2})
    with pytest.raises(InvalidStructureError):
        compiler.start(StructuredOutput(json_schema=schema))


@pytest.mark.parametrize("schema", FINITE)
def test_finite(schema: dict[str, Any]) -> None:
    assert not is_endless(schema)


def test_very_many_references_are_not_searched() -> None:
    """Each of these needs the next one: a search would go through them once for each."""
    chain = {f"d{i}": node(properties={"next": {"$ref": f"#/$defs/d{i + 1}"}}) for i in range(9000)}
    assert not is_endless({"$defs": chain, "$ref": "#/$defs/d0"})
