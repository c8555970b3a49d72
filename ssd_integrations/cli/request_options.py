"""The options that `ssd generate` and `ssd chat` share, and the request they become."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ssd_integrations.cli import options as opt
from ssd_integrations.errors import InvalidRequestError
from ssd_integrations.protocol import (
    GenerationRequest,
    SamplingParams,
    SpeculationParams,
    build_request,
    build_sampling,
    build_speculation,
)

_DEFAULT_QUEUE_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class AnswerOptions:
    """What is asked for, of which model, where; the options of `ssd generate` and `ssd chat`.

    ``None`` leaves the choice to the engine or the worker.
    """

    model: opt.Model = "demo"
    draft_model: opt.DraftModel = None
    speculation: opt.Speculation = "auto"
    num_draft_tokens: opt.NumDraftTokens = None
    adaptive: opt.Adaptive = True
    acceptance: opt.AcceptanceRule = "coupled"
    temperature: opt.Temperature = 0.0
    top_p: opt.TopP = 1.0
    top_k: opt.TopK = 0
    min_p: opt.MinP = 0.0
    repetition_penalty: opt.RepetitionPenalty = 1.0
    presence_penalty: opt.PresencePenalty = 0.0
    frequency_penalty: opt.FrequencyPenalty = 0.0
    logit_bias: opt.LogitBias = None
    max_tokens: opt.MaxTokens = None
    min_tokens: opt.MinTokens = 0
    stop: opt.Stop = None
    stop_token_ids: opt.StopTokenIds = None
    ignore_eos: opt.IgnoreEOS = False
    seed: opt.Seed = None
    logprobs: opt.Logprobs = None
    dtype: opt.DTypeOption = None
    device: opt.Device = None
    suffix_store: opt.SuffixStore = None
    system: opt.System = None
    raw: opt.Raw = False
    broker_url: opt.BrokerURL = None
    timeout: opt.Timeout = None

    def engine_options(self) -> dict[str, str]:
        """The engine options that were set, as keyword arguments of a local engine."""
        options = {
            "draft_model": self.draft_model,
            "dtype": self.dtype,
            "device": self.device,
            "suffix_store": self.suffix_store,
        }
        return {name: value for name, value in options.items() if value is not None}

    def check(self) -> None:
        """Refuse what cannot work, before anything is read or loaded.

        Raises:
          InvalidRequestError: names the option and what to do.
        """
        given = self.engine_options()
        if self.broker_url is not None and given:
            names = ", ".join("--" + name.replace("_", "-") for name in given)
            raise InvalidRequestError(
                f"{names} cannot be chosen per request when a broker is used.",
                remedy="Leave it out (or --broker-url / SSD_BROKER_URL); "
                "the worker is started with it: `ssd worker --help`.",
            )
        if self.broker_url is None and self.speculation == "model" and self.draft_model is None:
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
        parse_logit_bias(self.logit_bias or ())

    def request(
        self,
        *,
        messages: Sequence[Mapping[str, str]] | None = None,
        prompt: str | None = None,
        structured_output: Mapping[str, Any] | None = None,
        tools: Mapping[str, Any] | None = None,
    ) -> GenerationRequest:
        """The request for these messages or this raw prompt.

        Parameters:
          structured_output: the form of its answer.
          tools: the request's fields that say what the model may call.

        Raises:
          InvalidRequestError: a value is out of bounds.
        """
        limits = {}
        if self.timeout is not None:
            # Nobody who gives 5 seconds wants to wait a minute for a free worker; and the queue's
            # deadline comes first, so that "nobody serves this model" is told as such.
            limits = {
                "timeout_s": self.timeout,
                "queue_timeout_s": min(0.9 * self.timeout, _DEFAULT_QUEUE_TIMEOUT_S),
            }
        sampling = self._fields_of(SamplingParams)
        if self.logit_bias is not None:
            sampling["logit_bias"] = parse_logit_bias(self.logit_bias)
        return build_request(
            model=self.model,
            messages=messages,
            prompt=prompt,
            sampling=build_sampling(**sampling),
            speculation=build_speculation(
                mode=self.speculation, **self._fields_of(SpeculationParams)
            ),
            structured_output=structured_output,
            **(tools or {}),
            **limits,
        )

    def _fields_of(self, kind: type[SamplingParams | SpeculationParams]) -> dict[str, Any]:
        """The options that have the names of fields of ``kind`` and were set."""
        return {
            name: value
            for name, value in vars(self).items()
            if name in kind.model_fields and value is not None
        }


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
