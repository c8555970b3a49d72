"""What ChatSSD and SSDLLM share: their parameters, the request they make, the backend they use.

The adapters differ in how they speak to their framework; everything below that is here, so
that the same parameters mean the same request in both.
"""

from __future__ import annotations

import difflib
import json
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

from pydantic import SecretStr, ValidationError, field_validator

from ssd_integrations.adapter_fields import (
    CALL_OPTIONS,
    ENGINE_OPTIONS,
    SAMPLING_COLLECTIONS,
    SAMPLING_OPTIONS,
    SPECULATION_OPTIONS,
    AdapterFields,
)
from ssd_integrations.backends.base import Backend
from ssd_integrations.backends.shared import BackendOptions, ashared_backend, shared_backend
from ssd_integrations.backends.wire import check_broker_url
from ssd_integrations.errors import InvalidRequestError
from ssd_integrations.protocol import (
    MAX_LOGPROBS,
    GenerationRequest,
    build_request,
    build_sampling,
    build_speculation,
)
from ssd_integrations.validation import describe_validation_error


@runtime_checkable
class TokenCounter(Protocol):
    """A backend that has the model's tokenizer at hand."""

    def count_tokens(self, request: GenerationRequest) -> int:
        """The number of prompt tokens of ``request``, chat template included."""
        ...


def token_bytes(token: str) -> list[int] | None:
    """The UTF-8 bytes of a token's text; None for part of a character, whose bytes it hides."""
    return None if "\N{REPLACEMENT CHARACTER}" in token else list(token.encode())


class AdapterParameters(AdapterFields):
    """The parameters of both adapters; the frameworks add their own.

    Raises:
      InvalidRequestError: at construction, names the parameter and the value that is wrong.
    """

    def __init__(self, **data: Any) -> None:
        name = type(self).__name__
        _warn_unknown(name, data, type(self).model_fields)
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise InvalidRequestError(describe_validation_error(name, error)) from error
        self._check_parameters()

    @field_validator("broker_url", mode="before")
    @classmethod
    def _hide_broker_url(cls, value: object) -> SecretStr | None:
        if value is None or isinstance(value, SecretStr):
            return value
        if isinstance(value, str):
            return SecretStr(value)
        raise ValueError(f"a {type(value).__name__} is not a URL")

    def _check_parameters(self) -> None:
        self._build_request({}, prompt="check")
        engine_options = self._engine_options()
        if self.backend is not None and self.broker_url is not None:
            raise InvalidRequestError(
                "backend and broker_url are both given.", remedy="Give one of the two."
            )
        if self.broker_url is not None:
            check_broker_url(self._broker_url())
        if self.backend is None and self.broker_url is None:
            _check_engine_options(self.model, engine_options)
            if self.speculation == "model" and self.draft_model is None:
                raise InvalidRequestError(
                    "speculation='model' needs a draft model.",
                    remedy="Give draft_model=, or use speculation='ngram' or 'auto'.",
                )
        elif engine_options:
            where = "backend" if self.broker_url is None else "worker"
            raise InvalidRequestError(
                f"{', '.join(engine_options)} cannot be set here: the {where} has its own.",
                remedy=f"Set it where the {where} starts (`ssd worker --help`), not here.",
            )

    def _engine_options(self) -> dict[str, Any]:
        """The engine options that were given; the engine knows the defaults of the others."""
        values = {name: getattr(self, name) for name in ENGINE_OPTIONS}
        return {
            # As JSON text, which the engine takes too and which can be part of a key.
            name: json.dumps(value, sort_keys=True) if isinstance(value, dict) else value
            for name, value in values.items()
            if value is not None
        }

    def _build_request(self, overrides: Mapping[str, Any], **content: Any) -> GenerationRequest:
        """The request for one call: constructor values, overridden by the call's own.

        Parameters:
          overrides: the call's options, of ``CALL_OPTIONS``; ``stop=None`` means not given.
          content: ``messages`` or ``prompt``.

        Raises:
          InvalidRequestError: an unknown option, or a value out of bounds.
        """
        for name in overrides:
            if name not in CALL_OPTIONS:
                raise InvalidRequestError(
                    f"Unknown call option {name!r}.{_nearest(name, CALL_OPTIONS)}",
                    remedy=f"A call takes {', '.join(CALL_OPTIONS)}; "
                    "everything else is set at construction.",
                )
        options = {name: getattr(self, name) for name in CALL_OPTIONS}
        stop = overrides.get("stop")
        options.update(overrides, stop=self.stop if stop is None else stop)
        if isinstance(options["stop"], str):
            options["stop"] = (options["stop"],)
        return build_request(
            model=self.model,
            sampling=build_sampling(
                logprobs=_num_logprobs(options, overrides),
                **{name: options[name] for name in SAMPLING_OPTIONS},
                **{
                    name: options[name]
                    for name in SAMPLING_COLLECTIONS
                    if options[name] is not None
                },
            ),
            speculation=build_speculation(
                mode=options["speculation"],
                **{name: options[name] for name in SPECULATION_OPTIONS},
            ),
            structured_output=options["structured_output"],
            queue=options["queue"],
            queue_timeout_s=options["queue_timeout"],
            timeout_s=options["timeout"],
            **content,
        )

    def _broker_url(self) -> str:
        url = self.broker_url
        return url.get_secret_value() if isinstance(url, SecretStr) else url or ""

    def _open_backend(self) -> Backend:
        return self.backend or shared_backend(self._backend_options())

    async def _aopen_backend(self) -> Backend:
        return self.backend or await ashared_backend(self._backend_options())

    def _backend_options(self) -> BackendOptions:
        return (
            ("model", self.model),
            ("broker_url", self._broker_url() or None),
            *self._engine_options().items(),
        )

    def _count_tokens(self, **content: Any) -> int:
        """Exact count of the prompt tokens of ``messages`` or ``prompt``.

        Raises:
          InvalidRequestError: the backend has no tokenizer here (it runs on workers).
        """
        backend = self._open_backend()
        if not isinstance(backend, TokenCounter):
            raise InvalidRequestError(
                "Tokens cannot be counted here: the tokenizer is on the worker.",
                remedy="Count with the same model in process, "
                "or pass a counter of your own (custom_get_token_ids= in LangChain).",
            )
        return backend.count_tokens(self._build_request({}, **content))


def _check_engine_options(model: str, engine_options: Mapping[str, Any]) -> None:
    # Imported here because only the in-process backend knows the engine's options.
    from ssd_workers.engine.config import build_engine_config

    build_engine_config(model=model, **engine_options)


def _num_logprobs(options: Mapping[str, Any], overrides: Mapping[str, Any]) -> int | None:
    """The protocol's one number from the frameworks' two parameters."""
    wanted, top = options["logprobs"], options["top_logprobs"]
    if wanted is not None and not isinstance(wanted, bool):
        raise InvalidRequestError(
            f"logprobs={wanted!r} is not True, False or None.",
            remedy="For alternatives say logprobs=True, top_logprobs=N.",
        )
    if not wanted:
        # A call that switches off what the constructor asked for need not name both.
        switched_off = "logprobs" in overrides and overrides.get("top_logprobs") is None
        if top is not None and not switched_off:
            raise InvalidRequestError(
                f"top_logprobs={top!r} is given without logprobs=True.",
                remedy="Add logprobs=True, or leave out top_logprobs.",
            )
        return None
    if top is None:
        return 0
    if isinstance(top, bool) or not isinstance(top, int) or not 0 <= top <= MAX_LOGPROBS:
        raise InvalidRequestError(
            f"top_logprobs={top!r} is not a whole number from 0 to {MAX_LOGPROBS}."
        )
    return top


def _warn_unknown(owner: str, given: Iterable[str], known: Iterable[str]) -> None:
    """The frameworks drop unknown parameters without a word; a typo must not pass so."""
    names = sorted(known)
    for name in given:
        if name not in names:
            warnings.warn(
                f"{owner} has no parameter {name!r}; it is ignored.{_nearest(name, names)}",
                UserWarning,
                stacklevel=3,
            )


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.75)
    return f" Did you mean {close[0]!r}?" if close else ""
