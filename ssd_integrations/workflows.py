"""Workflows: products built on the adapters, found by entry point.

A distribution offers one by declaring an entry point in the group
``ssd_integrations.workflows`` that names a :class:`Workflow` (or any object with the same
three attributes)::

    [project.entry-points."ssd_integrations.workflows"]
    invoices = "acme_invoices:workflow"

It then shows up in ``ssd workflows`` and runs as ``ssd invoices``, beside the packaged ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import typer

ENTRY_POINT_GROUP = "ssd_integrations.workflows"
RESERVED_NAMES = frozenset(
    {"generate", "chat", "bench", "models", "worker", "up", "doctor", "workflows", "help"}
)
_NAME = re.compile(r"[a-z][a-z0-9-]{0,31}")


@runtime_checkable
class WorkflowLike(Protocol):
    """What an entry point must lead to."""

    @property
    def name(self) -> str:
        """The subcommand; equal to the entry point's name."""
        ...

    @property
    def summary(self) -> str:
        """One line for the listing."""
        ...

    @property
    def app(self) -> typer.Typer | Callable[..., Any] | str:
        """The command: a Typer app, a function with Typer annotations, or ``"module:attribute"``
        of one, which is imported only when the workflow runs."""
        ...


@dataclass(frozen=True)
class Workflow:
    """A workflow as a distribution declares it; the attributes are those of `WorkflowLike`.

    Keep the module that holds it light: it is imported by ``ssd --help``.
    """

    name: str
    summary: str
    app: typer.Typer | Callable[..., Any] | str


@dataclass(frozen=True)
class Discovered:
    """One entry point: a usable workflow, or the sentence that says why it is not."""

    name: str
    source: str
    package: str
    workflow: WorkflowLike | None
    error: str | None = None


def discover(only: str | None = None) -> list[Discovered]:
    """Every declared workflow (or just those named ``only``), sorted by name.

    A broken one comes back with ``error`` set and hinders nobody else.
    """
    found: list[Discovered] = []
    for point in sorted(entry_points(group=ENTRY_POINT_GROUP), key=_order):
        if only is not None and point.name != only:
            continue
        item = _load(point)
        if any(other.name == item.name for other in found):
            item = _broken(point, "another workflow already has this name")
        found.append(item)
    return found


def _order(point: EntryPoint) -> tuple[str, bool, str]:
    """By name; where two claim one name, the workflow packaged here comes first."""
    return point.name, not point.value.startswith("ssd_workflows."), point.value


def _load(point: EntryPoint) -> Discovered:
    if not _NAME.fullmatch(point.name):
        return _broken(point, "the name must be lower-case letters, digits and hyphens")
    if point.name in RESERVED_NAMES:
        return _broken(point, "a built-in command has this name")
    try:
        target = point.load()
    except Exception as error:  # noqa: BLE001 - a stranger's module may fail in any way at all
        return _broken(point, f"{type(error).__name__}: {error}")
    if not isinstance(target, WorkflowLike):
        return _broken(point, "it has no name, summary and app")
    if target.name != point.name:
        return _broken(point, f"it calls itself {target.name!r}")
    return Discovered(point.name, point.value, _package(point), target)


def _broken(point: EntryPoint, why: str) -> Discovered:
    why = " ".join(why.split())
    return Discovered(point.name, point.value, _package(point), None, why)


def _package(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else "unknown"
