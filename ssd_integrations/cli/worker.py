"""`ssd worker`: serve a model to a broker's queue."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ssd_integrations.cli.failures import report_failures, usage_errors
from ssd_integrations.cli.option_groups import with_option_groups
from ssd_integrations.cli.worker_options import WorkerOptions, check_installed

WorkerBroker = Annotated[
    str,
    typer.Option(
        "--broker-url",
        envvar="SSD_BROKER_URL",
        show_envvar=True,
        help="The Redis or Valkey server. With a password, set the variable instead: other "
        "users can read command lines.",
    ),
]


@with_option_groups()
def worker(options: WorkerOptions, broker_url: WorkerBroker = "redis://127.0.0.1:6379/0") -> None:
    """Load a model and take requests for it from the broker, until Ctrl-C or SIGTERM.

    The process that holds the model is watched and started again when it dies.

    \b
    Examples:
      ssd worker
      ssd worker --model Qwen/Qwen2.5-1.5B-Instruct --broker-url redis://gpu-box:6379/0
      SSD_BROKER_URL=rediss://user:password@host:6380/0 ssd worker --max-num-seqs 32
    """
    with report_failures():
        check_installed()
        with usage_errors():
            settings = options.settings(broker_url=broker_url)
        from ssd_integrations.backends.wire import mask_url
        from ssd_workers.supervisor import Supervisor

        def ready(pid: int) -> None:
            print(
                f"Model {options.model} takes requests from {mask_url(settings.broker_url)} "
                f"(process {pid}).",
                file=sys.stderr,
                flush=True,
            )

        code = Supervisor(settings, ready).run()
    raise typer.Exit(code)
