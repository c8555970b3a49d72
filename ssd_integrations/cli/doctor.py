"""`ssd doctor`: what is installed, what this machine can do, who answers, and what to do."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Annotated

import typer
from rich.text import Text

from ssd_integrations.cli.checks import Check, broker, machine, packages
from ssd_integrations.cli.failures import EXIT_FAILED, report_failures
from ssd_integrations.cli.options import CheckedBrokerURL
from ssd_integrations.cli.render import clean_for_terminal

_STYLE = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def doctor(
    broker_url: CheckedBrokerURL = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check this machine and say what to do; exits with 1 when something essential fails.

    \b
    Examples:
      ssd doctor
      ssd doctor --broker-url redis://localhost:6379/0
      ssd doctor --json
    """
    with report_failures(as_json=as_json):
        found: list[Check] = []
        for check in _all_checks(broker_url):
            found.append(check)
            if not as_json:
                _show(check)
        healthy = all(check.status != "fail" for check in found)
        if as_json:
            report = {"healthy": healthy, "checks": [check.as_dict() for check in found]}
            print(json.dumps(report, ensure_ascii=False))
        if not healthy:
            raise typer.Exit(EXIT_FAILED)


def _all_checks(broker_url: str | None) -> Iterator[Check]:
    groups: list[Callable[[], Iterator[Check]]] = [
        packages.checks,
        machine.checks,
        lambda: broker.checks(broker_url),
    ]
    for group in groups:
        yield from group()


def _show(check: Check) -> None:
    from rich.console import Console

    console = Console(markup=False, highlight=False, soft_wrap=True)
    line = Text(f"{check.status:<4}  ", style=_STYLE[check.status])
    line.append(clean_for_terminal(f"{check.name}: {check.detail}"), style="default")
    console.print(line)
    if check.remedy:
        console.print(clean_for_terminal(f"      -> {check.remedy}"))
