"""Streams: resumed after lost connections, checked for gaps, fenced against old attempts."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ssd_integrations.backends.celery import CeleryBackend
from ssd_integrations.backends.stream_reader import Entry, StreamCursor
from ssd_integrations.backends.wire import entry_id, state_key, stream_key
from ssd_integrations.errors import EngineError, MalformedMessageError
from ssd_integrations.protocol import (
    DeltaEvent,
    Event,
    FinishedEvent,
    ModelInfo,
    SpeculationStats,
    StartedEvent,
    Timing,
    TokenLogprob,
    ToolCallDelta,
    Usage,
)
from ssd_workers import claims
from ssd_workers.embedded import EmbeddedValkey
from ssd_workers.redis_connection import connect
from ssd_workers.streams import StreamPublisher, StreamWriter
from tests.worker_support import Worker, client, request, wait_until

TOKENS = 300


def finished(text: str) -> FinishedEvent:
    model = ModelInfo(
        name="m", architecture="a", context_length=8, vocab_size=8, dtype="float32", device="cpu"
    )
    timing = Timing(queue_s=0, time_to_first_token_s=0, decode_s=0, total_s=0, tokens_per_second=0)
    return FinishedEvent(
        request_id="r",
        text=text,
        finish_reason="stop",
        usage=Usage(prompt_tokens=1, completion_tokens=1, total_tokens=2),
        speculation=SpeculationStats(method="off"),
        timing=timing,
        model=model,
    )


def delta(text: str, *token_ids: int) -> DeltaEvent:
    return DeltaEvent(request_id="r", text=text, token_ids=token_ids)


def entry(attempt: int, sequence: int, event: Event | None) -> Entry:
    fields = {b"taken": b"w"} if event is None else {b"event": event.to_json().encode()}
    return entry_id(attempt, sequence).encode(), fields


class TestCursor:
    """The reader's side, without a server."""

    started = StartedEvent(request_id="r", model="m", prompt_tokens=1)

    def feed(self, cursor: StreamCursor, *entries: Entry) -> list[Event]:
        return list(cursor.feed(entries))

    def test_a_second_attempt_yields_only_what_is_new(self) -> None:
        cursor = StreamCursor("r")
        first = self.feed(
            cursor,
            entry(1, 0, None),
            entry(1, 1, self.started),
            entry(1, 2, delta("ab", 1, 2)),
            entry(1, 3, delta("c", 3)),
        )
        second = self.feed(
            cursor,
            entry(2, 0, None),
            entry(2, 1, self.started),
            entry(2, 2, delta("a", 1)),
            entry(2, 3, delta("bcd", 2, 3, 4)),
            entry(2, 4, delta("e", 5)),
            entry(2, 5, finished("abcde")),
        )
        deltas = [event for event in first + second if isinstance(event, DeltaEvent)]
        assert [event.text for event in deltas] == ["ab", "c", "d", "e"]
        assert [token for event in deltas for token in event.token_ids] == [1, 2, 3, 4, 5]
        assert [event.type for event in first + second].count("started") == 1
        assert cursor.finished

    def test_log_probabilities_of_a_second_attempt_go_with_its_new_tokens(self) -> None:
        def with_logprobs(text: str, *token_ids: int) -> DeltaEvent:
            logprobs = tuple(TokenLogprob(token_id=i, token="x", logprob=-i) for i in token_ids)
            return delta(text, *token_ids).model_copy(update={"logprobs": logprobs})

        cursor = StreamCursor("r")
        self.feed(cursor, entry(1, 0, self.started), entry(1, 1, with_logprobs("ab", 1, 2)))
        (event,) = self.feed(
            cursor, entry(2, 0, self.started), entry(2, 1, with_logprobs("abcd", 1, 2, 3, 4))
        )
        assert event == with_logprobs("cd", 3, 4)

    def test_calls_and_reasoning_of_a_second_attempt_go_on_where_the_first_ended(self) -> None:
        def with_call(reasoning: str, *pieces: ToolCallDelta) -> DeltaEvent:
            update = {"reasoning": reasoning, "tool_calls": pieces}
            return delta("").model_copy(update=update)

        cursor = StreamCursor("r")
        start = ToolCallDelta(index=0, id="i", name="n", arguments='{"a"')
        self.feed(cursor, entry(1, 0, self.started), entry(1, 1, with_call("hm", start)))
        more = start.model_copy(update={"arguments": '{"a": 1}'})
        next_one = ToolCallDelta(index=1, id="j", name="m")
        (event,) = self.feed(
            cursor, entry(2, 0, self.started), entry(2, 1, with_call("hm.", more, next_one))
        )
        assert event == with_call(".", ToolCallDelta(index=0, arguments=": 1}"), next_one)
        other = start.model_copy(update={"arguments": '{"b"'})
        with pytest.raises(EngineError, match="earlier attempt wrote"):
            self.feed(cursor, entry(3, 0, self.started), entry(3, 1, with_call("", other)))

    def test_a_second_attempt_with_another_text_is_an_error(self) -> None:
        cursor = StreamCursor("r")
        self.feed(cursor, entry(1, 0, None), entry(1, 1, delta("ab", 1)))
        with pytest.raises(EngineError, match="earlier attempt wrote 'ab'"):
            self.feed(cursor, entry(2, 0, None), entry(2, 1, delta("ax", 1)))

    def test_a_gap_is_an_error(self) -> None:
        cursor = StreamCursor("r")
        self.feed(cursor, entry(1, 0, None), entry(1, 1, self.started))
        with pytest.raises(EngineError, match="1-2 to 1-4"):
            self.feed(cursor, entry(1, 5, delta("x", 1)))

    def test_a_trimmed_beginning_is_an_error(self) -> None:
        with pytest.raises(EngineError, match="fell too far behind"):
            self.feed(StreamCursor("r"), entry(2, 7, delta("x", 1)))

    def test_what_is_no_event_is_an_error(self) -> None:
        with pytest.raises(MalformedMessageError):
            self.feed(StreamCursor("r"), (b"1-0", {b"event": b'{"type": "telegram"}'}))


@pytest.fixture
def publisher(broker: EmbeddedValkey) -> Iterator[StreamPublisher]:
    started = StreamPublisher(connect(broker.url))
    started.start()
    yield started
    started.close()


def writer_of(url: str, owner: str, max_len: int = 1000, redelivered: bool = False) -> StreamWriter:
    claim = claims.claim(
        connect(url), "r", owner=owner, worker_id=owner, redelivered=redelivered, max_attempts=3
    )
    assert claim.verdict == "run"
    return StreamWriter("r", claim.attempt, max_len, on_fenced=lambda: None)


def ids_in(url: str) -> list[str]:
    with client(url) as redis:
        return [raw.decode() for raw, _ in redis.xrange(stream_key("r"))]


def test_an_older_attempt_is_fenced_by_redis(
    broker: EmbeddedValkey, publisher: StreamPublisher
) -> None:
    stopped = threading.Event()
    zombie = writer_of(broker.url, "old")
    zombie.on_fenced = stopped.set
    publisher.put(zombie, delta("a", 1))
    wait_until(lambda: ids_in(broker.url) == ["1-0", "1-1"], 5, "the first attempt writes")
    successor = writer_of(broker.url, "new", redelivered=True)
    publisher.put(zombie, delta("late", 2))
    publisher.put(zombie, finished("alate"))
    assert stopped.wait(5)
    assert zombie.fenced
    publisher.put(successor, delta("a", 1))
    publisher.put(successor, finished("a"))
    assert successor.settled.wait(5)
    assert not successor.fenced
    assert ids_in(broker.url) == ["1-0", "1-1", "2-0", "2-1", "2-2"]


def test_a_claim_is_idempotent_and_knows_its_past(broker: EmbeddedValkey) -> None:
    redis = connect(broker.url)

    def claim(owner: str, redelivered: bool = True) -> claims.Claim:
        return claims.claim(
            redis, "r", owner=owner, worker_id="w", redelivered=redelivered, max_attempts=3
        )

    assert (claim("a", False).verdict, claim("a", False).attempt) == ("run", 1)
    assert claim("b", False).verdict == "duplicate"
    assert (claim("b").verdict, claim("b").attempt) == ("run", 2)
    # An attempt that was handed back does not count as one that took its worker down.
    claims.release(redis, "r")
    assert claim("c").verdict == "run"
    assert claim("d").verdict == "run"
    assert claim("e").verdict == "exhausted"
    redis.hset(state_key("r"), "done", "1")
    assert claim("f").verdict == "done"
    assert claims.is_done(redis, "r")


def test_streams_are_capped_and_expire(broker: EmbeddedValkey, publisher: StreamPublisher) -> None:
    writer = writer_of(broker.url, "w", max_len=100)
    for number in range(2000):
        publisher.put(writer, delta("x", number))
    publisher.put(writer, finished("x"))
    assert writer.settled.wait(10)
    with client(broker.url) as redis:
        assert redis.xlen(stream_key("r")) < 300
        assert 0 < redis.ttl(stream_key("r")) <= 3600
        assert 0 < redis.ttl(state_key("r")) <= 3600


def test_lost_connections_leave_no_gap_and_no_duplicate(
    shared_backend: CeleryBackend, shared_broker: EmbeddedValkey, long_model: Path
) -> None:
    expected = shared_backend.result(shared_backend.submit(request(long_model, TOKENS))).text
    stop = threading.Event()

    def cut_every_connection() -> None:
        with client(shared_broker.url) as redis:
            while not stop.wait(0.3):
                redis.client_kill_filter(_type="normal", skipme=True)
                redis.client_kill_filter(_type="pubsub", skipme=True)

    cutter = threading.Thread(target=cut_every_connection)
    events: list[Event] = []
    stream = shared_backend.generate(request(long_model, TOKENS))
    events.append(next(stream))
    cutter.start()
    events.extend(stream)
    stop.set()
    cutter.join()
    deltas = [event for event in events if isinstance(event, DeltaEvent)]
    assert "".join(event.text for event in deltas) == expected
    assert isinstance(events[-1], FinishedEvent)
    assert sum(len(event.token_ids) for event in deltas) == events[-1].usage.completion_tokens
    assert [event.type for event in events].count("started") == 1
    # The message came back to the worker, which joined it to the run instead of repeating it.
    with client(shared_broker.url) as redis:
        attempt = redis.hget(state_key(events[-1].request_id), "attempt")
        wait_until(lambda: redis.hlen("ssd:unacked") == 0, 10, "the message is acknowledged")
    assert attempt == b"1"


def test_a_second_reader_joins_midway(
    shared_backend: CeleryBackend, shared_worker: Worker, long_model: Path
) -> None:
    sent = request(long_model, TOKENS)
    first = shared_backend.generate(sent)
    for _ in range(20):
        next(first)
    second = list(shared_backend.collect(sent.request_id))
    rest = list(first)
    assert isinstance(rest[-1], FinishedEvent)
    assert rest[-1] == second[-1]
    text = "".join(event.text for event in second if isinstance(event, DeltaEvent))
    assert text == rest[-1].text


def test_a_slow_reader_does_not_slow_the_engine(
    shared_backend: CeleryBackend, long_model: Path
) -> None:
    slow = shared_backend.generate(request(long_model, TOKENS))
    next(slow)
    started = time.monotonic()
    list(shared_backend.generate(request(long_model, TOKENS)))
    alone_s = time.monotonic() - started
    events = list(slow)
    assert isinstance(events[-1], FinishedEvent)
    assert events[-1].timing.total_s < 3 * alone_s + 1
