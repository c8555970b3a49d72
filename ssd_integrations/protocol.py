"""The contract between applications and workers: requests down, events up.

JSON only, versioned, every field bounded. Adapters speak it down, workers speak it up; both
the in-process backend and the Celery backend carry exactly these messages. Requests are defined
here, events in protocol_events.py, the form of an answer in protocol_structure.py, tools in
protocol_tools.py; everybody imports all of them from here.
"""

from __future__ import annotations

import uuid
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationError, model_validator

from ssd_integrations.errors import InvalidRequestError
from ssd_integrations.protocol_base import MAX_LOGPROBS, SparseMessage, WireMessage
from ssd_integrations.protocol_events import (
    DeltaEvent,
    ErrorInfo,
    Event,
    FailedEvent,
    FinishedEvent,
    FinishReason,
    ModelInfo,
    SpeculationStats,
    StartedEvent,
    Timing,
    TokenLogprob,
    Usage,
    event_from_json,
    is_terminal,
)
from ssd_integrations.protocol_structure import MAX_STRUCTURE_BYTES, StructuredOutput
from ssd_integrations.protocol_tools import (
    MAX_TOOLS,
    InvalidToolCall,
    Tool,
    ToolCall,
    ToolCallDelta,
    check_tools,
)
from ssd_integrations.validation import describe_validation_error

__all__ = [
    "MAX_LOGPROBS",
    "MAX_MESSAGES",
    "MAX_NEW_TOKENS",
    "MAX_PROMPT_CHARS",
    "MAX_STRUCTURE_BYTES",
    "MAX_TOOLS",
    "PROTOCOL_VERSION",
    "Acceptance",
    "DeltaEvent",
    "ErrorInfo",
    "Event",
    "FailedEvent",
    "FinishReason",
    "FinishedEvent",
    "GenerationRequest",
    "InvalidToolCall",
    "Message",
    "ModelInfo",
    "QueueName",
    "Role",
    "SamplingParams",
    "SpeculationMode",
    "SpeculationParams",
    "SpeculationStats",
    "StartedEvent",
    "StructuredOutput",
    "Timing",
    "TokenLogprob",
    "Tool",
    "ToolCall",
    "ToolCallDelta",
    "Usage",
    "build_request",
    "build_sampling",
    "build_speculation",
    "event_from_json",
    "is_terminal",
]

PROTOCOL_VERSION: Literal[1] = 1
MAX_PROMPT_CHARS = 4_000_000
MAX_MESSAGES = 10_000
MAX_NEW_TOKENS = 1_000_000

Role = Literal["system", "user", "assistant", "tool"]
SpeculationMode = Literal["off", "ngram", "suffix", "model", "hybrid", "auto"]
Acceptance = Literal["coupled", "rejection"]
QueueName = Literal["interactive", "batch"]

# Options of sampling that end an answer, or keep it from ending, where its form would not.
_OTHER_ENDS = ("stop", "stop_token_ids", "ignore_eos", "min_tokens")


class SamplingParams(WireMessage):
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


class SpeculationParams(WireMessage):
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


class Message(WireMessage):
    """One turn of a conversation."""

    role: Role
    content: str = Field(default="", max_length=MAX_PROMPT_CHARS)
    name: str | None = Field(default=None, max_length=256)
    tool_calls: tuple[ToolCall, ...] = Field(default=(), max_length=256)
    tool_call_id: str | None = Field(default=None, max_length=256)


class GenerationRequest(SparseMessage):
    """One call of a model.

    Exactly one of ``messages`` (rendered through the model's chat template) and ``prompt``
    (taken as it is) must be given. With ``structured_output`` the form decides where the answer
    ends, so the options of ``sampling`` that would end it elsewhere are refused.

    ``tools`` go with ``messages``. ``tool_choice`` is "auto" (the model decides), "none" (it is not
    told of them), "required" (one at least is called) or the name of the tool that is called, once.
    """

    sparse_fields: ClassVar[frozenset[str]] = frozenset(
        {"tools", "tool_choice", "parallel_tool_calls"}
    )

    version: Literal[1] = PROTOCOL_VERSION
    request_id: str = Field(
        default_factory=lambda: uuid.uuid4().hex, pattern=r"^[A-Za-z0-9_.-]{1,64}$"
    )
    model: str = Field(min_length=1, max_length=1024)
    messages: tuple[Message, ...] | None = Field(default=None, max_length=MAX_MESSAGES)
    prompt: str | None = Field(default=None, max_length=MAX_PROMPT_CHARS)
    sampling: SamplingParams = SamplingParams()
    speculation: SpeculationParams = SpeculationParams()
    structured_output: StructuredOutput | None = None
    tools: tuple[Tool, ...] = ()
    tool_choice: str = Field(default="auto", max_length=64)
    parallel_tool_calls: bool = Field(default=True, description="Several calls in one answer.")
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

    @model_validator(mode="after")
    def _one_end(self) -> GenerationRequest:
        if self.structured_output is None:
            return self
        for option in _OTHER_ENDS:
            if getattr(self.sampling, option):
                raise ValueError(
                    f"{option} does not go with structured_output, which says where the answer ends"
                )
        return self

    @model_validator(mode="after")
    def _tools_at_hand(self) -> GenerationRequest:
        check_tools(self.tools, self.tool_choice)
        if not self.tools:
            return self
        if self.prompt is not None:
            raise ValueError("tools go with messages: a raw prompt has no place for them")
        if self.structured_output is not None:
            raise ValueError("tools and structured_output are given together: give one of them")
        at_odds = {"none": (), "auto": _OTHER_ENDS[1:]}.get(self.tool_choice, _OTHER_ENDS)
        for option in at_odds:
            if getattr(self.sampling, option):
                raise ValueError(
                    f"{option} does not go with tools and tool_choice={self.tool_choice!r}: "
                    "it could end the answer within a call"
                )
        return self


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
