"""Redis connections of one backend: opened on first use, one pool for all threads."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Awaitable, Iterator
from typing import TypeVar

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

from ssd_integrations.backends.wire import mask_url, refused, unreachable
from ssd_integrations.errors import BrokerUnavailableError

T = TypeVar("T")

#: What redis-py raises while the server is away, starting or being replaced. Not OSError: our
#: own BrokerUnavailableError is one, and redis-py turns those of sockets into its own.
TRANSIENT_ERRORS = (redis.ConnectionError, redis.TimeoutError)

#: Longest wait for one answer; above the longest XREAD BLOCK, or that call would time out.
_SOCKET_TIMEOUT_S = 5.0


class RedisClients:
    """Hands out Redis clients of one server; nothing connects before it is used.

    The thread pool of redis-py notices a fork by itself. Connections of an event loop
    belong to that loop, so each loop gets its own client, which closes at the loop's end.

    Parameters:
      url: ``redis://`` or ``rediss://``.
      connect_timeout_s: longest wait for one connection attempt; there are at most two.
    """

    def __init__(self, url: str, *, connect_timeout_s: float) -> None:
        self._url = url
        self._connect_timeout_s = connect_timeout_s
        self._lock = threading.Lock()
        self._sync: redis.Redis | None = None
        self._by_loop: dict[asyncio.AbstractEventLoop, _LoopClient] = {}

    @property
    def masked_url(self) -> str:
        """The server's URL without its password."""
        return mask_url(self._url)

    def sync(self) -> redis.Redis:
        """The client for threads."""
        with self._lock:
            if self._sync is None:
                self._sync = redis.Redis.from_url(
                    self._url,
                    protocol=2,
                    socket_timeout=_SOCKET_TIMEOUT_S,
                    socket_connect_timeout=self._connect_timeout_s,
                    # One retry: a pooled connection may have been closed while it was idle.
                    retry=Retry(NoBackoff(), 1),
                )
            return self._sync

    def of_running_loop(self) -> redis.asyncio.Redis:
        """The client of the event loop that runs now."""
        loop = asyncio.get_running_loop()
        with self._lock:
            # Loops that were closed without a shutdown: what they left is the collector's.
            for other in [other for other in self._by_loop if other.is_closed()]:
                del self._by_loop[other]
            if loop not in self._by_loop:
                client = redis.asyncio.Redis.from_url(
                    self._url,
                    protocol=2,
                    # With a timeout, redis-py writes inside asyncio.wait_for, which before
                    # Python 3.12 can swallow a cancellation. call() bounds the wait instead.
                    socket_timeout=None,
                    socket_connect_timeout=self._connect_timeout_s,
                    retry=AsyncRetry(NoBackoff(), 1),
                )
                self._by_loop[loop] = _LoopClient(client)
            return self._by_loop[loop].client

    async def call(self, command: Awaitable[T]) -> T:
        """Await a command of :meth:`of_running_loop`'s client, for a bounded time.

        Raises:
          redis.TimeoutError: no answer came.
        """
        task = asyncio.ensure_future(command)
        try:
            done, _ = await asyncio.wait({task}, timeout=_SOCKET_TIMEOUT_S)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if not done:
            task.cancel()
            raise redis.TimeoutError(f"no answer within {_SOCKET_TIMEOUT_S:g} s")
        return task.result()

    @contextlib.contextmanager
    def translated_errors(self) -> Iterator[None]:
        """Turn redis-py's errors into ours.

        Raises:
          BrokerUnavailableError: the server is away or refuses the credentials.
        """
        try:
            with self.refusals_translated():
                yield
        except TRANSIENT_ERRORS as error:
            raise self.unavailable(error) from error

    @contextlib.contextmanager
    def refusals_translated(self) -> Iterator[None]:
        """Turn an error that the server answers with into ours; lost connections pass.

        Raises:
          BrokerUnavailableError: the server refuses the command.
        """
        try:
            yield
        except redis.ResponseError as error:
            raise refused(self._url, error) from error

    def unavailable(self, error: Exception) -> BrokerUnavailableError:
        """The error that says that the server is away and why."""
        return unreachable(self._url, error)

    def close(self) -> None:
        """Close the thread pool; a loop's client closes with :meth:`aclose` or with its loop."""
        with self._lock:
            client, self._sync = self._sync, None
        if client is not None:
            client.close()

    async def aclose(self) -> None:
        """Close the client of the running event loop and the thread pool."""
        with self._lock:
            found = self._by_loop.pop(asyncio.get_running_loop(), None)
        if found is not None:
            await found.aclose()
        self.close()


class _LoopClient:
    """The client of the running event loop, closed by :meth:`aclose` or at the loop's end.

    An orderly loop (``asyncio.run`` and every server) finishes the asynchronous generators that
    were started in it before it ends: one of them closes the client.
    """

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self.client = client
        self._guard = self._close_at_the_end()
        with contextlib.suppress(StopIteration):
            self._guard.asend(None).send(None)  # to its yield, which awaits nothing

    async def aclose(self) -> None:
        """Close the client's connections."""
        await self._guard.aclose()

    async def _close_at_the_end(self) -> AsyncGenerator[None]:
        try:
            yield
        finally:
            await self.client.aclose()
