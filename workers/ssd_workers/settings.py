"""What a worker process is told at start, and the Celery configuration that follows from it."""

from __future__ import annotations

import os
import socket
import uuid
from typing import Any

from kombu import Queue
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ssd_integrations.backends.wire import (
    KEY_PREFIX,
    check_broker_url,
    queue_name,
    tls_options,
)
from ssd_integrations.errors import InvalidRequestError
from ssd_integrations.validation import describe_validation_error
from ssd_workers.engine.config import EngineConfig

DEFAULT_BROKER_URL = "redis://127.0.0.1:6379/0"

#: The broker's URL travels by environment: it may hold a password, and `ps` shows arguments.
BROKER_URL_VARIABLE = "SSD_BROKER_URL"
SETTINGS_VARIABLE = "SSD_WORKER_SETTINGS"
#: The supervisor's process id: its worker must not outlive it, not even by a race at its start.
PARENT_VARIABLE = "SSD_WORKER_PARENT"

#: Exit code of a worker whose model cannot be loaded; starting it again would not help.
EXIT_LOAD_FAILED = 78
#: Exit code of a worker whose settings are wrong.
EXIT_BAD_SETTINGS = 2

#: Task threads beyond the engine's rows, so that a freed row finds its next request waiting.
_SPARE_THREADS = 2


def new_worker_id() -> str:
    """A readable id that no other worker has."""
    return f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}"


class WorkerSettings(BaseModel):
    """One worker: its broker, its engine, and how it behaves when things go wrong.

    ``visibility_timeout_s`` is how long a message of a dead worker stays lost before another
    attempt starts; a running request renews its lease, so it may take longer than that.
    ``grace_s`` is how long a stopping worker lets running requests finish; what is left then
    goes back to the queue. ``max_attempts`` is how often a request may take its worker down.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    broker_url: str = Field(default=DEFAULT_BROKER_URL, repr=False)
    engine: EngineConfig
    worker_id: str = Field(default_factory=new_worker_id, pattern=r"^[A-Za-z0-9_.-]{1,128}$")
    visibility_timeout_s: float = Field(default=60.0, ge=1.0, le=86_400.0)
    grace_s: float = Field(default=30.0, ge=0.0, le=86_400.0)
    max_attempts: int = Field(default=3, ge=1, le=100)

    @property
    def num_threads(self) -> int:
        """Task threads: every row of the engine, and a few that wait."""
        return self.engine.max_num_seqs + _SPARE_THREADS

    def to_environment(self) -> dict[str, str]:
        """The variables that :meth:`from_environment` reads."""
        return {
            BROKER_URL_VARIABLE: self.broker_url,
            SETTINGS_VARIABLE: self.model_dump_json(exclude={"broker_url"}),
        }

    @classmethod
    def from_environment(cls) -> WorkerSettings:
        """The settings of this process; without any, the demo model on the local broker.

        Raises:
          InvalidRequestError: names the value that is out of bounds.
        """
        broker_url = os.environ.get(BROKER_URL_VARIABLE, DEFAULT_BROKER_URL)
        text = os.environ.get(SETTINGS_VARIABLE, '{"engine": {"model": "demo"}}')
        try:
            settings = cls.model_validate_json(text)
        except ValidationError as error:
            raise InvalidRequestError(
                describe_validation_error("worker settings", error),
                remedy=f"Correct {SETTINGS_VARIABLE}, or start with `ssd worker`.",
            ) from error
        return settings.model_copy(update={"broker_url": check_broker_url(broker_url)})


def build_worker_settings(**fields: object) -> WorkerSettings:
    """:class:`WorkerSettings` from keyword arguments.

    Raises:
      InvalidRequestError: names the option and the value that is out of bounds.
    """
    try:
        settings = WorkerSettings.model_validate(fields)
    except ValidationError as error:
        raise InvalidRequestError(describe_validation_error("worker option", error)) from error
    check_broker_url(settings.broker_url)
    return settings


def celery_configuration(settings: WorkerSettings) -> dict[str, Any]:
    """The Celery settings of a worker with ``settings``."""
    model = settings.engine.model
    transport = {
        "global_keyprefix": KEY_PREFIX,
        "visibility_timeout": settings.visibility_timeout_s,
        # Look for messages of dead workers every second, not every hundred.
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
        # Queues in the order of task_queues: interactive before batch.
        "queue_order_strategy": "priority",
        "socket_connect_timeout": 5,
    }
    return {
        "broker_url": settings.broker_url,
        "broker_transport_options": transport,
        "broker_use_ssl": tls_options(settings.broker_url),
        "broker_connection_retry_on_startup": True,
        "broker_connection_max_retries": None,
        "result_backend": settings.broker_url,
        "redis_backend_use_ssl": tls_options(settings.broker_url),
        "result_backend_transport_options": {"global_keyprefix": KEY_PREFIX},
        "result_expires": 3600,
        "task_ignore_result": True,
        "task_serializer": "json",
        "result_serializer": "json",
        "accept_content": ["json"],
        "task_acks_late": True,
        "task_reject_on_worker_lost": True,
        "task_queues": [
            Queue(queue_name(model, "interactive")),
            Queue(queue_name(model, "batch")),
        ],
        "task_create_missing_queues": False,
        "worker_prefetch_multiplier": 1,
        "worker_pool": "threads",
        "worker_concurrency": settings.num_threads,
        "worker_hijack_root_logger": True,
        "worker_redirect_stdouts": False,
        # An attempt goes on while the broker is away: its stream resumes, and the message that
        # the reconnect brings back joins it (see runtime.py).
        "worker_cancel_long_running_tasks_on_connection_loss": False,
        "worker_enable_prefetch_count_reduction": False,
        "include": ["ssd_workers.tasks"],
    }
