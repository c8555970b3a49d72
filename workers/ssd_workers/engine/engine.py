"""The decoding loop, one step at a time: admit, prefill, draft, verify, emit."""

from __future__ import annotations

import time

from ssd_integrations.errors import EngineError, IncompleteStructureError, SSDError
from ssd_integrations.protocol import (
    ErrorInfo,
    FailedEvent,
    FinishReason,
    ModelInfo,
    StartedEvent,
    TokenLogprob,
)
from ssd_workers.engine.draft_budget import DraftBudget
from ssd_workers.engine.drafters.base import Drafter
from ssd_workers.engine.loading import LoadedModel
from ssd_workers.engine.memory import CacheMemory
from ssd_workers.engine.output_parsers.output import delta_events
from ssd_workers.engine.output_parsers.parts import Part
from ssd_workers.engine.prompt_pace import PromptPace
from ssd_workers.engine.runner import RowBlock
from ssd_workers.engine.scheduler import Scheduler
from ssd_workers.engine.sequence import Sequence
from ssd_workers.engine.verifier import StepRows, Verdict, verify


class Engine:
    """Runs sequences to their end. Not thread-safe: one thread calls it.

    Parameters:
      target: the loaded target model.
      info: what finished events say of it.
      max_num_seqs: sequences that run at once.
      memory: gives sequences their caches; without one, as many as they want.
    """

    def __init__(
        self,
        target: LoadedModel,
        info: ModelInfo,
        max_num_seqs: int,
        memory: CacheMemory | None = None,
    ) -> None:
        self._target = target
        self._info = info
        self._memory = memory or CacheMemory(target.runner)
        self._scheduler = Scheduler(max_num_seqs)
        self._cost = target.runner.calibrate()
        self._pace = PromptPace(self._cost.per_row, joined=target.runner.joins_prompts)
        self._budget = DraftBudget()

    @property
    def has_work(self) -> bool:
        """Whether another step would do something."""
        return self._scheduler.has_work

    @property
    def sequences(self) -> list[Sequence]:
        """Every sequence that has not ended, running ones first."""
        return [*self._scheduler.running, *self._scheduler.waiting]

    def add(self, sequence: Sequence) -> None:
        """Take a sequence; its events start with one of the next steps."""
        self._scheduler.add(sequence)

    def step(self) -> None:
        """One target forward over every running sequence, and the events that follow from it."""
        for sequence in self._scheduler.cancelled():
            self._finish(sequence, "cancelled", None)
        for sequence, error in self._scheduler.overdue():
            self.fail(sequence, error)
        self._admit()
        rows = self._collect_rows()
        if not rows:
            return
        # Asked before the forward, which completes prompts: their rows say nothing about drafts.
        reading = [r for r in rows if r.sequence.in_prefill]
        prompt_rows = sum(len(r.block.token_ids) for r in reading)
        decoding = len(rows) - len(reading)
        decode_rows = sum(len(r.block.token_ids) for r in rows) - prompt_rows
        started = time.perf_counter()
        logits = self._target.runner.forward([r.block for r in rows])
        # Launching is not running; verification would wait here in any case.
        self._target.runner.synchronize()
        if reading:
            beside = self._cost.seconds(decoding, decode_rows) if decoding else 0.0
            self._pace.observe(prompt_rows, _elapsed(started) - beside)
        else:
            self._cost.observe(decoding, decode_rows, _elapsed(started))
        for r in reading:
            self._memory.keep(r.sequence)
        for r, verdict in zip(rows, verify(rows, logits, self._decode), strict=True):
            if verdict.emitted:
                self._advance(r, verdict)

    def fail(self, sequence: Sequence, error: SSDError) -> None:
        """End a sequence with an error; the others are not affected."""
        self._release(sequence)
        sequence.on_event(
            FailedEvent(request_id=sequence.request_id, error=ErrorInfo.from_error(error))
        )

    def _admit(self) -> None:
        """Caches for those that start, out of which those that outgrew the memory must go."""
        for sequence in reversed(self._memory.outgrown(self._scheduler.running)):
            self._scheduler.put_back(sequence)
            self._free(sequence)
        for sequence in self._scheduler.admit(self._memory.has_room):
            self._memory.open(sequence)
        for sequence in self._scheduler.running:
            if sequence.in_prefill:
                self._memory.reuse(sequence)

    def _collect_rows(self) -> list[StepRows]:
        rows = []
        decoding = self._scheduler.decoding()
        for sequence, draft in zip(decoding, self._draft(decoding), strict=True):
            assert sequence.cache is not None
            tokens = [sequence.token_ids[-1], *draft]
            rows.append(StepRows(sequence, RowBlock(sequence.cache, tokens, len(tokens)), draft))
        decode_rows = sum(len(r.block.token_ids) for r in rows)
        # Drafts are not a part of what a prompt may double.
        count = len(decoding)
        plain = self._cost.seconds(count, count) if decoding else 0.0
        prompt_rows = self._pace.rows(plain, decode_rows)
        sharing = self._memory.prefixes is not None
        for sequence, end in self._scheduler.prompt_chunks(prompt_rows, sharing=sharing):
            assert sequence.cache is not None
            tokens = sequence.token_ids[sequence.cache.length : end]
            # Only the last row says something about the output, and only if that is new.
            keep = 1 if end == len(sequence.token_ids) else 0
            rows.append(StepRows(sequence, RowBlock(sequence.cache, tokens, keep), []))
        return rows

    def _draft(self, sequences: list[Sequence]) -> list[list[int]]:
        drafts: dict[Sequence, list[int]] = {}
        by_drafter: dict[Drafter, list[Sequence]] = {}
        lengths = self._budget.lengths(sequences, self._cost)
        for sequence in lengths:
            if sequence.drafter is not None:
                by_drafter.setdefault(sequence.drafter, []).append(sequence)
        for drafter, group in by_drafter.items():
            limits = [lengths[sequence] for sequence in group]
            started = time.perf_counter()
            proposed = drafter.propose(group, limits)
            self._budget.observe_drafting(drafter, limits, _elapsed(started))
            drafts.update(zip(group, proposed, strict=True))
        return [sequence.fit_draft(drafts.get(sequence, [])) for sequence in sequences]

    def _advance(self, rows: StepRows, verdict: Verdict) -> None:
        sequence, accepted, emitted = rows.sequence, verdict.accepted, verdict.emitted
        if emitted[-1] < 0:
            # Whatever is wrong may have been kept as well.
            self._memory.forget_prefixes()
            self.fail(
                sequence,
                EngineError(
                    f"The model gave no usable logits (NaN or infinite) at token "
                    f"{len(sequence.token_ids) + accepted} of request {sequence.request_id}."
                ),
            )
            return
        kept, reason = self._cut(sequence, emitted)
        forced = 0
        incomplete: IncompleteStructureError | None = None
        if sequence.grammar is not None:
            forced = sequence.grammar.num_forced
            try:
                reason = sequence.grammar.advance(kept, reason)
            except IncompleteStructureError as error:
                # What was written is streamed first: how much may not depend on drafts.
                incomplete = error
            except SSDError as error:
                self.fail(sequence, error)
                return
        visible = kept[:-1] if kept[-1] in sequence.end_token_ids else kept
        delta = sequence.text.push(visible)
        if delta.stopped is not None:
            kept, reason = kept[: delta.kept_tokens], "stop"
        is_first = sequence.first_token_at is None
        sequence.extend(kept)
        assert sequence.cache is not None
        # Keys of all tokens but the newest; a rejected draft is rolled back by length.
        sequence.cache.truncate(len(sequence.token_ids) - 1)
        sequence.last_token_at = time.monotonic()
        if is_first:
            sequence.first_token_at = sequence.last_token_at
            sequence.on_event(
                StartedEvent(
                    request_id=sequence.request_id,
                    model=self._info.name,
                    prompt_tokens=sequence.prompt_length,
                )
            )
        else:
            sequence.record_verification(len(rows.draft), min(accepted, len(kept)))
            # What an end cut off was accepted all the same; what a grammar forced earns nobody.
            drafted = len(rows.draft) - forced
            self._budget.observe(sequence, drafted, min(accepted, drafted))
        self._emit(sequence, sequence.output.push(delta.text), kept, verdict.logprobs)
        if incomplete is not None:
            self.fail(sequence, incomplete)
        elif reason is not None:
            self._finish(sequence, reason, delta.stopped)

    def _cut(self, sequence: Sequence, emitted: list[int]) -> tuple[list[int], FinishReason | None]:
        """``emitted`` up to an end-of-sequence token or the token limit, and why it ends there."""
        emitted = emitted[: sequence.remaining_tokens]
        for index, token in enumerate(emitted):
            if token in sequence.end_token_ids:
                return emitted[: index + 1], "stop"
        if len(emitted) == sequence.remaining_tokens:
            return emitted, "length"
        return emitted, None

    def _emit(
        self,
        sequence: Sequence,
        parts: list[Part],
        token_ids: list[int],
        logprobs: tuple[TokenLogprob, ...] | None = None,
    ) -> None:
        for event in delta_events(sequence.request_id, parts, token_ids, logprobs):
            sequence.on_event(event)

    def _finish(self, sequence: Sequence, reason: FinishReason, stop: str | None) -> None:
        held_back = sequence.text.finish()
        if held_back.stopped is not None and stop is None:
            # The last, unfinished character completed a stop string.
            reason, stop = "stop", held_back.stopped
        rest = sequence.output.push(held_back.text) + sequence.output.finish(reason)
        self._emit(sequence, rest, [])
        self._memory.keep(sequence)
        self._release(sequence)
        sequence.on_event(sequence.finished_event(reason, stop, self._info))

    def _release(self, sequence: Sequence) -> None:
        self._scheduler.remove(sequence)
        self._budget.forget(sequence)
        self._free(sequence)

    def _free(self, sequence: Sequence) -> None:
        """Drop the caches of target and draft model."""
        sequence.cache = None
        if sequence.drafter is not None:
            sequence.drafter.forget(sequence.request_id)

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._target.tokenizer.decode(token_ids)
        return text


def _elapsed(started: float) -> float:
    return time.perf_counter() - started
