"""The schemas of the extraction cases: every string, list and number has a longest form."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def _text(longest: int) -> Schema:
    return {"type": "string", "minLength": 1, "maxLength": longest}


def _object(**properties: Schema) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _list(items: Schema, most: int) -> Schema:
    return {"type": "array", "items": items, "maxItems": most}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


_DATE: Schema = {"type": "string", "format": "date"}
_TIME: Schema = {"type": "string", "pattern": "^([01][0-9]|2[0-3]):[0-5][0-9]$"}
# As text: a float is no place for money.
_AMOUNT: Schema = {"type": "string", "pattern": r"^[0-9]{1,6}\.[0-9]{2}$"}
_CURRENCY: Schema = {"enum": ["EUR", "USD", "GBP", "KRW"]}
_ADDRESS = _object(street=_text(48), postcode=_text(10), city=_text(32))


def _whole(most: int) -> Schema:
    return {"type": "integer", "minimum": 0, "maximum": most}


SCHEMAS: dict[str, Schema] = {
    "order": _object(
        customer=_text(40),
        company=_or_null(_text(40)),
        lines=_list(_object(article=_text(48), quantity=_whole(999)), 4),
        deliver_by=_or_null(_DATE),
        deliver_to=_ADDRESS,
    ),
    "invoice": _object(
        number=_text(20),
        supplier=_text(40),
        issued=_DATE,
        due=_or_null(_DATE),
        currency=_CURRENCY,
        lines=_list(_object(description=_text(48), quantity=_whole(999), unit_price=_AMOUNT), 4),
        total=_AMOUNT,
    ),
    "appointment": _object(
        subject=_text(60),
        date=_DATE,
        start=_TIME,
        end=_or_null(_TIME),
        place=_text(48),
        people=_list(_text(40), 4),
    ),
    "change_of_address": _object(
        customer=_text(40),
        customer_number=_text(16),
        valid_from=_DATE,
        old=_ADDRESS,
        new=_ADDRESS,
        phone=_or_null(_text(24)),
    ),
    "complaint": _object(
        customer=_text(40),
        order_number=_text(16),
        article=_text(48),
        kind={"enum": ["damaged", "late", "wrong_article", "missing_parts"]},
        received=_or_null(_DATE),
        wish={"enum": ["refund", "replacement", "repair"]},
        amount=_or_null(_AMOUNT),
        currency=_or_null(_CURRENCY),
    ),
}
