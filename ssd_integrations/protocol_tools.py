"""Tools that a model may call, and the calls that it makes. Import them from protocol.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field, field_validator
from pydantic_core import from_json, to_json

from ssd_integrations.protocol_base import WireMessage
from ssd_integrations.protocol_structure import MAX_STRUCTURE_BYTES

MAX_TOOLS = 128
#: What ``tool_choice`` can say besides a tool's name.
TOOL_CHOICES = ("auto", "none", "required")
_NO_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}


class Tool(WireMessage):
    """A function that the model may call; running it is the application's business.

    ``parameters`` is a JSON schema of an object, the arguments; none, or an empty one, is a tool
    without arguments. Arguments that the schema does not name are not allowed unless it says
    ``additionalProperties``. With ``strict`` the same holds for the objects within it.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    description: str = Field(default="", max_length=MAX_STRUCTURE_BYTES)
    parameters: dict[str, Any] = Field(default_factory=lambda: dict(_NO_PARAMETERS))
    strict: bool = False

    @field_validator("name", mode="after")
    @classmethod
    def _not_a_choice(cls, value: str) -> str:
        if value in TOOL_CHOICES:
            raise ValueError(f"{value!r} is a value of tool_choice and cannot name a tool")
        return value

    @field_validator("parameters", mode="before")
    @classmethod
    def _as_the_wire_gives_them(cls, value: object) -> object:
        if value is None or value == {}:
            return dict(_NO_PARAMETERS)
        if not isinstance(value, dict):
            raise ValueError("parameters are a JSON schema such as {'type': 'object'}")
        schema = wire_object(value)
        if schema.setdefault("type", "object") != "object":
            raise ValueError(
                f"parameters have the type {schema['type']!r}: arguments are an object, so it "
                "has to be 'object'"
            )
        return schema

    @field_validator("strict", mode="before")
    @classmethod
    def _none_is_no(cls, value: object) -> object:
        return False if value is None else value

    def as_function(self) -> dict[str, Any]:
        """This tool as chat templates expect it."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
        }
        return {"type": "function", "function": function}


class ToolCall(WireMessage):
    """A call that the assistant makes, or made earlier in the conversation."""

    id: str = Field(max_length=256)
    name: str = Field(min_length=1, max_length=256)
    arguments: dict[str, Any]

    @field_validator("arguments", mode="after")
    @classmethod
    def _as_the_wire_gives_them(cls, value: dict[str, Any]) -> dict[str, Any]:
        return wire_object(value)


class InvalidToolCall(WireMessage):
    """What was meant as a call and is none.

    ``text`` is what the model wrote for it, ``name`` and ``arguments`` (JSON text, possibly cut
    off) are what could be made out, ``reason`` says what is wrong.
    """

    id: str = Field(max_length=256)
    name: str | None = None
    arguments: str | None = None
    text: str
    reason: str


class ToolCallDelta(WireMessage):
    """A piece of a call. ``id`` and ``name`` come once, with the first piece of an ``index``.

    The pieces' ``arguments`` add up to JSON text. Only the end of the stream says whether it is
    a call or an invalid one.
    """

    index: int = Field(ge=0)
    id: str | None = None
    name: str | None = None
    arguments: str = ""


def wire_object(value: dict[str, Any]) -> dict[str, Any]:
    """``value``, if it is only what JSON can say: it means the same in process and on a worker.

    Raises:
      ValueError: it is not JSON, or too deep for a message.
    """
    # The brackets leave room for the levels of the messages around it.
    data = to_json([[[[[[value]]]]]], inf_nan_mode="constants")
    found: dict[str, Any] = from_json(data, allow_inf_nan=False)[0][0][0][0][0][0]
    return found


def check_tools(tools: Sequence[Tool], choice: str) -> None:
    """Raise ValueError if tools do not go together, or ``choice`` names none of them."""
    if len(tools) > MAX_TOOLS:
        raise ValueError(f"{len(tools)} tools are given; at most {MAX_TOOLS} are taken")
    names = [tool.name for tool in tools]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two tools have the name {name!r}: give each one of its own")
    size = sum(len(to_json(tool.as_function())) for tool in tools)
    if size > MAX_STRUCTURE_BYTES:
        raise ValueError(f"the tools have {size} bytes; at most {MAX_STRUCTURE_BYTES} are taken")
    if choice == "required" and not tools:
        raise ValueError("tool_choice='required' without tools: give at least one")
    if choice not in TOOL_CHOICES and choice not in names:
        known = ", ".join([*TOOL_CHOICES, *names])
        raise ValueError(f"tool_choice={choice!r} is none of {known}")
