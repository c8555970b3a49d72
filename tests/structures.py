"""What the tests ask answers to look like."""

from __future__ import annotations

from typing import Any

from ssd_integrations.protocol import StructuredOutput

SCHEMAS: dict[str, dict[str, Any]] = {
    "person": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 6},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2},
            "active": {"type": "boolean"},
        },
        "required": ["name", "age", "active"],
        "additionalProperties": False,
    },
    "nested": {
        "$defs": {
            "part": {
                "type": "object",
                "properties": {"code": {"type": "string", "pattern": "^[A-Z]{2}[0-9]{3}$"}},
                "required": ["code"],
                "additionalProperties": False,
            }
        },
        "type": "array",
        "items": {"anyOf": [{"$ref": "#/$defs/part"}, {"type": "null"}]},
        "minItems": 2,
        "maxItems": 3,
    },
    "number": {"type": "integer", "minimum": -20, "maximum": 20},
    "text": {"type": "string", "minLength": 1, "maxLength": 5},
    "choice": {"enum": ["The router", "Grüße", 7, None, {"a": [1]}]},
}
PERSON = StructuredOutput(json_schema=SCHEMAS["person"])
PHONE_PATTERN = r"\+49 [1-9][0-9]{2}-[0-9]{4,6}( ext [0-9])?"
PHONE = StructuredOutput(regex=PHONE_PATTERN)
SUM_GRAMMAR = """
start: number ("+" number){1,3}
number: /[1-9][0-9]?/
"""
