"""The options of `ssd generate` that say what the answer looks like."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ssd_integrations.errors import InvalidRequestError
from ssd_integrations.protocol import MAX_STRUCTURE_BYTES

_PANEL = "Form of the answer (one of these)"

JSONSchema = Annotated[
    str | None,
    typer.Option(
        "--json-schema",
        metavar="FILE|TEXT",
        help="JSON that satisfies this schema.",
        rich_help_panel=_PANEL,
    ),
]
Regex = Annotated[
    str | None,
    typer.Option(help="Text that matches as a whole.", rich_help_panel=_PANEL),
]
Choice = Annotated[
    str | None,
    typer.Option(metavar="A,B,...", help="One of these texts.", rich_help_panel=_PANEL),
]
Grammar = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Text of this Lark or EBNF grammar.", rich_help_panel=_PANEL),
]


@dataclass(frozen=True)
class StructureOptions:
    """At most one of them is given."""

    json_schema: JSONSchema = None
    regex: Regex = None
    choice: Choice = None
    grammar: Grammar = None

    def structured_output(self) -> dict[str, Any] | None:
        """The request's field of this name; None if nothing is asked for.

        Raises:
          InvalidRequestError: two options at once, or a file that cannot be read.
        """
        given = {name: value for name, value in vars(self).items() if value is not None}
        if len(given) > 1:
            names = " and ".join("--" + name.replace("_", "-") for name in given)
            raise InvalidRequestError(f"{names} are given together.", remedy="Give one of them.")
        if self.json_schema is not None:
            is_text = self.json_schema.lstrip().startswith("{")
            text = self.json_schema if is_text else read_text("--json-schema", self.json_schema)
            return {"json_schema": text}
        if self.choice is not None:
            return {"choice": _split(self.choice)}
        if self.grammar is not None:
            return {"grammar": read_text("--grammar", self.grammar)}
        return given or None


def _split(choices: str) -> list[str]:
    texts = [text.strip() for text in choices.split(",")]
    if "" in texts:
        raise InvalidRequestError(
            f"--choice {choices!r} has an empty text.",
            remedy="Give texts with commas between them, such as --choice yes,no.",
        )
    return texts


def read_text(option: str, name: str) -> str:
    """The text of the file ``name`` that was given for ``option``.

    Raises:
      InvalidRequestError: it cannot be read, is too large or no UTF-8.
    """
    try:
        with Path(name).open("rb") as file:
            data = file.read(MAX_STRUCTURE_BYTES + 1)
        if len(data) > MAX_STRUCTURE_BYTES:
            raise InvalidRequestError(
                f"{option} {name}: the file has more than {MAX_STRUCTURE_BYTES} bytes."
            )
        return data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        fault = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise InvalidRequestError(
            f"{option} {name!r} cannot be read: {fault}.", remedy="Name a text file in UTF-8."
        ) from error
