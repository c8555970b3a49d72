"""Hears requests for cancellation within milliseconds; the keeper finds what this misses."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable

import redis
from redis.client import PubSub

from ssd_integrations.backends.wire import CANCEL_CHANNEL
from ssd_workers.redis_connection import REDIS_ERRORS

logger = logging.getLogger(__name__)

_POLL_S = 1.0


class CancelListener:
    """Calls ``on_cancel`` with every request id that is published for cancellation.

    Pub/sub forgets: what is published while the connection is down is lost here.
    """

    def __init__(self, client: redis.Redis, on_cancel: Callable[[str], None]) -> None:
        self._client = client
        self._on_cancel = on_cancel
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="ssd-cancel", daemon=True)

    def start(self) -> None:
        """Start listening."""
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._stopping.set()
        self._thread.join(2 * _POLL_S)

    def _loop(self) -> None:
        while not self._stopping.is_set():
            try:
                self._listen()
            except REDIS_ERRORS as error:
                logger.warning("Cancellations are heard later, Redis is away: %s", error)
                self._stopping.wait(_POLL_S)

    def _listen(self) -> None:
        pubsub = PubSub(self._client.connection_pool, ignore_subscribe_messages=True)
        with contextlib.closing(pubsub):
            pubsub.subscribe(CANCEL_CHANNEL)
            while not self._stopping.is_set():
                message = pubsub.get_message(timeout=_POLL_S)
                if message is not None:
                    self._on_cancel(message["data"].decode(errors="replace"))
