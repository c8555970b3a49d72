"""Who may run a request, and what its stream accepts: decided inside Redis, by its clock.

A request has one state hash and one stream. Taking it makes a new attempt, whose number is
the major part of every entry id that it writes; since ids only grow, Redis itself refuses
what an older attempt still writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

import redis

from ssd_integrations.backends.wire import (
    RETENTION_S,
    UNFINISHED_RETENTION_S,
    cancel_key,
    state_key,
    stream_key,
)

#: ``run``: decode it. ``cancelled``, ``expired``, ``exhausted``: write that as its failure.
#: ``done``: it has its last entry. ``duplicate``: the same task was published twice.
Verdict = Literal["run", "cancelled", "expired", "exhausted", "done", "duplicate"]

_CLAIM = """
local state, stream, cancel = KEYS[1], KEYS[2], KEYS[3]
local owner, worker, redelivered = ARGV[1], ARGV[2], ARGV[3]
local max_attempts, keep_s = tonumber(ARGV[4]), tonumber(ARGV[5])
local now = redis.call('TIME')
local now_ms = tonumber(now[1]) * 1000 + math.floor(tonumber(now[2]) / 1000)
local known = redis.call('HMGET', state, 'done', 'owner', 'attempt', 'released', 'submitted_ms',
                         'queue_timeout_ms', 'timeout_ms', 'verdict')
local attempt = tonumber(known[3] or 0)
local released = tonumber(known[4] or 0)
local age_ms = known[5] and now_ms - tonumber(known[5]) or 0
if known[1] then return {'done', attempt, age_ms} end
if known[2] == owner then return {known[8], attempt, age_ms} end
if attempt > 0 and redelivered == '0' then return {'duplicate', attempt, age_ms} end
local verdict = 'run'
if redis.call('EXISTS', cancel) == 1 then
  verdict = 'cancelled'
elseif attempt == 0 and known[6] and age_ms > tonumber(known[6]) then
  verdict = 'expired'
elseif attempt - released >= max_attempts then
  verdict = 'exhausted'
end
attempt = attempt + 1
local timeout_ms = tonumber(known[7] or 0)
if timeout_ms > 0 then keep_s = math.ceil(timeout_ms / 1000) + keep_s end
redis.call('HSET', state, 'attempt', attempt, 'owner', owner, 'verdict', verdict)
redis.call('XADD', stream, attempt .. '-0', 'taken', worker)
redis.call('EXPIRE', state, keep_s)
redis.call('EXPIRE', stream, keep_s)
return {verdict, attempt, age_ms}
"""

#: The last entry of an attempt; an error (and no change) if a later attempt has begun.
FINISH_SCRIPT = """
redis.call('XADD', KEYS[1], ARGV[1], 'event', ARGV[2])
redis.call('HSET', KEYS[2], 'done', '1')
redis.call('EXPIRE', KEYS[1], ARGV[3])
redis.call('EXPIRE', KEYS[2], ARGV[3])
return 1
"""

_RELEASE = """
if redis.call('EXISTS', KEYS[1]) == 1 then redis.call('HINCRBY', KEYS[1], 'released', 1) end
return 1
"""


@dataclass(frozen=True)
class Claim:
    """The outcome of taking a request: the verdict, the attempt's number, its age in seconds."""

    request_id: str
    verdict: Verdict
    attempt: int
    age_s: float


def claim(
    client: redis.Redis,
    request_id: str,
    *,
    owner: str,
    worker_id: str,
    redelivered: bool,
    max_attempts: int,
) -> Claim:
    """Take ``request_id`` for a new attempt.

    Calling it again with the same ``owner`` changes nothing, so a lost answer may be retried.

    Raises:
      redis.RedisError: Redis is away or refuses the script.
    """
    keys = [state_key(request_id), stream_key(request_id), cancel_key(request_id)]
    arguments: list[str | int] = [
        owner,
        worker_id,
        int(redelivered),
        max_attempts,
        UNFINISHED_RETENTION_S,
    ]
    verdict, attempt, age_ms = client.eval(_CLAIM, len(keys), *keys, *arguments)
    return Claim(
        request_id=request_id,
        verdict=cast(Verdict, verdict.decode()),
        attempt=int(attempt),
        age_s=int(age_ms) / 1000,
    )


def release(client: redis.Redis, request_id: str) -> None:
    """Note that an attempt ended without being the request's fault.

    Raises:
      redis.RedisError: Redis is away.
    """
    client.eval(_RELEASE, 1, state_key(request_id))


def is_done(client: redis.Redis, request_id: str) -> bool:
    """Whether the request has its last entry, or is no longer known.

    Raises:
      redis.RedisError: Redis is away.
    """
    state = state_key(request_id)
    with client.pipeline(transaction=False) as pipe:
        pipe.exists(state)
        pipe.hexists(state, "done")
        exists, done = pipe.execute()
    return bool(done) or not exists


def finish_arguments(request_id: str, last_id: str, event: str) -> list[str | int]:
    """Keys and arguments of :data:`FINISH_SCRIPT`, in EVAL's order."""
    return [stream_key(request_id), state_key(request_id), last_id, event, RETENTION_S]
