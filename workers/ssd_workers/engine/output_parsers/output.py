"""One request's output: what its text adds up to, piece by piece."""

from __future__ import annotations

import hashlib
import string
from collections.abc import Iterable, Iterator
from typing import Protocol

from pydantic import ValidationError

from ssd_integrations.protocol import (
    DeltaEvent,
    FinishReason,
    InvalidToolCall,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
)
from ssd_workers.engine.output_parsers.calls import CallParser
from ssd_workers.engine.output_parsers.parts import (
    CallArguments,
    CallEnd,
    CallStart,
    Part,
    ReasoningPart,
    TextPart,
)
from ssd_workers.engine.output_parsers.thinking import ThinkingParser

_ID_CHARACTERS = string.digits + string.ascii_letters
# Some chat templates take ids of just this length.
_ID_LENGTH = 9


class Output(Protocol):
    """The filter between an output's text and its events."""

    tool_calls: list[ToolCall]
    invalid_tool_calls: list[InvalidToolCall]

    @property
    def text(self) -> str:
        """The answer so far."""
        ...

    @property
    def reasoning(self) -> str:
        """What the model thought so far."""
        ...

    def push(self, text: str) -> list[Part]:
        """Take more text; the parts that are certain now."""
        ...

    def finish(self, reason: FinishReason) -> list[Part]:
        """The rest, now that nothing follows."""
        ...


class PlainOutput:
    """All of it is the answer's text."""

    def __init__(self) -> None:
        self.tool_calls: list[ToolCall] = []
        self.invalid_tool_calls: list[InvalidToolCall] = []
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        """Everything so far."""
        return "".join(self._texts)

    @property
    def reasoning(self) -> str:
        """None that is told apart."""
        return ""

    def push(self, text: str) -> list[Part]:
        """See :class:`Output`."""
        if not text:
            return []
        self._texts.append(text)
        return [TextPart(text)]

    def finish(self, reason: FinishReason) -> list[Part]:  # noqa: ARG002
        """See :class:`Output`."""
        return []


class ParsedOutput:
    """Reasoning, text and calls, told apart by the parsers that are given."""

    def __init__(self, thinking: ThinkingParser | None, calls: CallParser | None) -> None:
        self.tool_calls: list[ToolCall] = []
        self.invalid_tool_calls: list[InvalidToolCall] = []
        self._thinking = thinking
        self._calls = calls
        self._texts: list[str] = []
        self._thoughts: list[str] = []

    @property
    def text(self) -> str:
        """The answer so far."""
        return "".join(self._texts)

    @property
    def reasoning(self) -> str:
        """What the model thought so far."""
        return "".join(self._thoughts)

    def push(self, text: str) -> list[Part]:
        """See :class:`Output`."""
        parts = self._thinking.push(text) if self._thinking else [TextPart(text)]
        return self._note(self._find_calls(parts))

    def finish(self, reason: FinishReason) -> list[Part]:
        """See :class:`Output`."""
        parts = self._find_calls(self._thinking.finish() if self._thinking else [])
        if self._calls:
            parts += self._calls.finish(reason)
        return self._note(parts)

    def _find_calls(self, parts: Iterable[Part]) -> list[Part]:
        found: list[Part] = []
        for part in parts:
            if self._calls and isinstance(part, TextPart):
                found += self._calls.push(part.text)
            else:
                found.append(part)
        return found

    def _note(self, parts: list[Part]) -> list[Part]:
        for part in parts:
            if isinstance(part, TextPart):
                self._texts.append(part.text)
            elif isinstance(part, ReasoningPart):
                self._thoughts.append(part.text)
            elif isinstance(part, CallEnd):
                self._note_call(part)
        return [part for part in parts if not (isinstance(part, TextPart) and not part.text)]

    def _note_call(self, call: CallEnd) -> None:
        fault = call.fault
        if call.arguments is not None and call.name is not None:
            try:
                self.tool_calls.append(
                    ToolCall(id=call.id, name=call.name, arguments=call.arguments)
                )
                return
            except ValidationError as error:
                # JSON that no message can carry: numbers without bounds, too many levels.
                fault = f"its arguments cannot be passed on: {error.errors()[0]['msg']}"
        self.invalid_tool_calls.append(
            InvalidToolCall(
                id=call.id,
                name=call.name,
                arguments=call.arguments_text,
                text=call.raw,
                reason=fault,
            )
        )


def finish_reason(output: Output, reason: FinishReason) -> FinishReason:
    """Why the answer ended, given why its tokens did."""
    return "tool_calls" if reason == "stop" and output.tool_calls else reason


def call_id(request_id: str, number: int) -> str:
    """The id of a request's n-th call: the same whenever the request is run."""
    digest = hashlib.sha256(f"{request_id}:{number}".encode()).digest()
    value, base = int.from_bytes(digest, "big"), len(_ID_CHARACTERS)
    return "".join(_ID_CHARACTERS[value // base**i % base] for i in range(_ID_LENGTH))


def delta_events(
    request_id: str,
    parts: Iterable[Part],
    token_ids: list[int],
    logprobs: tuple[TokenLogprob, ...] | None,
) -> Iterator[DeltaEvent]:
    """The events that tell of ``parts``, in their order; the tokens ride on the first.

    There may be tokens without text, and none without either.
    """
    tokens = tuple(token_ids)
    if logprobs is not None:
        logprobs = logprobs[: len(tokens)]
    for delta in _grouped(parts) or ([_Delta()] if tokens else []):
        yield DeltaEvent(
            request_id=request_id,
            text=delta.text,
            token_ids=tokens,
            logprobs=logprobs,
            reasoning=delta.reasoning,
            tool_calls=tuple(delta.calls.values()),
        )
        tokens, logprobs = (), None


class _Delta:
    """What one event tells: reasoning, then text, then calls."""

    def __init__(self) -> None:
        self.reasoning = ""
        self.text = ""
        self.calls: dict[int, ToolCallDelta] = {}

    def add(self, part: Part) -> bool:
        """Take ``part``, unless it comes before what is there already."""
        if isinstance(part, ReasoningPart):
            if self.text or self.calls:
                return False
            self.reasoning += part.text
        elif isinstance(part, TextPart):
            if self.calls:
                return False
            self.text += part.text
        elif isinstance(part, CallStart):
            self.calls[part.index] = ToolCallDelta(index=part.index, id=part.id, name=part.name)
        elif isinstance(part, CallArguments):
            known = self.calls.get(part.index, ToolCallDelta(index=part.index))
            self.calls[part.index] = known.model_copy(
                update={"arguments": known.arguments + part.text}
            )
        return True


def _grouped(parts: Iterable[Part]) -> list[_Delta]:
    told = (TextPart, ReasoningPart, CallStart, CallArguments)
    deltas: list[_Delta] = []
    for part in parts:
        if isinstance(part, told) and not (deltas and deltas[-1].add(part)):
            deltas.append(_Delta())
            deltas[-1].add(part)
    return deltas
