"""kombu's Redis transport, made to survive strange messages and an absent broker.

As it is, one message that is not JSON ends the Celery worker, one without the expected fields
makes it reconnect and take its running tasks again, and a broker that goes away while a task
runs ends it too: kombu closes the lost channel twice, and the second time it has no address
any more to give the task's message back to.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from kombu.transport import TRANSPORT_ALIASES, redis
from redis import ResponseError

logger = logging.getLogger(__name__)

#: Between two tries to take a message from a server that refuses.
_REFUSED_PAUSE_S = 0.5

#: What kombu raises on text that is not JSON, and on JSON that is not an envelope.
_NOT_A_MESSAGE = (ValueError, KeyError, TypeError, AttributeError)


class QoS(redis.QoS):  # type: ignore[misc]
    """Leaves to the visibility timeout what an absent broker cannot be told.

    A run goes on meanwhile. If its message comes back before its end, it joins the run; if
    after, the request is done and the message is acknowledged then.
    """

    def restore_unacked(self, client: Any = None) -> None:
        try:
            super().restore_unacked(client)
        except self._unreachable as error:
            logger.warning("Unacknowledged messages come back by their timeout: %r", error)
            self._delivered.clear()

    def ack(self, delivery_tag: str) -> None:
        try:
            super().ack(delivery_tag)
        except self._unreachable as error:
            logger.warning("A message is acknowledged when it comes back: %r", error)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        try:
            super().reject(delivery_tag, requeue)
        except self._unreachable as error:
            logger.warning("A message goes back by its timeout: %r", error)

    @property
    def _unreachable(self) -> tuple[type[BaseException], ...]:
        # AttributeError: the channel was closed and has forgotten its server's address.
        return (AttributeError, ResponseError, *self.channel.connection_errors)


class Channel(redis.Channel):  # type: ignore[misc]
    """Drops what cannot be read, with a line in the log; the queue goes on.

    A server that refuses to hand out messages (its disk is full, say) is asked again.
    """

    QoS = QoS

    def _brpop_read(self, **options: Any) -> Any:
        try:
            return super()._brpop_read(**options)
        except _NOT_A_MESSAGE as error:
            # The content may be anybody's data: the log gets the kind of fault only.
            logger.error("A message that no Celery client wrote was dropped: %r", type(error))
            return True
        except ResponseError as error:
            logger.warning("No requests are taken while Redis refuses: %s", error)
            time.sleep(_REFUSED_PAUSE_S)
            return True


class Transport(redis.Transport):  # type: ignore[misc]
    """The Redis transport with the channel above."""

    Channel = Channel


def install() -> None:
    """Make ``redis://`` and ``rediss://`` mean this transport in this process."""
    path = f"{Transport.__module__}:{Transport.__qualname__}"
    TRANSPORT_ALIASES.update(redis=path, rediss=path)
