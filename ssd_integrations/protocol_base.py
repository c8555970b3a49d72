"""What every message of the contract is made from. Import the messages from protocol.py."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
)

from ssd_integrations.errors import MalformedMessageError
from ssd_integrations.validation import describe_validation_error

MAX_LOGPROBS = 20


class WireMessage(BaseModel):
    """A frozen JSON message; unknown fields are an error, not a shrug."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @classmethod
    def from_json(cls, data: str | bytes) -> Self:
        """Parse a message from the wire.

        Raises:
          MalformedMessageError: not JSON, unknown fields, or values out of bounds.
        """
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            raise MalformedMessageError(describe_validation_error(cls.__name__, error)) from error

    def to_json(self) -> str:
        """This message as a JSON string."""
        return self.model_dump_json()


class SparseMessage(WireMessage):
    """A message of which some fields are left out on the wire while they have their default.

    What does not use them looks as it did before there were such fields.
    """

    sparse_fields: ClassVar[frozenset[str]] = frozenset()

    @model_serializer(mode="wrap")
    def _without_defaults(self, serialise: SerializerFunctionWrapHandler) -> dict[str, Any]:
        data: dict[str, Any] = serialise(self)
        fields = type(self).model_fields
        for name in self.sparse_fields:
            if getattr(self, name) == fields[name].default:
                data.pop(name, None)
        return data
