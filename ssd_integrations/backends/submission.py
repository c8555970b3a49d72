"""The state that a request leaves on Redis, seen from the application."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Iterable
from dataclasses import dataclass

from ssd_integrations.backends.wire import (
    CANCEL_CHANNEL,
    RETENTION_S,
    WorkerRecord,
    cancel_key,
    state_key,
)
from ssd_integrations.errors import InvalidRequestError
from ssd_integrations.protocol import GenerationRequest

#: Registers a request, by the server's clock. A retry with the same nonce changes nothing;
#: another request under the same id is refused (0).
REGISTER_SCRIPT = """
if redis.call('EXISTS', KEYS[1]) == 1 then
  return redis.call('HGET', KEYS[1], 'nonce') == ARGV[1] and 1 or 0
end
local now = redis.call('TIME')
local now_ms = tonumber(now[1]) * 1000 + math.floor(tonumber(now[2]) / 1000)
redis.call('HSET', KEYS[1], 'nonce', ARGV[1], 'model', ARGV[2], 'submitted_ms', now_ms,
           'queue_timeout_ms', ARGV[3], 'timeout_ms', ARGV[4])
redis.call('EXPIRE', KEYS[1], ARGV[5])
return 1
"""

#: Asks for a cancellation; 0 when the request is unknown or already done.
CANCEL_SCRIPT = """
if redis.call('EXISTS', KEYS[1]) == 0 or redis.call('HEXISTS', KEYS[1], 'done') == 1 then
  return 0
end
redis.call('SET', KEYS[2], '1', 'EX', ARGV[2])
redis.call('PUBLISH', ARGV[3], ARGV[1])
return 1
"""

#: What a late reader needs: the model, and how many ms each deadline is still away.
STATE_SCRIPT = """
local state = redis.call('HMGET', KEYS[1], 'model', 'submitted_ms', 'queue_timeout_ms',
                         'timeout_ms')
if not state[2] then return {} end
local now = redis.call('TIME')
local now_ms = tonumber(now[1]) * 1000 + math.floor(tonumber(now[2]) / 1000)
return {state[1], tonumber(state[2]) - now_ms, tonumber(state[3]), tonumber(state[4])}
"""

ScriptArguments = tuple[list[str], list[str | int]]


@dataclass(frozen=True)
class RequestState:
    """A submitted request: its model and the seconds left until its deadlines."""

    model: str
    queue_timeout_s: float
    timeout_s: float | None


def register_arguments(request: GenerationRequest) -> ScriptArguments:
    """Keys and arguments of :data:`REGISTER_SCRIPT`."""
    queue_ms = round(request.queue_timeout_s * 1000)
    total_ms = 0 if request.timeout_s is None else round(request.timeout_s * 1000)
    keep_s = queue_ms // 1000 + RETENTION_S
    return (
        [state_key(request.request_id)],
        [uuid.uuid4().hex, request.model, queue_ms, total_ms, keep_s],
    )


def check_registered(request_id: str, reply: int) -> None:
    """Raise InvalidRequestError when the id was in use."""
    if not reply:
        raise InvalidRequestError(
            f"request_id={request_id!r} was already sent.",
            remedy="Give each request an id of its own, or leave request_id out.",
        )


def cancel_arguments(request_id: str) -> ScriptArguments:
    """Keys and arguments of :data:`CANCEL_SCRIPT`."""
    return (
        [state_key(request_id), cancel_key(request_id)],
        [request_id, RETENTION_S, CANCEL_CHANNEL],
    )


def parse_state(request_id: str, reply: list[bytes | int]) -> RequestState:
    """The reply of :data:`STATE_SCRIPT`.

    Raises:
      InvalidRequestError: nothing is known of the request.
    """
    if not reply:
        raise InvalidRequestError(
            f"No request {request_id!r} is known to the broker.",
            remedy=f"Use an id that submit() returned; results are kept for {RETENTION_S} s.",
        )
    model, since_ms, queue_ms, total_ms = reply
    return RequestState(
        model=bytes(model).decode() if isinstance(model, bytes) else str(model),
        queue_timeout_s=max(0.0, (int(since_ms) + int(queue_ms)) / 1000),
        timeout_s=max(0.001, (int(since_ms) + int(total_ms)) / 1000) if int(total_ms) else None,
    )


def with_fixed_seed(request: GenerationRequest) -> GenerationRequest:
    """``request`` with a seed drawn here if it samples without one.

    A second attempt after a worker's death then writes the same text as the first.
    """
    sampling = request.sampling
    if sampling.temperature == 0.0 or sampling.seed is not None:
        return request
    seeded = sampling.model_copy(update={"seed": secrets.randbits(63)})
    return request.model_copy(update={"sampling": seeded})


def live_workers(values: Iterable[bytes | str | None]) -> list[WorkerRecord]:
    """The records among the values of the worker keys."""
    return [WorkerRecord.from_json(raw) for raw in values if raw is not None]


def describe_workers(model: str, workers: list[WorkerRecord]) -> str:
    """One sentence: who is there instead."""
    same = sum(1 for worker in workers if worker.queue_model == model)
    if same:
        return f"{same} worker(s) of this model are running but had no free slot."
    others = sorted({worker.queue_model for worker in workers})
    if others:
        return f"Workers are running for: {', '.join(others)}."
    return "No worker is running on this broker."
