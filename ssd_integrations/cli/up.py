"""`ssd up`: an embedded broker and a worker in one command."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from ssd_integrations.cli import options as opt
from ssd_integrations.cli.failures import report_failures, show_error, usage_errors
from ssd_integrations.cli.progress import LoadingBar
from ssd_integrations.cli.worker import (
    ChatTemplate,
    DraftTokens,
    Grace,
    MaxModelLen,
    MaxNumSeqs,
    NumThreads,
    VisibilityTimeout,
    check_installed,
    engine_options,
)
from ssd_integrations.errors import EngineError

_SEE_STDERR = "Its reason is on standard error."


def up(
    model: opt.Model = "demo",
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
            from ssd_workers.settings import build_worker_settings

            settings = build_worker_settings(
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
        from ssd_workers.embedded import EmbeddedValkey, default_data_dir
        from ssd_workers.models.store import resolve_model
        from ssd_workers.supervisor import Supervisor

        with LoadingBar() as bar:
            # A model that is not there is told before anything starts.
            for name in filter(None, (model, draft_model)):
                resolve_model(name, progress=bar)

        folder = data_dir if data_dir is not None else default_data_dir(model)
        with EmbeddedValkey(port=port, data_dir=folder) as broker:
            settings = settings.model_copy(update={"broker_url": broker.url})
            url = broker.url
            print(f"The broker runs at {url}. Loading {model} ...", file=sys.stderr, flush=True)
            supervisor = Supervisor(
                settings,
                on_ready=lambda pid: _show_ready(url, model, pid, as_json),
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
