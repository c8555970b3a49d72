"""Which sequences run, and how many rows each brings to the next step."""

from __future__ import annotations

import time
from collections import deque

from ssd_integrations.errors import DeadlineExceededError, OverloadedError, SSDError
from ssd_workers.engine.sequence import Sequence

STEP_ROWS = 256
"""Rows of a step that reads prompts, over all sequences: a long prompt is cut so that others keep
going. The int8 products of the next row would cost as much as 200 more (a block of the library's
kernel), so rows that decode are counted too."""

# However many rows decode, prompts go on.
_LEAST_PROMPT_ROWS = 64


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

    def decoding(self) -> list[Sequence]:
        """Running sequences whose prompts have been read."""
        return [sequence for sequence in self.running if not sequence.in_prefill]

    def prompt_chunks(self, decode_rows: int) -> list[tuple[Sequence, int]]:
        """Sequences whose prompts are read on in the next step, and up to which position each.

        Parameters:
          decode_rows: rows that the step has already.
        """
        chunks = []
        budget = max(STEP_ROWS - decode_rows, _LEAST_PROMPT_ROWS)
        for sequence in self.running:
            if sequence.in_prefill and budget > 0:
                assert sequence.cache is not None  # given at admission
                end = min(sequence.prompt_length, sequence.cache.length + budget)
                budget -= end - sequence.cache.length
                chunks.append((sequence, end))
        return chunks
