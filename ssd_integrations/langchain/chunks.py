"""Events of the contract as LangChain chunks."""

from __future__ import annotations

from langchain_core.messages import AIMessageChunk
from langchain_core.messages.ai import UsageMetadata
from langchain_core.outputs import ChatGenerationChunk

from ssd_integrations.protocol import DeltaEvent, Event, FinishedEvent

MODEL_PROVIDER = "ssd"


def to_chunk(event: Event) -> ChatGenerationChunk | None:
    """The chunk that tells of ``event``, or None where there is nothing to tell.

    Metadata rides on the last chunk only: merging chunks concatenates equal strings and adds
    equal numbers, so anything sent twice would come out wrong.
    """
    if isinstance(event, DeltaEvent) and event.text:
        return ChatGenerationChunk(message=AIMessageChunk(content=event.text))
    if isinstance(event, FinishedEvent):
        return ChatGenerationChunk(message=_last_message(event))
    return None


def _last_message(event: FinishedEvent) -> AIMessageChunk:
    return AIMessageChunk(
        content="",
        chunk_position="last",
        usage_metadata=UsageMetadata(
            input_tokens=event.usage.prompt_tokens,
            output_tokens=event.usage.completion_tokens,
            total_tokens=event.usage.total_tokens,
        ),
        response_metadata={
            "model_name": event.model.name,
            "model_provider": MODEL_PROVIDER,
            "finish_reason": event.finish_reason,
            "stop_sequence": event.stop_sequence,
            "speculation": event.speculation.model_dump(mode="json"),
            "timing": event.timing.model_dump(mode="json"),
        },
    )
