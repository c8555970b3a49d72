"""pydantic's validation errors in plain sentences, without secrets."""

from __future__ import annotations

from pydantic import ValidationError

#: Fields whose value no message shows, whatever was put into them.
_SECRET_FIELDS = frozenset({"broker_url"})


def describe_validation_error(what: str, error: ValidationError) -> str:
    """One plain sentence from a pydantic error: field, value (cut to 80 characters), fault."""
    parts = []
    for item in error.errors(include_url=False)[:5]:
        field = ".".join(str(part) for part in item["loc"]) or what
        value = "***" if _SECRET_FIELDS.intersection(item["loc"]) else _shown(item.get("input"))
        fault = item["msg"].removeprefix("Value error, ")
        parts.append(fault if field == what else f"{field}={value}: {fault}")
    return f"Invalid {what}: " + "; ".join(parts) + "."


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # thousands of digits, or of levels
        return f"<{type(value).__name__}>"
    return text if len(text) <= 80 else text[:77] + "..."
