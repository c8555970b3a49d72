"""Subcommands that are imported only when they run, so that `ssd --help` stays quick."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from ssd_integrations.errors import SSDError
from ssd_integrations.workflows import Discovered, discover

BUILTIN_COMMANDS: dict[str, tuple[str, str]] = {
    "generate": ("ssd_integrations.cli.generate:generate", "Answer one prompt."),
    "chat": ("ssd_integrations.cli.chat:chat", "Talk with a model in the terminal."),
    "models": ("ssd_integrations.cli.models:app", "Fetch, list and remove models."),
    "worker": ("ssd_integrations.cli.worker:worker", "Serve a model to a broker's queue."),
    "up": ("ssd_integrations.cli.up:up", "Start an embedded broker and a worker."),
    "bench": ("ssd_integrations.cli.bench:bench", "Measure ways of decoding on the same prompts."),
    "doctor": ("ssd_integrations.cli.doctor:doctor", "Check this machine and say what to do."),
    "workflows": (
        "ssd_integrations.cli.workflows_command:workflows",
        "List the installed workflows.",
    ),
}


class LazyCommand(TyperCommand):
    """A name and a summary now, the real command on first use."""

    def __init__(self, name: str, summary: str, load: Callable[[], Any], panel: str) -> None:
        super().__init__(name=name, help=summary, rich_help_panel=panel)
        self._load = load

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **extra: Any) -> Any:
        """The real command's context: everything from here on is the real command's."""
        return self._load().make_context(info_name, args, *rest, **extra)


class LazyGroup(TyperGroup):
    """The built-in commands, then whatever workflows are installed."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name, (target, summary) in BUILTIN_COMMANDS.items():
            self.add_command(LazyCommand(name, summary, _loader(name, target), "Commands"))

    def list_commands(self, ctx: Any) -> list[str]:
        """Every command; imports the modules that declare workflows, not their apps."""
        del ctx
        for item in discover():
            if item.name not in self.commands:
                self.add_command(_workflow_command(item))
        return list(self.commands)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command by this name; looks for a workflow only if no built-in has it."""
        del ctx
        if cmd_name not in self.commands:
            for item in discover(only=cmd_name):
                self.add_command(_workflow_command(item))
        return self.commands.get(cmd_name)


def load_command(name: str, target: Any) -> Any:
    """The runnable command behind a Typer app, a function, or ``"module:attribute"`` of one."""
    if isinstance(target, str):
        module, _, attribute = target.partition(":")
        target = getattr(import_module(module), attribute)
    if not isinstance(target, typer.Typer):
        wrapper = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        wrapper.command(name)(target)
        target = wrapper
    target._add_completion = False
    command = typer.main.get_command(target)
    command.name = name
    return command


def _loader(name: str, target: Any) -> Callable[[], Any]:
    return lambda: load_command(name, target)


def _workflow_command(item: Discovered) -> LazyCommand:
    workflow = item.workflow
    if workflow is None:
        return LazyCommand(
            item.name, f"Broken: {item.error}", lambda: _refuse(item), panel="Workflows"
        )
    return LazyCommand(
        item.name, workflow.summary, _loader(item.name, workflow.app), panel="Workflows"
    )


def _refuse(item: Discovered) -> Any:
    raise SSDError(
        f"The workflow {item.name!r} ({item.source} of {item.package}) cannot be loaded: "
        f"{item.error}.",
        remedy="Reinstall or remove the package that declares it.",
    )
