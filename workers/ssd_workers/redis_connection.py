"""The worker's own Redis connections, beside Celery's."""

from __future__ import annotations

import redis
from redis.backoff import ExponentialBackoff
from redis.retry import Retry

#: Errors that pass by themselves: the server is away, loading, failing over or full.
TRANSIENT_ERRORS = (
    redis.ConnectionError,
    redis.TimeoutError,
    redis.BusyLoadingError,
    redis.ReadOnlyError,
    redis.OutOfMemoryError,
    OSError,
)

#: The same, and whatever the server answers with an error: for what must go on regardless.
REDIS_ERRORS = (*TRANSIENT_ERRORS, redis.ResponseError)

#: How refusals of a write begin that end by themselves: the disk is full, replicas are missing,
#: a script runs too long, a cluster moves.
_PASSING_REFUSALS = ("MISCONF", "NOREPLICAS", "BUSY", "CLUSTERDOWN", "MASTERDOWN", "TRYAGAIN")


def is_transient(error: object) -> bool:
    """Whether ``error`` (or any other reply) says that a write may succeed later."""
    if isinstance(error, redis.ResponseError):
        return isinstance(error, TRANSIENT_ERRORS) or str(error).startswith(_PASSING_REFUSALS)
    return isinstance(error, TRANSIENT_ERRORS)


def connect(url: str) -> redis.Redis:
    """A lazy, thread-safe client; a command gives up after a few quick retries."""
    return redis.Redis.from_url(
        url,
        protocol=2,
        socket_timeout=5.0,
        socket_connect_timeout=2.0,
        retry=Retry(ExponentialBackoff(cap=0.5, base=0.05), 3),
    )
