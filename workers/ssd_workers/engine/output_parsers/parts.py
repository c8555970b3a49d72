"""What an output is made of. Every character of it is in exactly one part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TextPart:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True)
class ReasoningPart:
    """A piece of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """The beginning of a call of a tool that there is; whether it is valid, its end says."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """A piece of the arguments' JSON text. All pieces of an index lie between start and end."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnd:
    """The whole call: ``arguments`` if it is valid, ``fault`` if it is not.

    ``raw`` is what the model wrote for it; ``arguments_text`` the part of it that are, or begin,
    the arguments.
    """

    id: str
    name: str | None
    raw: str
    arguments: dict[str, Any] | None = None
    arguments_text: str | None = None
    fault: str = ""


@dataclass(frozen=True)
class SyntaxPart:
    """Tags and blanks around reasoning and calls, part of neither."""

    text: str


Part = TextPart | ReasoningPart | CallStart | CallArguments | CallEnd | SyntaxPart
