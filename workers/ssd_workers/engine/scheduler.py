"""Which sequences run, and how many rows each brings to the next step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from ssd_integrations.errors import DeadlineExceededError, OverloadedError, SSDError
from ssd_workers.engine.kv_cache import BLOCK
from ssd_workers.engine.sequence import Sequence

HasRoom = Callable[[Sequence, list[Sequence]], bool]
"""Whether a sequence may start beside those that run."""


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

    def admit(self, has_room: HasRoom) -> list[Sequence]:
        """Move waiting sequences into free rows; returns those admitted now.

        One that has no room holds up those behind it, or it might wait for ever.
        """
        admitted = []
        while self.waiting and len(self.running) < self._max_num_seqs:
            if not has_room(self.waiting[0], self.running):
                break
            sequence = self.waiting.popleft()
            if sequence.admitted_at is None:
                sequence.admitted_at = time.monotonic()
            self.running.append(sequence)
            admitted.append(sequence)
        return admitted

    def put_back(self, sequence: Sequence) -> None:
        """Let a running sequence be the next to be admitted again."""
        self.running.remove(sequence)
        self.waiting.appendleft(sequence)

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
                            f"{self._max_num_seqs} rows and for memory."
                        ),
                    )
                )
        return found

    def decoding(self) -> list[Sequence]:
        """Running sequences whose prompts have been read."""
        return [sequence for sequence in self.running if not sequence.in_prefill]

    def prompt_chunks(self, rows: int, *, sharing: bool) -> list[tuple[Sequence, int]]:
        """Sequences whose prompts are read on in the next step, and up to which position each.

        Parameters:
          rows: of prompts at most, over all sequences; first come, first served.
          sharing: whether a sequence can have a block that another has computed. It then waits
            for one that the other is about to compute.
        """
        chunks: list[tuple[Sequence, int]] = []
        for sequence in self.running:
            if not sequence.in_prefill or rows <= 0:
                continue
            if sharing and any(_computes_for(other, sequence) for other, _ in chunks):
                continue
            assert sequence.cache is not None  # given at admission
            end = min(sequence.prefill_length, sequence.cache.length + rows)
            rows -= end - sequence.cache.length
            chunks.append((sequence, end))
        return chunks


def _computes_for(first: Sequence, second: Sequence) -> bool:
    """Whether ``first`` is about to compute the block that ``second`` needs next."""
    assert first.cache is not None
    assert second.cache is not None
    end = (second.cache.length // BLOCK + 1) * BLOCK
    return (
        first.cache.length < end <= first.prefill_length
        and end < len(second.token_ids)
        and first.token_ids[:end] == second.token_ids[:end]
    )
