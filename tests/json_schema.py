"""Whether a value satisfies a JSON schema: the part of the language that the tests use."""

from __future__ import annotations

import re
from typing import Any

_TYPES: dict[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
}
_KNOWN = {
    "type", "enum", "const", "anyOf", "$ref", "$defs", "properties", "required",
    "additionalProperties", "items", "minItems", "maxItems", "minLength", "maxLength", "pattern",
    "minimum", "maximum",
}  # fmt: skip


def conforms(value: Any, schema: dict[str, Any], root: dict[str, Any] | None = None) -> bool:
    """Whether ``value`` satisfies ``schema``; fails loudly on a keyword it does not know."""
    root = schema if root is None else root
    assert set(schema) <= _KNOWN, set(schema) - _KNOWN
    if "$ref" in schema:
        return conforms(value, root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    if "anyOf" in schema and not any(conforms(value, part, root) for part in schema["anyOf"]):
        return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    if "const" in schema and value != schema["const"]:
        return False
    if "type" in schema and not _is_a(value, schema["type"]):
        return False
    if isinstance(value, dict):
        return _object(value, schema, root)
    if isinstance(value, list):
        return _within(len(value), schema, "Items") and all(
            conforms(item, schema.get("items", {}), root) for item in value
        )
    if isinstance(value, str):
        found = re.search(schema.get("pattern", ""), value)
        return _within(len(value), schema, "Length") and found is not None
    if isinstance(value, int | float) and not isinstance(value, bool):
        return schema.get("minimum", value) <= value <= schema.get("maximum", value)
    return True


def _object(value: dict[str, Any], schema: dict[str, Any], root: dict[str, Any]) -> bool:
    properties = schema.get("properties", {})
    if not set(schema.get("required", ())) <= set(value):
        return False
    if schema.get("additionalProperties") is False and not set(value) <= set(properties):
        return False
    return all(conforms(item, properties.get(key, {}), root) for key, item in value.items())


def _is_a(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _TYPES[kind])


def _within(size: int, schema: dict[str, Any], what: str) -> bool:
    return bool(schema.get(f"min{what}", 0) <= size <= schema.get(f"max{what}", size))
