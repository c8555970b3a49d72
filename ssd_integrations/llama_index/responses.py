"""Events of the contract as LlamaIndex responses.

A LlamaIndex stream carries the whole text so far and, beside it, what is new.
"""

from __future__ import annotations

from typing import Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    LogProb,
    MessageRole,
    TextBlock,
    ThinkingBlock,
)

from ssd_integrations.adapter_common import token_bytes
from ssd_integrations.protocol import DeltaEvent, Event, FinishedEvent, TokenLogprob, Usage


class Answer:
    """The answer to one request as far as it has come.

    ``text`` is all of it, ``delta`` what the latest event added, ``raw`` (usage, finish reason,
    speculation statistics, timing) comes with the end. ``logprobs`` goes with ``text``: a list
    for each token, the token itself first and then the best alternatives to it. ``reasoning`` is
    what the model thought before the text.
    """

    def __init__(self) -> None:
        self.text = ""
        self.delta = ""
        self.reasoning = ""
        self.logprobs: list[list[LogProb]] | None = None
        self.finished: FinishedEvent | None = None

    def add(self, event: Event) -> bool:
        """Take in ``event``; whether there is something new to tell."""
        if isinstance(event, DeltaEvent):
            self.delta = event.text
            self.text += event.text
            self.reasoning += event.reasoning
            if event.logprobs:
                found = [_logprobs(entry) for entry in event.logprobs]
                self.logprobs = [*(self.logprobs or ()), *found]
            return bool(event.text or event.logprobs or event.reasoning)
        if isinstance(event, FinishedEvent):
            self.delta = ""
            self.finished = event
            return True
        return False

    @property
    def raw(self) -> dict[str, Any] | None:
        """What is known besides the text, as plain JSON types; None before the end."""
        if self.finished is None:
            return None
        return {
            "model": self.finished.model.name,
            "finish_reason": self.finished.finish_reason,
            "stop_sequence": self.finished.stop_sequence,
            "usage": _usage(self.finished.usage),
            "speculation": self.finished.speculation.model_dump(mode="json"),
            "timing": self.finished.timing.model_dump(mode="json"),
        }

    def chat(self) -> ChatResponse:
        """One step of a chat stream, or its end."""
        message = ChatMessage(role=MessageRole.ASSISTANT, content=self.text)
        if self.reasoning:
            message.blocks = [ThinkingBlock(content=self.reasoning), TextBlock(text=self.text)]
        return ChatResponse(message=message, delta=self.delta, raw=self.raw, logprobs=self.logprobs)

    def completion(self) -> CompletionResponse:
        """One step of a completion stream, or its end."""
        return CompletionResponse(
            text=self.text, delta=self.delta, raw=self.raw, logprobs=self.logprobs
        )


def _usage(usage: Usage) -> dict[str, Any]:
    """Token counts, named and nested as OpenAI does."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _logprobs(entry: TokenLogprob) -> list[LogProb]:
    others = [top for top in entry.top if top.token_id != entry.token_id]
    return [
        LogProb(token=item.token, logprob=item.logprob, bytes=token_bytes(item.token) or [])
        for item in (entry, *others)
    ]
