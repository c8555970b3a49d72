"""Reads a request's events from its stream: resumes without gap or duplicate, minds deadlines.

Nothing here does input or output, so that the blocking and the asyncio reader share all of it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from ssd_integrations.backends.wire import EVENT_FIELD, parse_entry_id
from ssd_integrations.errors import DeadlineExceededError, EngineError
from ssd_integrations.protocol import (
    DeltaEvent,
    Event,
    FailedEvent,
    FinishedEvent,
    StartedEvent,
    ToolCallDelta,
    event_from_json,
)

Entry = tuple[bytes, Mapping[bytes, bytes]]

#: Longest XREAD BLOCK; far below the socket timeout.
MAX_BLOCK_S = 2.0
#: With no entry for this long, look whether a worker is still there.
IDLE_CHECK_S = 10.0


class StreamCursor:
    """Turns stream entries into events, across attempts.

    When a worker dies, the next attempt starts the text again from its beginning. The
    sampling is seeded, so it is the same text: the cursor checks that and yields only what
    the reader has not had yet.
    """

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.last_id = "0-0"
        self.taken = False
        self.finished = False
        self._attempt = 0
        self._sequence = 0
        self._started = False
        self._channels: dict[str | int, _Channel] = {}
        self._calls_told: set[int] = set()
        self._num_tokens = 0
        self._attempt_tokens = 0

    def feed(self, entries: Iterable[Entry]) -> Iterator[Event]:
        """Yield the new events of ``entries``.

        Raises:
          SSDError: the request failed, of the class its FailedEvent names.
          EngineError: entries are missing, or a second attempt wrote another text.
          MalformedMessageError: an entry is not an event of this protocol.
        """
        for raw_id, fields in entries:
            self._advance(*parse_entry_id(raw_id))
            self.last_id = raw_id.decode()
            self.taken = True
            if EVENT_FIELD not in fields:
                continue
            event = self._fresh_part(event_from_json(fields[EVENT_FIELD]))
            if event is not None:
                yield event
            if self.finished:
                return

    def _advance(self, attempt: int, sequence: int) -> None:
        if attempt != self._attempt:
            self._attempt, self._sequence = attempt, -1
            self._attempt_tokens = 0
            for channel in self._channels.values():
                channel.read = 0
        if sequence != self._sequence + 1:
            self.finished = True
            raise EngineError(
                f"Entries {attempt}-{self._sequence + 1} to {attempt}-{sequence - 1} of request "
                f"{self.request_id} are gone: the reader fell too far behind."
            )
        self._sequence = sequence

    def _fresh_part(self, event: Event) -> Event | None:
        if isinstance(event, FailedEvent):
            self.finished = True
            raise event.error.to_error()
        if isinstance(event, FinishedEvent):
            self.finished = True
            return event
        if isinstance(event, StartedEvent):
            first, self._started = not self._started, True
            return event if first else None
        return self._fresh_delta(event)

    def _fresh_delta(self, event: DeltaEvent) -> DeltaEvent | None:
        known_tokens = max(0, self._num_tokens - self._attempt_tokens)
        self._attempt_tokens += len(event.token_ids)
        tokens = event.token_ids[known_tokens:]
        self._num_tokens += len(tokens)
        text = self._fresh_text("text", event.text)
        reasoning = self._fresh_text("reasoning", event.reasoning)
        calls = [call for piece in event.tool_calls if (call := self._fresh_call(piece))]
        if not (text or tokens or reasoning or calls):
            return None
        logprobs = None if event.logprobs is None else event.logprobs[known_tokens:]
        return event.model_copy(
            update={
                "text": text,
                "token_ids": tokens,
                "logprobs": logprobs,
                "reasoning": reasoning,
                "tool_calls": tuple(calls),
            }
        )

    def _fresh_call(self, piece: ToolCallDelta) -> ToolCallDelta | None:
        arguments = self._fresh_text(piece.index, piece.arguments)
        if piece.index not in self._calls_told:
            self._calls_told.add(piece.index)
            return piece.model_copy(update={"arguments": arguments})
        if not arguments:
            return None
        return ToolCallDelta(index=piece.index, arguments=arguments)

    def _fresh_text(self, channel: str | int, text: str) -> str:
        """The part of ``text`` that the reader has not had yet; a number is a call's arguments."""
        known = self._channels.setdefault(channel, _Channel())
        expected = known.text[known.read : known.read + len(text)]
        if not text.startswith(expected):
            raise EngineError(
                f"Attempt {self._attempt} of request {self.request_id} wrote {text!r} where "
                f"an earlier attempt wrote {expected!r}."
            )
        known.read += len(text)
        fresh = text[len(expected) :]
        known.text += fresh
        return fresh


@dataclass
class _Channel:
    """One of the texts that a request writes, and how much of it this attempt has written."""

    text: str = ""
    read: int = 0


class StreamWatch:
    """The deadlines of one reader, in seconds on this machine's monotonic clock.

    Parameters:
      queue_timeout_s: until a worker must have taken the request, from now; also how long a
        request that was taken may be without any worker.
      timeout_s: until the last event must be there, from now; None waits as long as a worker
        is there.
      reconnect_timeout_s: how long the broker may be away.
    """

    def __init__(
        self, queue_timeout_s: float, timeout_s: float | None, reconnect_timeout_s: float
    ) -> None:
        now = time.monotonic()
        self.queue_timeout_s = queue_timeout_s
        self._queue_deadline = now + queue_timeout_s
        self._timeout_s = timeout_s
        self._deadline = None if timeout_s is None else now + timeout_s
        self._reconnect_timeout_s = reconnect_timeout_s
        self._answered_at = now
        self._abandoned_at: float | None = None
        self._heard_at = now
        self.gave_up = False

    def block_s(self, cursor: StreamCursor) -> float:
        """How long the next read may block."""
        due = [time.monotonic() + MAX_BLOCK_S]
        if not cursor.taken:
            due.append(self._queue_deadline)
        if self._deadline is not None:
            due.append(self._deadline)
        return max(0.001, min(due) - time.monotonic())

    def heard(self, anything: bool) -> None:
        """The broker answered; ``anything`` tells whether there were entries."""
        self._answered_at = time.monotonic()
        if anything:
            self._heard_at = self._answered_at
            self._abandoned_at = None

    def lost(self) -> float | None:
        """The broker did not answer: seconds to sleep before the next try, None to give up."""
        now = time.monotonic()
        past_deadline = self._deadline is not None and now >= self._deadline
        # Counted from its last answer: one that is frozen takes long to be found silent.
        if past_deadline or now - self._answered_at >= self._reconnect_timeout_s:
            self.gave_up = True
            return None
        return 0.1

    def check_deadline(self, cursor: StreamCursor) -> None:
        """Raise DeadlineExceededError when the total deadline has passed."""
        if cursor.finished or self._deadline is None:
            return
        if time.monotonic() >= self._deadline:
            raise DeadlineExceededError(
                f"Request {cursor.request_id} did not finish within {self._timeout_s:g} s."
            )

    def queue_deadline_passed(self, cursor: StreamCursor) -> bool:
        """Whether no worker took the request in time."""
        return not cursor.taken and time.monotonic() >= self._queue_deadline

    def needs_workers(self, cursor: StreamCursor) -> bool:
        """Whether it is time to look for workers: not taken in time, or silent for long."""
        silent = cursor.taken and time.monotonic() - self._heard_at >= IDLE_CHECK_S
        return silent or self.queue_deadline_passed(cursor)

    def worker_missing(self, alive: bool) -> bool:
        """Note whether a worker of the model is there; True once none was for too long."""
        now = time.monotonic()
        if alive:
            self._abandoned_at = None
            return False
        self._abandoned_at = self._abandoned_at or now
        return now - self._abandoned_at >= self.queue_timeout_s
