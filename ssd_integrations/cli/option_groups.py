"""A dataclass of options as one parameter of several commands; Typer sees its fields."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from dataclasses import fields, is_dataclass
from inspect import Parameter, Signature, signature
from typing import Any, get_type_hints

Command = Callable[..., None]


def with_option_groups(*, without: Collection[str] = ()) -> Callable[[Command], Command]:
    """Make each dataclass that a command takes a group of options of the command line.

    The fields of the dataclass are annotated as parameters of a command are, and have defaults.

    Parameters:
      without: fields that are no options of this command; they keep their defaults.
    """

    def decorate(command: Command) -> Command:
        hints = get_type_hints(command, include_extras=True)
        groups: dict[str, Any] = {n: kind for n, kind in hints.items() if is_dataclass(kind)}
        shown: list[Parameter] = []
        for name, parameter in signature(command).parameters.items():
            if name in groups:
                shown += [p for p in _parameters(groups[name]) if p.name not in without]
            else:
                shown.append(_keyword(name, parameter.default, hints[name]))

        @functools.wraps(command)
        def run(**given: Any) -> None:
            for name, group in groups.items():
                names = {field.name for field in fields(group)} & given.keys()
                given[name] = group(**{field: given.pop(field) for field in names})
            command(**given)

        run.__signature__ = Signature(shown)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
        return run

    return decorate


def _parameters(group: Any) -> list[Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [_keyword(field.name, field.default, hints[field.name]) for field in fields(group)]


def _keyword(name: str, default: Any, annotation: Any) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
