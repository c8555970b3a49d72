"""The form that an answer must have. Import it from protocol.py."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator
from pydantic_core import from_json, to_json

from ssd_integrations.protocol_base import WireMessage

MAX_STRUCTURE_BYTES = 1_000_000

StructureKind = Literal["json_schema", "regex", "choice", "grammar"]
_KINDS: tuple[StructureKind, ...] = ("json_schema", "regex", "choice", "grammar")


class StructuredOutput(WireMessage):
    """Exactly one of four ways to say what the whole answer looks like.

    ``json_schema`` is a JSON schema, as an object or as JSON text; the answer is JSON without
    whitespace between its parts. ``regex`` is a regular expression that the whole answer matches,
    ``choice`` a list of texts of which the answer is one, ``grammar`` a grammar in Lark or EBNF
    (``::=``) notation. Each has at most ``MAX_STRUCTURE_BYTES`` bytes as JSON.
    """

    json_schema: dict[str, Any] | None = None
    regex: Annotated[str, Field(min_length=1)] | None = None
    choice: tuple[Annotated[str, Field(min_length=1)], ...] | None = None
    grammar: Annotated[str, Field(min_length=1)] | None = None

    @field_validator("json_schema", mode="before")
    @classmethod
    def _as_the_wire_gives_it(cls, value: object) -> object:
        """Only what is JSON, so that a schema means the same in process and on a worker."""
        if value is None:
            return None
        if isinstance(value, str | bytes):
            schema = from_json(value, allow_inf_nan=False)
        else:
            # The brackets leave room for the levels of the request around it.
            data = to_json([[value]], inf_nan_mode="constants")
            schema = from_json(data, allow_inf_nan=False)[0][0]
        if not isinstance(schema, dict):
            raise ValueError("a JSON schema is an object such as {'type': 'object'}")
        return schema

    @model_validator(mode="after")
    def _exactly_one(self) -> StructuredOutput:
        given = [kind for kind in _KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            found = ", ".join(given) or "none"
            raise ValueError(f"give exactly one of {', '.join(_KINDS)}; {found} given")
        if self.choice is not None and not self.choice:
            raise ValueError("choice is empty: give at least one text")
        size = len(to_json(self.value))
        if size > MAX_STRUCTURE_BYTES:
            raise ValueError(
                f"{self.kind} has {size} bytes; at most {MAX_STRUCTURE_BYTES} are taken"
            )
        return self

    @property
    def kind(self) -> StructureKind:
        """Which of the four is given."""
        return next(kind for kind in _KINDS if getattr(self, kind) is not None)

    @property
    def value(self) -> dict[str, Any] | str | tuple[str, ...]:
        """What is given for it."""
        value: dict[str, Any] | str | tuple[str, ...] = getattr(self, self.kind)
        return value
