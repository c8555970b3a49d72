"""Command-line options that several commands share; request_options.py makes use of them."""

from __future__ import annotations

from typing import Annotated, get_args

import typer

from ssd_integrations.protocol import Acceptance, SpeculationMode

_ENGINE = "Model and engine"
_SAMPLING = "Sampling"
_PENALTIES = "Penalties and bias"
_END = "End of the answer"
_SPECULATION = "Speculation (same text, unless --acceptance rejection)"
_MODES = list(get_args(SpeculationMode))
_RULES = list(get_args(Acceptance))

Model = Annotated[
    str,
    typer.Option(help="`demo`, a hub id, a local folder or a GGUF file.", rich_help_panel=_ENGINE),
]
DraftModel = Annotated[
    str | None,
    typer.Option(help="A small model with the same tokenizer.", rich_help_panel=_ENGINE),
]
DTypeOption = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        help="auto, int8, float32, bfloat16 or float16.",
        show_default="auto",
        rich_help_panel=_ENGINE,
    ),
]
Device = Annotated[
    str | None,
    typer.Option(help="auto, cpu, cuda, cuda:1 ...", show_default="auto", rich_help_panel=_ENGINE),
]
BrokerURL = Annotated[
    str | None,
    typer.Option(
        "--broker-url",
        envvar="SSD_BROKER_URL",
        help="Send the request to Celery workers through this Redis or Valkey server.",
        show_default="in process",
        rich_help_panel=_ENGINE,
    ),
]
CheckedBrokerURL = Annotated[
    str | None,
    typer.Option(
        "--broker-url",
        envvar="SSD_BROKER_URL",
        help="Look at this Redis or Valkey server and its workers too.",
        show_default="none",
    ),
]
Speculation = Annotated[
    str,
    typer.Option(
        help=f"{', '.join(_MODES[:-1])} or {_MODES[-1]}.",
        autocompletion=lambda: _MODES,
        rich_help_panel=_SPECULATION,
    ),
]
NumDraftTokens = Annotated[
    int | None,
    typer.Option(
        help="Longest draft per verification.",
        show_default="the engine's",
        rich_help_panel=_SPECULATION,
    ),
]
Adaptive = Annotated[
    bool,
    typer.Option(
        "--adaptive/--no-adaptive",
        help="Draft less, or nothing, where drafts do not pay.",
        rich_help_panel=_SPECULATION,
    ),
]
AcceptanceRule = Annotated[
    str,
    typer.Option(
        "--acceptance",
        help="coupled: a seed gives one text. rejection: the same law, but above temperature 0 "
        "the text of a seed depends on the drafts.",
        autocompletion=lambda: _RULES,
        rich_help_panel=_SPECULATION,
    ),
]
DeviceMap = Annotated[
    str | None,
    typer.Option(
        metavar="auto|JSON",
        help="Spread the model over devices: auto, or a JSON object of module names to devices.",
        show_default="all on --device",
        rich_help_panel=_ENGINE,
    ),
]
Quantization = Annotated[
    str | None,
    typer.Option(
        metavar="JSON",
        help="transformers' quantization_config as a JSON object.",
        show_default="none",
        rich_help_panel=_ENGINE,
    ),
]
AttnImplementation = Annotated[
    str | None,
    typer.Option(
        metavar="packed|sdpa",
        help="Attention by this engine's own products or by torch's fused ones.",
        show_default="packed",
        rich_help_panel=_ENGINE,
    ),
]
DecodeStep = Annotated[
    str | None,
    typer.Option(
        metavar="eager|static|graphs|compile",
        help="Decoding steps of fixed shapes, as CUDA graphs or compiled.",
        show_default="eager",
        rich_help_panel=_ENGINE,
    ),
]
SuffixStore = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Keep what suffix drafts learn in this file, for the next start.",
        show_default="in memory only",
        rich_help_panel=_ENGINE,
    ),
]
Temperature = Annotated[
    float, typer.Option(help="0 is greedy decoding.", rich_help_panel=_SAMPLING)
]
TopP = Annotated[
    float, typer.Option("--top-p", help="Nucleus sampling.", rich_help_panel=_SAMPLING)
]
TopK = Annotated[int, typer.Option("--top-k", help="0 keeps all.", rich_help_panel=_SAMPLING)]
MinP = Annotated[
    float,
    typer.Option("--min-p", help="Relative probability floor.", rich_help_panel=_SAMPLING),
]
RepetitionPenalty = Annotated[
    float,
    typer.Option(
        help="Above 1 makes tokens of the prompt and the answer less likely.",
        rich_help_panel=_PENALTIES,
    ),
]
PresencePenalty = Annotated[
    float,
    typer.Option(
        help="Taken off the logits of tokens that the answer has.", rich_help_panel=_PENALTIES
    ),
]
FrequencyPenalty = Annotated[
    float,
    typer.Option(help="The same, once for each occurrence.", rich_help_panel=_PENALTIES),
]
LogitBias = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ID:VALUE",
        help="Added to the logit of a token id, -100 to 100; may be repeated.",
        rich_help_panel=_PENALTIES,
    ),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        help="Longest answer.", show_default="what the context holds", rich_help_panel=_END
    ),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(help="End before this text; may be repeated.", rich_help_panel=_END),
]
MinTokens = Annotated[int, typer.Option(help="Shortest answer.", rich_help_panel=_END)]
StopTokenIds = Annotated[
    list[int] | None,
    typer.Option(
        "--stop-token-id", help="End at this token id; may be repeated.", rich_help_panel=_END
    ),
]
IgnoreEOS = Annotated[
    bool,
    typer.Option("--ignore-eos", help="Go on past the model's own end.", rich_help_panel=_END),
]
Seed = Annotated[
    int | None,
    typer.Option(
        help="Same seed, same text, whatever the drafter.",
        show_default="random",
        rich_help_panel=_SAMPLING,
    ),
]
Timeout = Annotated[
    float | None, typer.Option(help="Give up after so many seconds.", show_default="never")
]
System = Annotated[str | None, typer.Option(help="System message.")]
Logprobs = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Log-probabilities of the tokens and of N alternatives each; with --json.",
    ),
]
Raw = Annotated[
    bool, typer.Option("--raw", help="Send the prompt as it is, without the chat template.")
]
