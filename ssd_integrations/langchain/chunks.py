"""Events of the contract as LangChain chunks and results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from langchain_core.language_models.chat_models import generate_from_stream
from langchain_core.messages import AIMessageChunk
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult

from ssd_integrations.adapter_common import token_bytes
from ssd_integrations.protocol import DeltaEvent, Event, FinishedEvent, TokenLogprob, Usage

MODEL_PROVIDER = "ssd"


def to_chunk(event: Event) -> ChatGenerationChunk | None:
    """The chunk that tells of ``event``, or None where there is nothing to tell.

    Merging chunks concatenates equal strings and adds equal numbers, so metadata rides on the
    last chunk only; lists are joined, so log-probabilities ride with their tokens. Of
    ``reasoning_content`` LangChain makes a reasoning block.
    """
    if isinstance(event, DeltaEvent) and (event.text or event.logprobs or event.reasoning):
        metadata = {"logprobs": {"content": _logprobs(event.logprobs)}} if event.logprobs else {}
        message = AIMessageChunk(
            content=event.text,
            additional_kwargs={"reasoning_content": event.reasoning} if event.reasoning else {},
            response_metadata=metadata,
        )
        return ChatGenerationChunk(message=message)
    if isinstance(event, FinishedEvent):
        return ChatGenerationChunk(message=_last_message(event))
    return None


def to_result(answers: Sequence[Sequence[Event]]) -> ChatResult:
    """One generation for the events of each of ``answers``.

    The usage of several together is in ``llm_output``; a single one has it in its message.
    """
    generations = [_generation(events) for events in answers]
    usages = [end.usage for events in answers for end in events if isinstance(end, FinishedEvent)]
    several = len(answers) > 1
    return ChatResult(generations=generations, llm_output=_sum(usages) if several else None)


def total_usage(outputs: Iterable[dict[str, Any] | None]) -> dict[str, Any]:
    """The sum of what :func:`to_result` put into ``llm_output``; a cached answer costs nothing."""
    usages = [Usage(**output["token_usage"]) for output in outputs if output]
    return _sum(usages) if usages else {}


def _generation(events: Sequence[Event]) -> ChatGeneration:
    chunks = (to_chunk(event) for event in events)
    result = generate_from_stream(chunk for chunk in chunks if chunk is not None)
    return result.generations[0]


def _sum(usages: Iterable[Usage]) -> dict[str, Any]:
    total = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    for usage in usages:
        for name in total:
            total[name] += getattr(usage, name)
    return {"token_usage": total}


def _logprob_fields(logprob: TokenLogprob) -> dict[str, Any]:
    """As langchain-openai writes them; the token id has no place there."""
    return {
        "token": logprob.token,
        "logprob": logprob.logprob,
        "bytes": token_bytes(logprob.token),
    }


def _logprobs(logprobs: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
    return [
        {**_logprob_fields(entry), "top_logprobs": [_logprob_fields(top) for top in entry.top]}
        for entry in logprobs
    ]


def _usage(usage: Usage) -> UsageMetadata:
    metadata = UsageMetadata(
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        total_tokens=usage.total_tokens,
    )
    if usage.cached_tokens:
        metadata["input_token_details"] = InputTokenDetails(cache_read=usage.cached_tokens)
    return metadata


def _last_message(event: FinishedEvent) -> AIMessageChunk:
    return AIMessageChunk(
        content="",
        chunk_position="last",
        usage_metadata=_usage(event.usage),
        response_metadata={
            "model_name": event.model.name,
            "model_provider": MODEL_PROVIDER,
            "finish_reason": event.finish_reason,
            "stop_sequence": event.stop_sequence,
            "speculation": event.speculation.model_dump(mode="json"),
            "timing": event.timing.model_dump(mode="json"),
        },
    )
