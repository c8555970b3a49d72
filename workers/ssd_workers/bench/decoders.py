"""What is measured: something that answers chat messages greedily and is timed from outside.

Every decoder is timed alike, on the wall clock of its caller: from handing over the messages
(templating and tokenising included) to the first piece of text, and to the end.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Protocol, cast, runtime_checkable

from ssd_integrations.backends.base import Backend
from ssd_integrations.errors import EngineError
from ssd_integrations.protocol import (
    DeltaEvent,
    Event,
    FinishedEvent,
    SpeculationParams,
    build_request,
    build_sampling,
)

Messages = Sequence[dict[str, str]]


@dataclass(frozen=True)
class Answer:
    """One timed answer. Tokens count the end-of-sequence token, for every decoder.

    ``first_tokens`` came with the first piece of text, ``steps`` is the number of passes of the
    model that wrote the others, and ``cpu_s`` is the processor time of the whole process meanwhile
    (so of use only where one answer ran at a time).
    """

    time_to_first_token_s: float
    total_s: float
    tokens: int
    first_tokens: int
    steps: int
    token_ids: tuple[int, ...]
    text: str
    cpu_s: float = 0.0

    @property
    def decode_s(self) -> float:
        """Seconds from the first piece of text to the end."""
        return self.total_s - self.time_to_first_token_s

    @property
    def decode_tokens(self) -> int:
        """The tokens that came in :attr:`decode_s`: all but those of the first piece."""
        return self.tokens - self.first_tokens


class Decoder(Protocol):
    """Answers one conversation at a time."""

    name: str

    def answer(self, messages: Messages, max_tokens: int) -> Answer:
        """Answer the last turn of ``messages`` with at most ``max_tokens`` tokens.

        Raises:
          SSDError: it failed, and there is no answer to be timed.
        """
        ...

    def start_round(self) -> None:
        """Forget what earlier rounds have taught it, if it learns from its own answers."""
        ...

    def close(self) -> None:
        """Free what it holds alone."""
        ...


@runtime_checkable
class DrafterSets(Protocol):
    """A backend whose drafters may learn, and that keeps apart what they learn for whom."""

    def use_drafters(self, name: str, *, fresh: bool) -> None:
        """Let requests from now on use the set of drafters called ``name``.

        What these have learnt, no other set knows. ``fresh`` begins with nothing learnt.
        """
        ...


class EngineDecoder:
    """This project's engine with one way of drafting, through a backend that others may share.

    Drafters that remember answers would find those of another decoder, or of an earlier round,
    to the very prompt they are asked; so every decoder has a set of its own, fresh in each round.
    """

    def __init__(
        self, name: str, backend: Backend, model: str, speculation: SpeculationParams
    ) -> None:
        self.name = name
        self._backend = backend
        self._model = model
        self._speculation = speculation

    def answer(self, messages: Messages, max_tokens: int) -> Answer:
        """Answer once; raises the backend's errors. May be called from several threads."""
        self._use_own_drafters(fresh=False)
        start, cpu = time.perf_counter(), time.process_time()
        first: float | None = None
        first_tokens = 0
        ids: list[int] = []
        finished: FinishedEvent | None = None
        request = build_request(
            model=self._model,
            messages=messages,
            sampling=build_sampling(max_tokens=max_tokens),
            speculation=self._speculation,
            # A batch of many waits here for its turn; that is part of what is measured.
            queue_timeout_s=86_400.0,
        )
        events = cast(Generator[Event, None, None], self._backend.generate(request))
        with closing(events):
            for event in events:
                if isinstance(event, DeltaEvent):
                    ids += event.token_ids
                    if first is None:
                        first, first_tokens = time.perf_counter(), len(ids)
                elif isinstance(event, FinishedEvent):
                    finished = event
        end = time.perf_counter()
        if finished is None:
            raise EngineError(f"The stream of request {request.request_id} ended without a result.")
        return Answer(
            time_to_first_token_s=(first if first is not None else end) - start,
            total_s=end - start,
            tokens=finished.usage.completion_tokens,
            first_tokens=first_tokens if first is not None else finished.usage.completion_tokens,
            steps=finished.speculation.num_spec_steps,
            token_ids=tuple(ids),
            text=finished.text,
            cpu_s=time.process_time() - cpu,
        )

    def start_round(self) -> None:
        """Forget the earlier rounds."""
        self._use_own_drafters(fresh=True)

    def close(self) -> None:
        """The backend belongs to whoever made it."""

    def _use_own_drafters(self, *, fresh: bool) -> None:
        if isinstance(self._backend, DrafterSets):
            self._backend.use_drafters(self.name, fresh=fresh)
