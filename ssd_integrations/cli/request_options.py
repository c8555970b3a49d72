"""What the options of a command line are turned into: an engine, a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ssd_integrations.errors import InvalidRequestError
from ssd_integrations.protocol import (
    GenerationRequest,
    build_request,
    build_sampling,
    build_speculation,
)

_DEFAULT_QUEUE_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class EngineOptions:
    """Which model, where. ``None`` leaves the choice to the engine or the worker."""

    model: str
    draft_model: str | None = None
    dtype: str | None = None
    device: str | None = None
    broker_url: str | None = None
    suffix_store: str | None = None

    def given(self) -> dict[str, str]:
        """The engine options that were set, as keyword arguments of a local engine."""
        options = {
            "draft_model": self.draft_model,
            "dtype": self.dtype,
            "device": self.device,
            "suffix_store": self.suffix_store,
        }
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
    """The per-request options of a command line.

    Parameters:
      speculation: the fields of :class:`ssd_integrations.protocol.SpeculationParams`.
      sampling: the fields of :class:`ssd_integrations.protocol.SamplingParams`.
      timeout_s: seconds until the whole answer must be there.
    """

    speculation: Mapping[str, Any]
    sampling: Mapping[str, Any]
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
            sampling=build_sampling(**self.sampling),
            speculation=build_speculation(**self.speculation),
            **limits,
        )


def parse_logit_bias(items: Sequence[str]) -> dict[int, float]:
    """``ID:VALUE`` items as a mapping; the protocol checks the bounds.

    Raises:
      InvalidRequestError: an item that is not two numbers, or a token id that comes twice.
    """
    found: dict[int, float] = {}
    for item in items:
        token, _, value = item.partition(":")
        try:
            token_id, bias = int(token), float(value)
        except ValueError:
            raise InvalidRequestError(
                f"--logit-bias {item!r} is not ID:VALUE.",
                remedy="Give a token id and a number, such as --logit-bias 42:-1.5.",
            ) from None
        if token_id in found:
            raise InvalidRequestError(
                f"--logit-bias names token {token_id} twice.", remedy="Give it one value."
            )
        found[token_id] = bias
    return found
