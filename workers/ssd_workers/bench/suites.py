"""Suites of prompts, and what a prompt is made of.

A suite is a folder of JSON lines that comes with the package (one file for each category), a file
of the same kind, or ``similar-reports``, which code writes.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from ssd_integrations.errors import InvalidRequestError
from ssd_integrations.validation import describe_validation_error
from ssd_workers.bench.similar_reports import similar_reports

SHIPPED = ("business", "general")
SIMILAR_REPORTS = "similar-reports"
SUITES = (*SHIPPED, SIMILAR_REPORTS)

_DATA = "data"


class Turn(BaseModel):
    """A system message or one turn of the user."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    role: Literal["system", "user"]
    content: str = Field(min_length=1, max_length=100_000)


class Item(BaseModel):
    """One conversation to be answered by the model under test.

    ``messages`` are at most one system message, then the user's turns, which are answered one
    after the other; every answer has at most ``max_tokens`` tokens.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")
    category: str = Field(pattern=r"^[a-z0-9][a-z0-9-]{0,63}$")
    language: str = Field(pattern=r"^[a-z]{2,3}(-[a-z]{2,3})?$")
    messages: tuple[Turn, ...] = Field(min_length=1, max_length=32)
    max_tokens: int = Field(ge=1, le=8192)

    @field_validator("messages")
    @classmethod
    def _system_first(cls, messages: tuple[Turn, ...]) -> tuple[Turn, ...]:
        roles = [turn.role for turn in messages]
        if "system" in roles[1:]:
            raise ValueError("a system message can only be the first one")
        if "user" not in roles:
            raise ValueError("there is no turn of the user to answer")
        return messages

    @property
    def system(self) -> str | None:
        """The system message, if there is one."""
        return self.messages[0].content if self.messages[0].role == "system" else None

    @property
    def user_turns(self) -> tuple[str, ...]:
        """What the user says, turn by turn."""
        return tuple(turn.content for turn in self.messages if turn.role == "user")


def load_suite(name: str, limit: int | None = None) -> list[Item]:
    """The prompts of the suite ``name``: one of :data:`SUITES`, or the path of a JSON lines file.

    With a ``limit`` the categories take turns until it is reached; the order stays the suite's.

    Raises:
      InvalidRequestError: there is no such suite, a line of it is not an :class:`Item`, an id
        occurs twice, or ``limit`` is below 1.
    """
    if limit is not None and limit < 1:
        raise InvalidRequestError(f"limit={limit}: take at least one prompt.")
    items = _items(name)
    return items if limit is None else _spread(items, limit)


def _items(name: str) -> list[Item]:
    if name == SIMILAR_REPORTS:
        return [Item.model_validate(fields) for fields in similar_reports()]
    if name in SHIPPED:
        folder = files("ssd_workers.bench").joinpath(_DATA, name)
        sources: list[Traversable] = sorted(folder.iterdir(), key=lambda file: file.name)
    else:
        path = Path(name).expanduser()
        if not path.is_file():
            close = difflib.get_close_matches(name, SUITES, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise InvalidRequestError(
                f"There is no suite {name!r}.{hint}",
                remedy=f"Give {', '.join(SUITES)} or the path of a JSON lines file.",
            )
        sources = [path]
    items = [item for source in sources for item in _parse(source)]
    _check(name, items)
    return items


def _parse(source: Traversable) -> list[Item]:
    items = []
    try:
        lines = source.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"The suite {source.name} cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"line {number} of {source.name}"
        try:
            items.append(Item.model_validate(json.loads(line)))
        except (json.JSONDecodeError, RecursionError) as error:
            why = error.msg if isinstance(error, json.JSONDecodeError) else "too many levels"
            raise InvalidRequestError(
                f"Invalid {where}: not JSON ({why}).",
                remedy="Write one JSON object per line: id, category, language, messages, "
                "max_tokens.",
            ) from error
        except ValidationError as error:
            raise InvalidRequestError(describe_validation_error(where, error)) from error
    return items


def _check(name: str, items: Sequence[Item]) -> None:
    if not items:
        raise InvalidRequestError(f"The suite {name!r} has no prompts.")
    seen: set[str] = set()
    for item in items:
        if item.id in seen:
            raise InvalidRequestError(f"The suite {name!r} has the id {item.id!r} twice.")
        seen.add(item.id)


def _spread(items: Sequence[Item], limit: int) -> list[Item]:
    queues: dict[str, list[Item]] = {}
    for item in items:
        queues.setdefault(item.category, []).append(item)
    taken: set[str] = set()
    while len(taken) < min(limit, len(items)):
        for queue in queues.values():
            if queue and len(taken) < limit:
                taken.add(queue.pop(0).id)
    return [item for item in items if item.id in taken]
