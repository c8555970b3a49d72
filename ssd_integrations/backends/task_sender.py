"""Puts requests on the Celery queue of their model."""

from __future__ import annotations

import os
import threading
from typing import Any

import kombu.exceptions
import redis
from celery import Celery

from ssd_integrations.backends.redis_clients import TRANSIENT_ERRORS
from ssd_integrations.backends.wire import (
    KEY_PREFIX,
    TASK_NAME,
    queue_name,
    refused,
    tls_options,
    unreachable,
)
from ssd_integrations.protocol import GenerationRequest

_SOCKET_TIMEOUT_S = 5.0


class TaskSender:
    """A publishing-only Celery app, made on first use and made anew after a fork.

    Parameters:
      broker_url: ``redis://`` or ``rediss://``.
      connect_timeout_s: longest wait for one connection attempt.
    """

    def __init__(self, broker_url: str, *, connect_timeout_s: float) -> None:
        self._broker_url = broker_url
        self._connect_timeout_s = connect_timeout_s
        self._lock = threading.Lock()
        self._app: Celery | None = None
        self._pid = 0

    def send(self, request: GenerationRequest) -> None:
        """Publish ``request`` as a task whose id is the request's id.

        There is no ``expires``: Celery would apply it to a redelivery as well and drop a
        request whose worker crashed. The worker checks the queue deadline on the first
        attempt, by the broker's clock.

        Raises:
          BrokerUnavailableError: the broker is away or refuses the task.
        """
        try:
            self._current_app().send_task(
                TASK_NAME,
                args=(request.to_json(),),
                task_id=request.request_id,
                queue=queue_name(request.model, request.queue),
                ignore_result=True,
                # The arguments hold the prompt: keep it out of headers and worker logs.
                argsrepr="(...)",
                retry=True,
                retry_policy={"max_retries": 1, "interval_start": 0.0, "interval_step": 0.2},
            )
        except (kombu.exceptions.OperationalError, *TRANSIENT_ERRORS) as error:
            raise unreachable(self._broker_url, error) from error
        except redis.ResponseError as error:
            raise refused(self._broker_url, error) from error

    def close(self) -> None:
        """Close the connections; a later :meth:`send` opens new ones."""
        with self._lock:
            app, self._app = self._app, None
        if app is not None:
            app.close()

    def _current_app(self) -> Celery:
        with self._lock:
            if self._app is None or self._pid != os.getpid():
                self._pid = os.getpid()
                self._app = self._make_app()
            return self._app

    def _make_app(self) -> Celery:
        # Not the process's current app: the application may run Celery itself.
        app = Celery("ssd_client", broker=self._broker_url, set_as_current=False)
        options: dict[str, Any] = {
            "global_keyprefix": KEY_PREFIX,
            "socket_connect_timeout": self._connect_timeout_s,
            "socket_timeout": _SOCKET_TIMEOUT_S,
        }
        app.conf.update(
            broker_transport_options=options,
            broker_use_ssl=tls_options(self._broker_url),
            task_serializer="json",
            accept_content=["json"],
            task_ignore_result=True,
        )
        return app
