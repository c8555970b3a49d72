"""Schemas that demand themselves: every text of them would be infinitely long."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

_ALTERNATIVES = ("anyOf", "oneOf")
# Rounds times references: more than this and the search could take seconds.
_MAX_REFERENCES = 200


def is_endless(schema: dict[str, Any]) -> bool:
    """Whether no finite JSON text can satisfy ``schema``, because of how it refers to itself.

    A required property that is the object itself is endless; an optional one, or one that may be
    null as well, is not. What is wrong in other ways is not judged here, nor are schemas of very
    many references.
    """
    references = set(_references(schema))
    if len(references) > _MAX_REFERENCES:
        return False
    finite: set[str] = set()
    # Each round finds the references whose texts need only those found so far.
    while found := {
        name
        for name in references - finite
        if _is_finite(_resolve(schema, name), finite, references)
    }:
        finite |= found
    return not _is_finite(schema, finite, references)


def _is_finite(part: Any, finite: set[str], references: set[str]) -> bool:
    if not isinstance(part, dict):
        return True

    def check(inner: Any) -> bool:
        return _is_finite(inner, finite, references)

    name = part.get("$ref")
    if isinstance(name, str) and name in references and name not in finite:
        return False
    for key in _ALTERNATIVES:
        options = part.get(key)
        if isinstance(options, list) and options and not any(map(check, options)):
            return False
    if isinstance(part.get("allOf"), list) and not all(map(check, part["allOf"])):
        return False
    if not _may_only_be(part, "object") and not _may_only_be(part, "array"):
        return True
    return all(map(check, _demanded(part)))


def _demanded(part: dict[str, Any]) -> Iterator[Any]:
    """The schemas of what an object or array must have in it."""
    properties, required = part.get("properties"), part.get("required")
    if _may_only_be(part, "object") and isinstance(properties, dict) and isinstance(required, list):
        yield from (properties[name] for name in required if name in properties)
    least = part.get("minItems")
    if _may_only_be(part, "array") and isinstance(least, int):
        first = part.get("prefixItems")
        first = first if isinstance(first, list) else []
        yield from first[:least]
        if least > len(first) and "items" in part:
            yield part["items"]


def _may_only_be(part: dict[str, Any], kind: str) -> bool:
    return part.get("type") in (kind, [kind])


def _references(part: Any) -> Iterator[str]:
    """The references within the document, wherever they stand."""
    if isinstance(part, dict):
        name = part.get("$ref")
        if isinstance(name, str) and name.startswith("#"):
            yield name
        for inner in part.values():
            yield from _references(inner)
    elif isinstance(part, list):
        for inner in part:
            yield from _references(inner)


def _resolve(schema: Any, name: str) -> Any:
    """What ``name`` (``#/$defs/x``) points to; None where there is nothing."""
    found = schema
    for step in name.removeprefix("#").split("/")[1:]:
        key = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found.get(key)
        elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        else:
            return None
    return found
