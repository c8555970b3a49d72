"""Whether a value satisfies a JSON schema: jsonschema's validators, exact where Python is not.

The standard has patterns in the dialect of ECMA-262, where ``\\d`` and ``\\w`` are ASCII, and
multiples of decimal numbers; Python's own ``re`` and floats judge both otherwise.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from decimal import Decimal, localcontext
from typing import Any

import regex
from jsonschema import Draft7Validator, Draft202012Validator, FormatChecker, ValidationError
from jsonschema.validators import extend, validator_for

_ASCII = {
    r"\d": "[0-9]", r"\D": "[^0-9]", r"\w": "[a-zA-Z0-9_]", r"\W": "[^a-zA-Z0-9_]",
}  # fmt: skip
_FORMATS = FormatChecker(["email", "ipv4", "ipv6", "uuid"])


def faults(value: Any, schema: dict[str, Any]) -> list[str]:
    """What is wrong with ``value``; without a ``$schema`` the draft is 2020-12."""
    kind = validator_for(schema, default=Draft202012Validator)
    validator = _VALIDATORS[kind](schema, format_checker=_FORMATS)
    return [error.message for error in validator.iter_errors(value)]


def conforms(value: Any, schema: dict[str, Any]) -> bool:
    """Whether ``value`` satisfies ``schema``."""
    return not faults(value, schema)


def _found(pattern: str, text: str) -> bool:
    translated = re.sub(r"\\.", lambda escape: _ASCII.get(escape[0], escape[0]), pattern)
    # Sets within sets, as the translation makes them, are of version 1.
    return regex.search(translated, text, regex.VERSION1) is not None


def _pattern(validator: Any, pattern: str, value: Any, schema: Any) -> Iterator[ValidationError]:
    if validator.is_type(value, "string") and not _found(pattern, value):
        yield ValidationError(f"{value!r} does not match {pattern!r}")


def _pattern_properties(
    validator: Any, patterns: dict[str, Any], value: Any, schema: Any
) -> Iterator[ValidationError]:
    if validator.is_type(value, "object"):
        for pattern, inner in patterns.items():
            for name in filter(lambda name: _found(pattern, name), value):
                yield from validator.descend(value[name], inner, path=name)


def _additional_properties(
    validator: Any, inner: Any, value: Any, schema: dict[str, Any]
) -> Iterator[ValidationError]:
    if validator.is_type(value, "object"):
        patterns = schema.get("patternProperties", {})
        for name in set(value) - set(schema.get("properties", {})):
            if not any(_found(pattern, name) for pattern in patterns):
                yield from validator.descend(value[name], inner, path=name)


def _multiple_of(
    validator: Any, factor: float, value: Any, schema: Any
) -> Iterator[ValidationError]:
    if validator.is_type(value, "number"):
        with localcontext(prec=1000):
            if Decimal(json.dumps(value)) % Decimal(json.dumps(factor)):
                yield ValidationError(f"{value!r} is not a multiple of {factor!r}")


_VALIDATORS = {
    kind: extend(
        kind,
        {
            "pattern": _pattern,
            "patternProperties": _pattern_properties,
            "additionalProperties": _additional_properties,
            "multipleOf": _multiple_of,
        },
    )
    for kind in (Draft7Validator, Draft202012Validator)
}
