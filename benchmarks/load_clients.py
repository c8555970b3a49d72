"""Clients of benchmarks/random_load.py: each sends one random request after the other."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass

from benchmarks.load_requests import Case, CaseMaker, Fate, stream_faults
from ssd_integrations.backends.local import LocalBackend
from ssd_integrations.errors import (
    ContextLengthError,
    DeadlineExceededError,
    OverloadedError,
    SSDError,
)
from ssd_integrations.protocol import DeltaEvent, Event, FinishedEvent, GenerationRequest

_EXPECTED: dict[Fate, type[SSDError]] = {
    "deadline": DeadlineExceededError,
    "impatient": OverloadedError,
    "too long": ContextLengthError,
}


@dataclass(frozen=True)
class Sample:
    """A finished request that has one right text, and the tokens of its answer."""

    request: GenerationRequest
    tokens: list[int]


class Client:
    """Sends requests until ``end``; :meth:`run` is a thread's target.

    Parameters:
      backend: where they go.
      cases: what they are.
      end: on the monotonic clock.
    """

    def __init__(self, backend: LocalBackend, cases: CaseMaker, end: float) -> None:
        self._backend = backend
        self._cases = cases
        self._end = end
        self.outcomes: Counter[str] = Counter()
        self.faults: list[str] = []
        self.samples: list[Sample] = []
        self.tokens = 0

    def run(self) -> None:
        """Send at least one request."""
        while True:
            case = self._cases.make()
            events: list[Event] = []
            try:
                if case.asynchronous:
                    asyncio.run(self._consume_async(case, events))
                else:
                    self._consume(case, events)
            except SSDError as error:
                self._failed(case, error)
            except Exception as error:
                self._fault(case, f"{type(error).__name__}: {error}")
                raise
            else:
                self._ended(case, events)
            if time.monotonic() > self._end:
                return

    def _consume(self, case: Case, events: list[Event]) -> None:
        stream = self._backend.generate(case.request)
        for event in stream:
            events.append(event)
            if self._is_over(case, events):
                stream.close()  # type: ignore[attr-defined]
                return

    async def _consume_async(self, case: Case, events: list[Event]) -> None:
        stream = self._backend.agenerate(case.request)
        async for event in stream:
            events.append(event)
            if self._is_over(case, events):
                await stream.aclose()  # type: ignore[attr-defined]
                return

    def _is_over(self, case: Case, events: list[Event]) -> bool:
        """Whether the client leaves now; cancels if it is time to."""
        if len(events) == case.after_events + 1 and case.fate == "cancel":
            self._backend.cancel(case.request.request_id)
        return case.fate == "leave" and len(events) > case.after_events

    def _failed(self, case: Case, error: SSDError) -> None:
        expected = _EXPECTED.get(case.fate)
        if expected is not None and isinstance(error, expected):
            self.outcomes[error.code] += 1
        elif isinstance(error, ContextLengthError):
            self.outcomes["longer than meant"] += 1  # words are counted, not tokens
        else:
            self._fault(case, f"{type(error).__name__}: {error}")

    def _ended(self, case: Case, events: list[Event]) -> None:
        tokens = [t for event in events if isinstance(event, DeltaEvent) for t in event.token_ids]
        self.tokens += len(tokens)
        last = events[-1]
        if not isinstance(last, FinishedEvent):
            self.outcomes["left"] += 1
            if case.fate != "leave":
                self._fault(case, f"the stream ended after {len(events)} events")
            return
        self.outcomes[last.finish_reason] += 1
        for fault in stream_faults(case.request, events):
            self._fault(case, fault)
        if last.finish_reason == "cancelled" and case.fate != "cancel":
            self._fault(case, "cancelled, but nobody asked for it")
        if last.finish_reason != "cancelled" and case.has_one_text:
            self.samples.append(Sample(case.request, tokens))

    def _fault(self, case: Case, what: str) -> None:
        self.outcomes["fault"] += 1
        self.faults.append(f"{case.fate}: {what}; the request: {case.request.to_json()[:1000]}")
