"""The contract between applications and workers: requests down, events up.

JSON only, versioned, every field bounded. Adapters speak it down, workers speak it up; both
the in-process backend and the Celery backend carry exactly these messages.
"""

from __future__ import annotations

import uuid
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import from_json, to_json

from ssd_integrations.errors import (
    InvalidRequestError,
    MalformedMessageError,
    SSDError,
    error_from_code,
)
from ssd_integrations.validation import describe_validation_error

PROTOCOL_VERSION: Literal[1] = 1
MAX_PROMPT_CHARS = 4_000_000
MAX_MESSAGES = 10_000
MAX_NEW_TOKENS = 1_000_000
MAX_LOGPROBS = 20

Role = Literal["system", "user", "assistant", "tool"]
SpeculationMode = Literal["off", "ngram", "suffix", "model", "hybrid", "auto"]
Acceptance = Literal["coupled", "rejection"]
FinishReason = Literal["stop", "length", "cancelled"]
QueueName = Literal["interactive", "batch"]

T = TypeVar("T", bound="_Message")


class _Message(BaseModel):
    """A frozen JSON message; unknown fields are an error, not a shrug."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @classmethod
    def from_json(cls: type[T], data: str | bytes) -> T:
        """Parse a message from the wire.

        Raises:
          MalformedMessageError: not JSON, unknown fields, or values out of bounds.
        """
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            raise MalformedMessageError(describe_validation_error(cls.__name__, error)) from error

    def to_json(self) -> str:
        """This message as a JSON string."""
        return self.model_dump_json()


class SamplingParams(_Message):
    """How the next token is drawn from the target's distribution.

    Penalties and ``logit_bias`` change the logits first, then ``min_tokens`` rules out the end,
    then temperature, top-k, top-p and min-p apply. ``temperature=0`` is greedy decoding: it takes
    the best of the changed logits and ignores top-k, top-p and min-p. With a ``seed`` the text
    is the same for every drafter, draft length and batch; without one it is a fresh draw.

    Penalties are those of vLLM: ``repetition_penalty`` divides positive logits of tokens seen in
    prompt or output and multiplies negative ones; ``presence_penalty`` and ``frequency_penalty``
    are subtracted once, and once per occurrence, from tokens seen in the output.
    """

    temperature: float = Field(default=0.0, ge=0.0, le=10.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=0, le=10_000_000, description="0 keeps every token.")
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    max_tokens: int | None = Field(
        default=None, ge=1, le=MAX_NEW_TOKENS, description="None fills the context window."
    )
    stop: tuple[Annotated[str, Field(min_length=1, max_length=1024)], ...] = Field(
        default=(), max_length=32
    )
    seed: int | None = Field(default=None, ge=0, le=2**63 - 1)
    repetition_penalty: float = Field(default=1.0, gt=0.0, le=10.0)
    presence_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    frequency_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    logit_bias: dict[Annotated[int, Field(ge=0)], Annotated[float, Field(ge=-100, le=100)]] = Field(
        default_factory=dict, max_length=1024, description="Added to the logits of token ids."
    )
    min_tokens: int = Field(
        default=0, ge=0, le=MAX_NEW_TOKENS, description="No end token before so many tokens."
    )
    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        default=(), max_length=128, description="End the text like an end-of-sequence token."
    )
    ignore_eos: bool = Field(
        default=False, description="Go on past the model's own end-of-sequence tokens."
    )
    logprobs: int | None = Field(
        default=None,
        ge=0,
        le=MAX_LOGPROBS,
        description="Report each token's log-probability and so many of the best alternatives.",
    )

    @model_validator(mode="after")
    def _not_at_odds(self) -> SamplingParams:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}"
            )
        return self


class SpeculationParams(_Message):
    """How the draft is made and accepted.

    ``mode`` never changes the text, only its speed; ``auto`` picks from what is loaded.
    ``num_draft_tokens`` is the longest draft per verification; None takes the engine's default.
    With ``adaptive`` the engine drafts less, or nothing, where drafts do not pay.

    ``acceptance="coupled"`` is drafter-invariant sampling: a seed gives one text. "rejection" is
    the rejection rule of the literature: it draws from the same law and accepts more drafts of a
    draft model, but at a temperature above 0 the text of a seed depends on the drafts.
    """

    mode: SpeculationMode = "auto"
    num_draft_tokens: int | None = Field(default=None, ge=1, le=64)
    adaptive: bool = True
    acceptance: Acceptance = "coupled"


class ToolCall(_Message):
    """A call that the assistant made earlier in the conversation."""

    id: str = Field(max_length=256)
    name: str = Field(min_length=1, max_length=256)
    arguments: dict[str, Any]

    @field_validator("arguments", mode="after")
    @classmethod
    def _as_the_wire_gives_them(cls, value: dict[str, Any]) -> dict[str, Any]:
        """Only what is JSON, so that a call means the same in process and on a worker."""
        # The brackets leave room for the levels of the messages around it.
        data = to_json([[[[[[value]]]]]], inf_nan_mode="constants")
        arguments: dict[str, Any] = from_json(data, allow_inf_nan=False)[0][0][0][0][0][0]
        return arguments


class Message(_Message):
    """One turn of a conversation."""

    role: Role
    content: str = Field(default="", max_length=MAX_PROMPT_CHARS)
    name: str | None = Field(default=None, max_length=256)
    tool_calls: tuple[ToolCall, ...] = Field(default=(), max_length=256)
    tool_call_id: str | None = Field(default=None, max_length=256)


class GenerationRequest(_Message):
    """One call of a model.

    Exactly one of ``messages`` (rendered through the model's chat template) and ``prompt``
    (taken as it is) must be given.
    """

    version: Literal[1] = PROTOCOL_VERSION
    request_id: str = Field(
        default_factory=lambda: uuid.uuid4().hex, pattern=r"^[A-Za-z0-9_.-]{1,64}$"
    )
    model: str = Field(min_length=1, max_length=1024)
    messages: tuple[Message, ...] | None = Field(default=None, max_length=MAX_MESSAGES)
    prompt: str | None = Field(default=None, max_length=MAX_PROMPT_CHARS)
    sampling: SamplingParams = SamplingParams()
    speculation: SpeculationParams = SpeculationParams()
    queue: QueueName = "interactive"
    queue_timeout_s: float = Field(default=60.0, gt=0.0, le=7 * 86_400.0)
    timeout_s: float | None = Field(default=None, gt=0.0, le=7 * 86_400.0)

    @model_validator(mode="after")
    def _one_input(self) -> GenerationRequest:
        if (self.messages is None) == (self.prompt is None):
            raise ValueError("give exactly one of messages and prompt")
        if self.messages is not None and not self.messages:
            raise ValueError("messages is empty: give at least one message")
        if self.prompt is not None and not self.prompt:
            raise ValueError("prompt is empty: give at least one character")
        return self


class Usage(_Message):
    """Token counts; the end-of-sequence token counts as generated."""

    prompt_tokens: int = Field(ge=0)
    completion_tokens: int = Field(ge=0)
    total_tokens: int = Field(ge=0)


class SpeculationStats(_Message):
    """What speculation did for one request, under the names vLLM uses.

    ``num_spec_steps`` counts target forwards that emitted tokens after the prefill,
    with or without a draft. ``mean_acceptance_length`` is 1 + accepted / steps (the bonus
    token counts), ``draft_acceptance_rate`` is accepted / drafted, and
    ``acceptance_histogram[k]`` is the number of steps that accepted k draft tokens.
    """

    method: str = Field(max_length=32, description="The drafter that ran; never auto.")
    num_spec_steps: int = Field(default=0, ge=0)
    num_draft_tokens: int = Field(default=0, ge=0)
    num_accepted_tokens: int = Field(default=0, ge=0)
    mean_acceptance_length: float = Field(default=1.0, ge=0.0)
    draft_acceptance_rate: float = Field(default=0.0, ge=0.0, le=1.0)
    acceptance_histogram: tuple[int, ...] = ()


class Timing(_Message):
    """Seconds, measured by the engine's clock, from the moment the engine got the request."""

    queue_s: float = Field(ge=0.0, description="Waiting for a free row.")
    time_to_first_token_s: float = Field(ge=0.0)
    decode_s: float = Field(ge=0.0, description="From the first token to the last.")
    total_s: float = Field(ge=0.0)
    tokens_per_second: float = Field(ge=0.0, description="Of the decode phase.")


class ModelInfo(_Message):
    """What a backend knows of a model it serves."""

    name: str
    architecture: str
    context_length: int = Field(ge=1)
    vocab_size: int = Field(ge=1)
    dtype: str
    device: str
    draft_model: str | None = None
    has_chat_template: bool = False


class ErrorInfo(_Message):
    """An error on the wire."""

    code: str = Field(max_length=64)
    message: str
    remedy: str
    retryable: bool

    @classmethod
    def from_error(cls, error: SSDError) -> ErrorInfo:
        """The wire form of ``error``."""
        return cls(
            code=error.code, message=error.message, remedy=error.remedy, retryable=error.retryable
        )

    def to_error(self) -> SSDError:
        """The exception that this describes, of the class that its code names."""
        return error_from_code(self.code, self.message, self.remedy)


class StartedEvent(_Message):
    """The prompt is in the model; tokens follow."""

    type: Literal["started"] = "started"
    request_id: str
    model: str
    prompt_tokens: int = Field(ge=0)


class TokenLogprob(_Message):
    """A token and its log-probability under the model's own distribution.

    That is the softmax of the logits as the model gives them, before penalties, bias and
    temperature. ``top`` holds the best alternatives, best first; theirs is empty.
    """

    token_id: int = Field(ge=0)
    token: str
    logprob: float = Field(le=0.0)
    top: tuple[TokenLogprob, ...] = Field(default=(), max_length=MAX_LOGPROBS)


class DeltaEvent(_Message):
    """New text. ``token_ids`` are the tokens accepted since the previous delta.

    ``logprobs`` has one entry for each of them if the request asked for it.
    """

    type: Literal["delta"] = "delta"
    request_id: str
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None


class FinishedEvent(_Message):
    """The end. ``text`` is the whole output: the concatenation of every delta's text."""

    type: Literal["finished"] = "finished"
    request_id: str
    text: str
    finish_reason: FinishReason
    stop_sequence: str | None = None
    usage: Usage
    speculation: SpeculationStats
    timing: Timing
    model: ModelInfo


class FailedEvent(_Message):
    """The request failed; nothing follows."""

    type: Literal["failed"] = "failed"
    request_id: str
    error: ErrorInfo


Event = StartedEvent | DeltaEvent | FinishedEvent | FailedEvent
_EVENT: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="type")])


def event_from_json(data: str | bytes) -> Event:
    """Parse one event from the wire.

    Raises:
      MalformedMessageError: not an event of this protocol.
    """
    try:
        return _EVENT.validate_json(data)
    except ValidationError as error:
        raise MalformedMessageError(describe_validation_error("event", error)) from error


def is_terminal(event: Event) -> bool:
    """Whether nothing follows ``event`` in its stream."""
    return isinstance(event, FinishedEvent | FailedEvent)


def build_request(**fields: Any) -> GenerationRequest:
    """A :class:`GenerationRequest` from keyword arguments.

    Raises:
      InvalidRequestError: names the field and the value that is out of bounds.
    """
    try:
        return GenerationRequest(**fields)
    except ValidationError as error:
        raise InvalidRequestError(describe_validation_error("request", error)) from error


def build_sampling(**fields: Any) -> SamplingParams:
    """:class:`SamplingParams` from keyword arguments; raises like :func:`build_request`."""
    try:
        return SamplingParams(**fields)
    except ValidationError as error:
        raise InvalidRequestError(describe_validation_error("sampling", error)) from error


def build_speculation(**fields: Any) -> SpeculationParams:
    """:class:`SpeculationParams` from keyword arguments; raises like :func:`build_request`."""
    try:
        return SpeculationParams(**fields)
    except ValidationError as error:
        raise InvalidRequestError(describe_validation_error("speculation", error)) from error
