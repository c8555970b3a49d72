"""A backend that answers from a script and remembers what it was asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

from ssd_integrations.errors import SSDError
from ssd_integrations.protocol import (
    DeltaEvent,
    Event,
    FinishedEvent,
    FinishReason,
    GenerationRequest,
    ModelInfo,
    SpeculationStats,
    StartedEvent,
    Timing,
    TokenLogprob,
    Usage,
)

INFO = ModelInfo(
    name="scripted",
    architecture="llama",
    context_length=2048,
    vocab_size=100,
    dtype="float32",
    device="cpu",
    has_chat_template=True,
)
STATS = SpeculationStats(
    method="ngram",
    num_spec_steps=2,
    num_draft_tokens=4,
    num_accepted_tokens=3,
    mean_acceptance_length=2.5,
    draft_acceptance_rate=0.75,
    acceptance_histogram=(0, 1, 1),
)


def _logprobs(token_id: int, token: str, num_top: int | None) -> tuple[TokenLogprob, ...] | None:
    """The token itself as the best one, then the tokens 90, 91..."""
    if num_top is None:
        return None
    ranked = [(token_id, token), *((90 + i, f"<{90 + i}>") for i in range(num_top))][:num_top]
    top = tuple(
        TokenLogprob(token_id=id_, token=text, logprob=-0.5 * (rank + 1))
        for rank, (id_, text) in enumerate(ranked)
    )
    return (TokenLogprob(token_id=token_id, token=token, logprob=-0.5, top=top),)


class ScriptedBackend:
    """Yields ``thoughts`` and ``pieces`` as deltas; raises ``error`` in place of the end.

    ``requests`` holds what came in, ``cancelled`` the ids of requests whose consumer left.
    """

    def __init__(
        self,
        pieces: tuple[str, ...] = ("Hel", "", "lo"),
        *,
        thoughts: tuple[str, ...] = (),
        error: SSDError | None = None,
        finish_reason: FinishReason = "stop",
    ) -> None:
        self.pieces = pieces
        self.thoughts = thoughts
        self.error = error
        self.finish_reason = finish_reason
        self.requests: list[GenerationRequest] = []
        self.cancelled: list[str] = []

    def _script(self, request: GenerationRequest) -> Iterator[Event]:
        request_id = request.request_id
        yield StartedEvent(request_id=request_id, model=request.model, prompt_tokens=7)
        for thought in self.thoughts:
            yield DeltaEvent(request_id=request_id, text="", reasoning=thought)
        for index, piece in enumerate(self.pieces):
            yield DeltaEvent(
                request_id=request_id,
                text=piece,
                token_ids=(index,),
                logprobs=_logprobs(index, piece, request.sampling.logprobs),
            )
        if self.error is not None:
            raise self.error
        yield FinishedEvent(
            request_id=request_id,
            text="".join(self.pieces),
            finish_reason=self.finish_reason,
            usage=Usage(prompt_tokens=7, completion_tokens=3, total_tokens=10),
            speculation=STATS,
            timing=Timing(
                queue_s=0.01,
                time_to_first_token_s=0.1,
                decode_s=0.2,
                total_s=0.31,
                tokens_per_second=10.5,
            ),
            model=INFO,
            reasoning="".join(self.thoughts),
        )

    def generate(self, request: GenerationRequest) -> Iterator[Event]:
        self.requests.append(request)
        try:
            yield from self._script(request)
        except GeneratorExit:
            self.cancelled.append(request.request_id)
            raise

    async def agenerate(self, request: GenerationRequest) -> AsyncIterator[Event]:
        self.requests.append(request)
        try:
            for event in self._script(request):
                await asyncio.sleep(0)
                yield event
        except (GeneratorExit, asyncio.CancelledError):
            self.cancelled.append(request.request_id)
            raise

    def cancel(self, request_id: str) -> bool:
        self.cancelled.append(request_id)
        return True

    def models(self) -> list[ModelInfo]:
        return [INFO]

    def close(self) -> None:
        return


class CountingBackend(ScriptedBackend):
    """A scripted backend with a tokenizer: one token per character."""

    def count_tokens(self, request: GenerationRequest) -> int:
        if request.prompt is not None:
            return len(request.prompt)
        return sum(len(message.content) for message in request.messages or ())
