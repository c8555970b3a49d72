"""Which sequences run, and how many rows each brings to the next step."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from ssd_integrations.errors import DeadlineExceededError, OverloadedError, SSDError
from ssd_workers.engine.sequence import Sequence

PREFILL_ROWS = 256
"""Prompt tokens per step over all sequences: a long prompt is cut so that others keep going."""


@dataclass(frozen=True)
class StepPlan:
    """``prefill`` pairs a sequence with the end of its next prompt chunk; ``decode`` may draft."""

    prefill: list[tuple[Sequence, int]]
    decode: list[Sequence]


class Scheduler:
    """First come, first served, at most ``max_num_seqs`` at a time."""

    def __init__(self, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    @property
    def has_work(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        """Put a sequence at the end of the queue."""
        self.waiting.append(sequence)

    def admit(self) -> list[Sequence]:
        """Move waiting sequences into free rows; returns those admitted now."""
        admitted = []
        while self.waiting and len(self.running) < self._max_num_seqs:
            sequence = self.waiting.popleft()
            sequence.admitted_at = time.monotonic()
            self.running.append(sequence)
            admitted.append(sequence)
        return admitted

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def cancelled(self) -> list[Sequence]:
        """Sequences that were asked to stop."""
        return [s for s in (*self.running, *self.waiting) if s.cancelled]

    def overdue(self) -> list[tuple[Sequence, SSDError]]:
        """Sequences past one of their deadlines, with the error that says which."""
        now = time.monotonic()
        found: list[tuple[Sequence, SSDError]] = []
        for sequence in (*self.running, *self.waiting):
            waited = now - sequence.submitted_at
            limit = sequence.request.timeout_s
            if limit is not None and waited > limit:
                done = sequence.num_output_tokens
                found.append(
                    (
                        sequence,
                        DeadlineExceededError(
                            f"The request was not finished after timeout_s={limit:g} s "
                            f"(tokens generated: {done})."
                        ),
                    )
                )
            elif sequence.admitted_at is None and waited > sequence.request.queue_timeout_s:
                limit = sequence.request.queue_timeout_s
                found.append(
                    (
                        sequence,
                        OverloadedError(
                            f"The request waited queue_timeout_s={limit:g} s for one of "
                            f"{self._max_num_seqs} rows."
                        ),
                    )
                )
        return found

    def plan(self) -> StepPlan:
        """Rows for the next step: everyone who decodes, and prompt chunks up to the budget."""
        prefill = []
        decode = []
        budget = PREFILL_ROWS
        for sequence in self.running:
            if not sequence.in_prefill:
                decode.append(sequence)
            elif budget > 0:
                assert sequence.cache is not None  # given at admission
                end = min(sequence.prompt_length, sequence.cache.length + budget)
                budget -= end - sequence.cache.length
                prefill.append((sequence, end))
        return StepPlan(prefill, decode)
