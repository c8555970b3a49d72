"""Command-line options that several commands share, and what they are turned into."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, get_args

import typer

from ssd_integrations.errors import InvalidRequestError
from ssd_integrations.protocol import (
    GenerationRequest,
    SpeculationMode,
    build_request,
    build_sampling,
    build_speculation,
)

_ENGINE = "Model and engine"
_SAMPLING = "Sampling"
_SPECULATION = "Speculation (changes the speed, never the text)"
_MODES = list(get_args(SpeculationMode))
_DEFAULT_QUEUE_TIMEOUT_S = 60.0

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
MaxTokens = Annotated[
    int | None,
    typer.Option(
        help="Longest answer.", show_default="what the context holds", rich_help_panel=_SAMPLING
    ),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(help="End before this text; may be repeated.", rich_help_panel=_SAMPLING),
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


@dataclass(frozen=True)
class EngineOptions:
    """Which model, where. ``None`` leaves the choice to the engine or the worker."""

    model: str
    draft_model: str | None = None
    dtype: str | None = None
    device: str | None = None
    broker_url: str | None = None

    def given(self) -> dict[str, str]:
        """The engine options that were set, as keyword arguments of a local engine."""
        options = {"draft_model": self.draft_model, "dtype": self.dtype, "device": self.device}
        return {name: value for name, value in options.items() if value is not None}

    def check(self, speculation: str) -> None:
        """Refuse combinations that cannot work, before anything is loaded.

        Raises:
          InvalidRequestError: names the option and what to do.
        """
        given = self.given()
        if self.broker_url is not None and given:
            names = ", ".join("--" + name.replace("_", "-") for name in given)
            raise InvalidRequestError(
                f"{names} cannot be chosen per request when a broker is used.",
                remedy="Leave it out (or --broker-url / SSD_BROKER_URL); "
                "the worker is started with it: `ssd worker --help`.",
            )
        if self.broker_url is None and speculation == "model" and self.draft_model is None:
            raise InvalidRequestError(
                "--speculation model needs a draft model.",
                remedy="Add --draft-model NAME, or use --speculation ngram.",
            )
        if self.broker_url is not None:
            from ssd_integrations.backends.wire import check_broker_url

            check_broker_url(self.broker_url)
        else:
            from ssd_workers.engine.config import build_engine_config

            build_engine_config(model=self.model, **given)


@dataclass(frozen=True)
class RequestOptions:
    """The per-request options of a command line."""

    speculation: str = "auto"
    num_draft_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    timeout_s: float | None = None

    def request(
        self,
        model: str,
        *,
        messages: Sequence[Mapping[str, str]] | None = None,
        prompt: str | None = None,
    ) -> GenerationRequest:
        """The request for these messages or this raw prompt.

        Raises:
          InvalidRequestError: a value is out of bounds.
        """
        limits = {}
        if self.timeout_s is not None:
            # Nobody who gives 5 seconds wants to wait a minute for a free worker; and the queue's
            # deadline comes first, so that "nobody serves this model" is told as such.
            limits = {
                "timeout_s": self.timeout_s,
                "queue_timeout_s": min(0.9 * self.timeout_s, _DEFAULT_QUEUE_TIMEOUT_S),
            }
        return build_request(
            model=model,
            messages=messages,
            prompt=prompt,
            sampling=build_sampling(
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=self.top_k,
                min_p=self.min_p,
                max_tokens=self.max_tokens,
                stop=self.stop,
                seed=self.seed,
            ),
            speculation=build_speculation(
                mode=self.speculation, num_draft_tokens=self.num_draft_tokens
            ),
            **limits,
        )
