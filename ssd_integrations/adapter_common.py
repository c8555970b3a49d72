"""What ChatSSD and SSDLLM share: their parameters, the request they make, the backend they use.

The adapters differ in how they speak to their framework; everything below that is here, so
that the same parameters mean the same request in both.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import AsyncGenerator, Generator, Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator

from ssd_integrations.backends.base import Backend
from ssd_integrations.backends.shared import BackendOptions, ashared_backend, shared_backend
from ssd_integrations.backends.wire import check_broker_url
from ssd_integrations.errors import EngineError, InvalidRequestError
from ssd_integrations.protocol import (
    Event,
    GenerationRequest,
    QueueName,
    SpeculationMode,
    build_request,
    build_sampling,
    build_speculation,
    is_terminal,
)
from ssd_integrations.validation import describe_validation_error

SAMPLING_OPTIONS = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "seed")
CALL_OPTIONS = (
    *SAMPLING_OPTIONS,
    "stop",
    "speculation",
    "num_draft_tokens",
    "timeout",
    "queue",
    "queue_timeout",
)
ENGINE_OPTIONS = (
    "draft_model",
    "dtype",
    "device",
    "max_num_seqs",
    "max_model_len",
    "num_threads",
    "chat_template",
)

# What the answer depends on, statistics included; the rest says where, when and for how long.
OUTPUT_OPTIONS = (
    "model",
    "draft_model",
    "dtype",
    "device",
    "max_model_len",
    "chat_template",
    *SAMPLING_OPTIONS,
    "stop",
    "speculation",
    "num_draft_tokens",
)


@runtime_checkable
class TokenCounter(Protocol):
    """A backend that has the model's tokenizer at hand."""

    def count_tokens(self, request: GenerationRequest) -> int:
        """The number of prompt tokens of ``request``, chat template included."""
        ...


class AdapterParameters(BaseModel):
    """The parameters of both adapters; the frameworks add their own.

    Raises:
      InvalidRequestError: at construction, names the parameter and the value that is wrong.
    """

    # An error's traceback must not show what was put into broker_url.
    model_config = ConfigDict(arbitrary_types_allowed=True, hide_input_in_errors=True)

    model: str = Field(
        default="demo", description="`demo`, a folder, a GGUF file or a hub id; fixed per instance."
    )
    broker_url: SecretStr | str | None = Field(
        default=None,
        exclude=True,
        repr=False,
        description="Redis URL of the Celery workers, kept as a SecretStr since it may hold a "
        "password; None runs the engine in this process.",
    )
    temperature: float = Field(default=0.0, description="0 is greedy decoding.")
    top_p: float = 1.0
    top_k: int = Field(default=0, description="0 keeps every token.")
    min_p: float = 0.0
    max_tokens: int | None = Field(default=None, description="None fills the context window.")
    stop: list[str] | str | None = Field(
        default=None, description="Strings that end the text; they are not part of it."
    )
    seed: int | None = Field(default=None, description="Same seed, same text. None draws afresh.")
    speculation: SpeculationMode = Field(
        default="auto", description="How drafts are made. Changes the speed, never the text."
    )
    num_draft_tokens: int | None = Field(
        default=None, description="Longest draft per verification; None takes the engine's default."
    )
    timeout: float | None = Field(
        default=None, description="Seconds until the whole answer must be there."
    )
    queue: QueueName = Field(default="interactive", description="Which queue of the workers.")
    queue_timeout: float = Field(
        default=60.0, description="Seconds until a worker must have taken the request."
    )
    draft_model: str | None = Field(
        default=None, description="A smaller model with the same tokenizer (in process only)."
    )
    dtype: str | None = Field(
        default=None, description="auto, int8, float32, bfloat16 or float16 (in process only)."
    )
    device: str | None = Field(default=None, description="auto, cpu, cuda... (in process only).")
    max_num_seqs: int | None = Field(
        default=None, description="Requests decoded together (in process only)."
    )
    max_model_len: int | None = Field(
        default=None, description="Tokens of prompt and answer together (in process only)."
    )
    num_threads: int | None = Field(
        default=None, description="Threads of the engine (in process only)."
    )
    chat_template: str | None = Field(
        default=None, description="Jinja template in place of the model's own (in process only)."
    )
    backend: Backend | None = Field(
        default=None,
        exclude=True,
        repr=False,
        description="A ready backend, in place of the one that `model` and `broker_url` name.",
    )

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
        return {name: value for name, value in values.items() if value is not None}

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
                stop=options["stop"] or (), **{name: options[name] for name in SAMPLING_OPTIONS}
            ),
            speculation=build_speculation(
                mode=options["speculation"], num_draft_tokens=options["num_draft_tokens"]
            ),
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

    def _run(self, request: GenerationRequest) -> Generator[Event]:
        """The events of ``request``; closing the generator cancels the request."""
        stream = self._open_backend().generate(request)
        finished = False
        try:
            for event in stream:
                finished = is_terminal(event)
                yield event
        finally:
            if isinstance(stream, Generator):
                stream.close()
        if not finished:
            raise _unfinished(request)

    async def _arun(self, request: GenerationRequest) -> AsyncGenerator[Event]:
        """:meth:`_run` for an event loop."""
        stream = (await self._aopen_backend()).agenerate(request)
        finished = False
        try:
            async for event in stream:
                finished = is_terminal(event)
                yield event
        finally:
            if isinstance(stream, AsyncGenerator):
                await stream.aclose()
        if not finished:
            raise _unfinished(request)

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


def _unfinished(request: GenerationRequest) -> EngineError:
    return EngineError(f"The stream of request {request.request_id} ended before its answer did.")


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
