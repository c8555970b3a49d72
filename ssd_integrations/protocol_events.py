"""The half of the contract that comes up: events and what they report. Import from protocol.py."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, TypeAdapter, ValidationError

from ssd_integrations.errors import MalformedMessageError, SSDError, error_from_code
from ssd_integrations.protocol_base import MAX_LOGPROBS, SparseMessage, WireMessage
from ssd_integrations.protocol_tools import InvalidToolCall, ToolCall, ToolCallDelta
from ssd_integrations.validation import describe_validation_error

#: Why an answer ended. "tool_calls" is a "stop" after at least one valid call.
FinishReason = Literal["stop", "length", "cancelled", "tool_calls"]


class Usage(WireMessage):
    """Token counts; the end-of-sequence token counts as generated.

    ``cached_tokens`` of the prompt were not computed but found: an earlier request began alike.
    """

    prompt_tokens: int = Field(ge=0)
    completion_tokens: int = Field(ge=0)
    total_tokens: int = Field(ge=0)
    cached_tokens: int = Field(default=0, ge=0)


class SpeculationStats(WireMessage):
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


class Timing(WireMessage):
    """Seconds, measured by the engine's clock, from the moment the engine got the request."""

    queue_s: float = Field(ge=0.0, description="Waiting for a free row.")
    time_to_first_token_s: float = Field(ge=0.0)
    decode_s: float = Field(ge=0.0, description="From the first token to the last.")
    total_s: float = Field(ge=0.0)
    tokens_per_second: float = Field(ge=0.0, description="Of the decode phase.")


class ModelInfo(WireMessage):
    """What a backend knows of a model it serves."""

    name: str
    architecture: str
    context_length: int = Field(ge=1)
    vocab_size: int = Field(ge=1)
    dtype: str
    device: str
    draft_model: str | None = None
    has_chat_template: bool = False


class ErrorInfo(WireMessage):
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


class StartedEvent(WireMessage):
    """The prompt is in the model; tokens follow."""

    type: Literal["started"] = "started"
    request_id: str
    model: str
    prompt_tokens: int = Field(ge=0)


class TokenLogprob(WireMessage):
    """A token and its log-probability under the model's own distribution.

    That is the softmax of the logits as the model gives them, before penalties, bias and
    temperature. ``top`` holds the best alternatives, best first; theirs is empty.
    """

    token_id: int = Field(ge=0)
    token: str
    logprob: float = Field(le=0.0)
    top: tuple[TokenLogprob, ...] = Field(default=(), max_length=MAX_LOGPROBS)


class DeltaEvent(SparseMessage):
    """New text. ``token_ids`` are the tokens accepted since the previous delta.

    ``logprobs`` has one entry for each of them if the request asked for it. Within one event
    ``reasoning`` comes before ``text`` and ``text`` before ``tool_calls``.
    """

    sparse_fields: ClassVar[frozenset[str]] = frozenset({"reasoning", "tool_calls"})

    type: Literal["delta"] = "delta"
    request_id: str
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


class FinishedEvent(SparseMessage):
    """The end. ``text`` is the whole answer: the concatenation of every delta's text.

    ``reasoning`` is what the model thought before, ``tool_calls`` and ``invalid_tool_calls`` what
    it called; the text of these is not in ``text``.
    """

    sparse_fields: ClassVar[frozenset[str]] = frozenset(
        {"reasoning", "tool_calls", "invalid_tool_calls"}
    )

    type: Literal["finished"] = "finished"
    request_id: str
    text: str
    finish_reason: FinishReason
    stop_sequence: str | None = None
    usage: Usage
    speculation: SpeculationStats
    timing: Timing
    model: ModelInfo
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    invalid_tool_calls: tuple[InvalidToolCall, ...] = ()


class FailedEvent(WireMessage):
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
