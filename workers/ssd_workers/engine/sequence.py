"""One request while the engine works on it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ssd_integrations.protocol import (
    Event,
    FinishedEvent,
    FinishReason,
    GenerationRequest,
    ModelInfo,
    SamplingParams,
    SpeculationStats,
    Timing,
    Usage,
)
from ssd_workers.engine.drafters.base import Drafter
from ssd_workers.engine.grammar import GrammarState
from ssd_workers.engine.kv_cache import SequenceCache
from ssd_workers.engine.logit_rules import RowRules, TokenHistory
from ssd_workers.engine.output_parsers.output import Output, PlainOutput, finish_reason
from ssd_workers.engine.text_stream import TextStream


@dataclass(eq=False)
class Sequence:
    """A request's tokens, cache, drafter and counters. Only the engine thread touches it.

    ``token_ids`` are prompt and accepted output. ``cache.length`` of them have keys and values;
    while decoding that is all but the last one. ``history`` is kept where rules need it,
    ``grammar`` where the output must have a form. ``text`` makes characters of tokens, ``output``
    tells what they mean.
    """

    request: GenerationRequest
    token_ids: list[int]
    prompt_length: int
    max_new_tokens: int
    seed: int
    drafter: Drafter | None
    num_draft_tokens: int
    text: TextStream
    on_event: Callable[[Event], None]
    end_token_ids: frozenset[int] = frozenset()
    history: TokenHistory | None = None
    grammar: GrammarState | None = None
    output: Output = field(default_factory=PlainOutput)
    cache: SequenceCache | None = None
    #: Positions that there is room for, and prompt tokens that were not computed but found.
    reserved_length: int = 0
    cached_tokens: int = 0
    submitted_at: float = field(default_factory=time.monotonic)
    admitted_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    cancelled: bool = False
    num_spec_steps: int = 0
    num_draft_proposed: int = 0
    num_draft_accepted: int = 0
    acceptance_histogram: list[int] = field(default_factory=list)

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def sampling(self) -> SamplingParams:
        return self.request.sampling

    @property
    def by_rejection(self) -> bool:
        """Whether drafts are verified by the rejection rule; when greedy the two are the same."""
        rejection = self.request.speculation.acceptance == "rejection"
        return rejection and self.sampling.temperature > 0.0

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.prompt_length

    @property
    def remaining_tokens(self) -> int:
        """How many more tokens may be generated."""
        return self.max_new_tokens - self.num_output_tokens

    @property
    def draft_limit(self) -> int:
        """The longest useful draft: one of the remaining tokens is the correction or bonus."""
        if self.drafter is None:
            return 0
        return max(0, min(self.num_draft_tokens, self.remaining_tokens - 1))

    @property
    def max_length(self) -> int:
        """Prompt and the longest possible output, in tokens."""
        return self.prompt_length + self.max_new_tokens

    @property
    def prefill_length(self) -> int:
        """Tokens that are read before the next one is written.

        That is the prompt; for a sequence that was put back, all but the last token of its output.
        """
        return max(self.prompt_length, len(self.token_ids) - 1)

    @property
    def in_prefill(self) -> bool:
        """Whether tokens are still to be put into the cache before the next one is written."""
        return self.cache is None or self.cache.length < self.prefill_length

    def extend(self, tokens: list[int]) -> None:
        """Append accepted output."""
        self.token_ids.extend(tokens)
        if self.history is not None:
            self.history.extend(tokens)

    def rules(self, drafted: list[int]) -> RowRules | None:
        """What changes the logits of the row after ``drafted``; None if nothing does."""
        if self.history is None and self.grammar is None:
            return None
        allowed = None if self.grammar is None else self.grammar.allowed(drafted)
        return RowRules(self.sampling, self.history, self.end_token_ids, drafted, allowed)

    def fit_draft(self, proposed: list[int]) -> list[int]:
        """``proposed`` as far as the grammar allows it, and the tokens that it leaves no choice."""
        if self.grammar is None:
            return proposed
        # The rejection rule needs the distribution of each draft token, which forced ones lack.
        return self.grammar.fit(proposed, self.draft_limit, force=not self.by_rejection)

    def record_verification(self, proposed: int, accepted: int) -> None:
        """Count one target forward that emitted tokens after the prefill."""
        self.num_spec_steps += 1
        self.num_draft_proposed += proposed
        self.num_draft_accepted += accepted
        missing = accepted + 1 - len(self.acceptance_histogram)
        self.acceptance_histogram.extend([0] * missing)
        self.acceptance_histogram[accepted] += 1

    def finished_event(
        self, reason: FinishReason, stop_sequence: str | None, model: ModelInfo
    ) -> FinishedEvent:
        """The terminal event, with everything measured."""
        return FinishedEvent(
            request_id=self.request_id,
            text=self.output.text,
            finish_reason=finish_reason(self.output, reason),
            stop_sequence=stop_sequence,
            usage=Usage(
                prompt_tokens=self.prompt_length,
                completion_tokens=self.num_output_tokens,
                total_tokens=len(self.token_ids),
                cached_tokens=self.cached_tokens,
            ),
            speculation=self._speculation(),
            timing=self._timing(),
            model=model,
            reasoning=self.output.reasoning,
            tool_calls=tuple(self.output.tool_calls),
            invalid_tool_calls=tuple(self.output.invalid_tool_calls),
        )

    def _speculation(self) -> SpeculationStats:
        steps, drafted = self.num_spec_steps, self.num_draft_proposed
        return SpeculationStats(
            method=self.drafter.name if self.drafter else "off",
            num_spec_steps=steps,
            num_draft_tokens=drafted,
            num_accepted_tokens=self.num_draft_accepted,
            mean_acceptance_length=1.0 + self.num_draft_accepted / steps if steps else 1.0,
            draft_acceptance_rate=self.num_draft_accepted / drafted if drafted else 0.0,
            acceptance_histogram=tuple(self.acceptance_histogram),
        )

    def _timing(self) -> Timing:
        now = time.monotonic()
        admitted = self.admitted_at or now
        first = self.first_token_at or now
        decode = max(0.0, (self.last_token_at or first) - first)
        after_first = self.num_output_tokens - 1
        return Timing(
            queue_s=admitted - self.submitted_at,
            time_to_first_token_s=first - self.submitted_at,
            decode_s=decode,
            total_s=now - self.submitted_at,
            tokens_per_second=after_first / decode if decode > 0 and after_first > 0 else 0.0,
        )
