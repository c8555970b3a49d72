"""`ssd up`: an embedded broker and a worker in one command."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from ssd_integrations.cli.failures import report_failures, show_error, usage_errors
from ssd_integrations.cli.option_groups import with_option_groups
from ssd_integrations.cli.progress import LoadingBar
from ssd_integrations.cli.worker_options import WorkerOptions, check_installed
from ssd_integrations.errors import EngineError

_SEE_STDERR = "Its reason is on standard error."


@with_option_groups()
def up(
    options: WorkerOptions,
    port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help="Port of the broker; 0 takes a free one.",
            show_default="6379, or a free one",
        ),
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the broker's append-only file.", show_default="in the cache folder"
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON line when the worker is ready.")
    ] = False,
) -> None:
    """Start an embedded Valkey and a worker; Ctrl-C stops both.

    Requests that wait in the queue are kept on disk and go on at the next start.

    \b
    Examples:
      ssd up
      ssd up --model ./my-model --port 6380
      ssd up --json
    """
    with report_failures(as_json=as_json):
        check_installed()
        with usage_errors(as_json=as_json):
            settings = options.settings()
        from ssd_workers.embedded import EmbeddedValkey, default_data_dir
        from ssd_workers.models.store import resolve_model
        from ssd_workers.supervisor import Supervisor

        with LoadingBar() as bar:
            # A model that is not there is told before anything starts.
            for name in filter(None, (options.model, options.draft_model)):
                resolve_model(name, progress=bar)

        folder = data_dir if data_dir is not None else default_data_dir(options.model)
        with EmbeddedValkey(port=port, data_dir=folder) as broker:
            settings = settings.model_copy(update={"broker_url": broker.url})
            url = broker.url
            print(
                f"The broker runs at {url}. Loading {options.model} ...",
                file=sys.stderr,
                flush=True,
            )
            supervisor = Supervisor(
                settings,
                on_ready=lambda pid: _show_ready(url, options.model, pid, as_json),
                on_poll=broker.revive,
            )
            code = supervisor.run()
        if code and as_json:
            error = EngineError(f"The worker ended with exit code {code}.", remedy=_SEE_STDERR)
            show_error(error, as_json=True)
    raise typer.Exit(code)


def _show_ready(url: str, model: str, pid: int, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"broker_url": url, "model": model, "pid": pid}), flush=True)
        return
    print(f"Ready. In an application:\n\n  ChatSSD(model={model!r}, broker_url={url!r})\n")
    print("Ctrl-C stops the broker and the worker.", flush=True)
