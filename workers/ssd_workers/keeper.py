"""The worker's heartbeat: renews leases, looks for cancellations, announces the worker."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import redis

from ssd_integrations.backends.wire import (
    KEY_PREFIX,
    WORKERS_KEY,
    WorkerRecord,
    cancel_key,
    worker_key,
)
from ssd_workers.redis_connection import REDIS_ERRORS

logger = logging.getLogger(__name__)

#: kombu's sorted set of unacknowledged delivery tags, scored by when they were handed out.
#: Its sweep gives a message to another worker once its score is older than the visibility
#: timeout, so raising the score renews the lease.
UNACKED_INDEX_KEY = f"{KEY_PREFIX}unacked_index"

_TICK_S = 0.5
_ANNOUNCE_EVERY_S = 3.0
_ANNOUNCE_TTL_S = 10


class Keeper:
    """Does every half second what must not wait for a busy engine.

    Parameters:
      client: Redis.
      on_cancel: called with a request id whose cancellation was asked for.
    """

    def __init__(self, client: redis.Redis, on_cancel: Callable[[str], None]) -> None:
        self._client = client
        self._on_cancel = on_cancel
        self._lock = threading.Lock()
        self._leases: dict[str, str] = {}
        self._record: WorkerRecord | None = None
        self._announced_at = float("-inf")
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._loop, name="ssd-keeper", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def hold(self, request_id: str, delivery_tag: str) -> None:
        """Renew the lease of a message, and look for its cancellation, until :meth:`drop`."""
        with self._lock:
            self._leases[request_id] = delivery_tag

    def drop(self, request_id: str) -> None:
        """Stop renewing."""
        with self._lock:
            self._leases.pop(request_id, None)

    def announce(self, record: WorkerRecord) -> None:
        """Tell applications that this worker takes requests, until :meth:`withdraw`."""
        self._record = record
        self._announced_at = float("-inf")
        self._wake.set()

    def withdraw(self) -> None:
        """Take the announcement back; an absent Redis forgets it by itself."""
        record, self._record = self._record, None
        if record is None:
            return
        try:
            with self._client.pipeline() as pipe:
                pipe.delete(worker_key(record.worker_id))
                pipe.srem(WORKERS_KEY, record.worker_id)
                pipe.execute()
        except REDIS_ERRORS as error:
            logger.warning("The worker's announcement expires by itself: %s", error)

    def close(self) -> None:
        """Withdraw and stop the thread."""
        self._stopping = True
        self._wake.set()
        self._thread.join(2.0)
        self.withdraw()

    def _loop(self) -> None:
        while not self._stopping:
            try:
                self._tick()
            except REDIS_ERRORS as error:
                logger.warning("Leases and announcement wait for Redis: %s", error)
            self._wake.wait(_TICK_S)
            self._wake.clear()

    def _tick(self) -> None:
        with self._lock:
            leases = dict(self._leases)
        if leases:
            # XX: a message that another worker took over must not be entered again.
            scores = {tag: time.time() for tag in leases.values()}
            self._client.zadd(UNACKED_INDEX_KEY, scores, xx=True)
            wanted = self._client.mget([cancel_key(request_id) for request_id in leases])
            for request_id, cancelled in zip(leases, wanted, strict=True):
                if cancelled is not None:
                    self._on_cancel(request_id)
        record = self._record
        if record is not None and time.monotonic() - self._announced_at >= _ANNOUNCE_EVERY_S:
            self._refresh(record)
            self._announced_at = time.monotonic()

    def _refresh(self, record: WorkerRecord) -> None:
        with self._client.pipeline() as pipe:
            pipe.set(worker_key(record.worker_id), record.model_dump_json(), ex=_ANNOUNCE_TTL_S)
            pipe.sadd(WORKERS_KEY, record.worker_id)
            pipe.smembers(WORKERS_KEY)
            known = pipe.execute()[2]
        # Workers that died without a word: their record has expired, their id has not.
        ids = [raw.decode() for raw in known]
        records = self._client.mget([worker_key(worker_id) for worker_id in ids])
        gone = [worker_id for worker_id, found in zip(ids, records, strict=True) if found is None]
        if gone:
            self._client.srem(WORKERS_KEY, *gone)
