"""`ssd workflows`: what is installed beside the built-in commands."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from ssd_integrations.cli.failures import report_failures
from ssd_integrations.workflows import discover


def workflows(
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
) -> None:
    """List the installed workflows; each runs as `ssd NAME`.

    \b
    Examples:
      ssd workflows
      ssd workflows --json
    """
    with report_failures(as_json=as_json):
        rows = [
            {
                "name": item.name,
                "summary": item.workflow.summary if item.workflow is not None else None,
                "package": item.package,
                "entry_point": item.source,
                "error": item.error,
            }
            for item in discover()
        ]
        if as_json:
            print(json.dumps(rows, ensure_ascii=False))
            return
        width = max((len(str(row["name"])) for row in rows), default=0)
        for row in rows:
            what = row["summary"] if row["error"] is None else f"error: {row['error']}"
            print(f"{row['name']:<{width}}  {what}  ({row['package']})")
