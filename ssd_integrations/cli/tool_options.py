"""The options of `ssd generate` that say what the model may call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer
from pydantic_core import from_json

from ssd_integrations.cli.structure_options import read_text
from ssd_integrations.errors import InvalidRequestError

_PANEL = "Tools"

ToolFile = Annotated[
    list[str] | None,
    typer.Option(
        "--tool",
        metavar="FILE",
        help="A tool, or a list of them, as JSON: name, description, parameters; may be repeated.",
        rich_help_panel=_PANEL,
    ),
]
ToolChoice = Annotated[
    str,
    typer.Option(
        "--tool-choice",
        metavar="auto|none|required|NAME",
        help="Whether the model calls a tool, and which.",
        rich_help_panel=_PANEL,
    ),
]
ParallelToolCalls = Annotated[
    bool,
    typer.Option(
        "--parallel-tool-calls/--no-parallel-tool-calls",
        help="Several calls in one answer.",
        rich_help_panel=_PANEL,
    ),
]


@dataclass(frozen=True)
class ToolOptions:
    """Tools from files; the names are unique over all of them."""

    tool: ToolFile = None
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: ParallelToolCalls = True

    def fields(self) -> dict[str, Any]:
        """The request's fields of these names.

        Raises:
          InvalidRequestError: a file that cannot be read, or holds no tool.
        """
        tools = [tool for name in self.tool or () for tool in _read(name)]
        return {
            "tools": tools,
            "tool_choice": self.tool_choice,
            "parallel_tool_calls": self.parallel_tool_calls,
        }


def _read(name: str) -> list[dict[str, Any]]:
    text = read_text("--tool", name)
    try:
        found = from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequestError(
            f"--tool {name!r} is not JSON: {error}.", remedy="Correct the file."
        ) from error
    tools = found if isinstance(found, list) else [found]
    for tool in tools:
        if not isinstance(tool, dict):
            raise InvalidRequestError(
                f"--tool {name!r} holds {tool!r:.80}, which is no tool.",
                remedy='A tool is an object such as {"name": "now", "description": "The time."}.',
            )
    # As the OpenAI interface nests them, too.
    return [tool["function"] if set(tool) == {"type", "function"} else tool for tool in tools]
