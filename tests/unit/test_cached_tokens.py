"""Prompt tokens that were found rather than computed, as each reader expects to be told."""

from __future__ import annotations

from langchain_core.messages import AIMessageChunk

from ssd_integrations.cli.render import stats_line
from ssd_integrations.langchain.chunks import to_chunk
from ssd_integrations.llama_index.responses import Answer
from ssd_integrations.protocol import (
    FinishedEvent,
    ModelInfo,
    SpeculationStats,
    Timing,
    Usage,
    event_from_json,
)


def finished(cached: int) -> FinishedEvent:
    return FinishedEvent(
        request_id="r",
        text="x",
        finish_reason="stop",
        usage=Usage(
            prompt_tokens=150, completion_tokens=12, total_tokens=162, cached_tokens=cached
        ),
        speculation=SpeculationStats(method="off"),
        timing=Timing(
            queue_s=0, time_to_first_token_s=0.25, decode_s=1, total_s=1.25, tokens_per_second=11
        ),
        model=ModelInfo(
            name="m", architecture="a", context_length=9, vocab_size=9, dtype="int8", device="cpu"
        ),
    )


def test_on_the_wire() -> None:
    event = finished(128)
    assert event_from_json(event.to_json()) == event
    assert Usage(prompt_tokens=1, completion_tokens=1, total_tokens=2).cached_tokens == 0


def test_in_langchain() -> None:
    def usage(cached: int) -> object:
        chunk = to_chunk(finished(cached))
        assert chunk is not None
        assert isinstance(chunk.message, AIMessageChunk)
        return chunk.message.usage_metadata

    plain = {"input_tokens": 150, "output_tokens": 12, "total_tokens": 162}
    assert usage(0) == plain
    assert usage(128) == {**plain, "input_token_details": {"cache_read": 128}}


def test_in_llama_index() -> None:
    answer = Answer()
    answer.add(finished(128))
    assert answer.raw is not None
    assert answer.raw["usage"]["prompt_tokens_details"] == {"cached_tokens": 128}


def test_in_the_statistics_line() -> None:
    assert "128 of 150 prompt tokens cached" in stats_line(finished(128))
    assert "cached" not in stats_line(finished(0))
