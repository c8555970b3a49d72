"""The Celery app of the workers, configured from the environment.

``ssd worker`` runs it under a supervisor. Celery's own command works too::

    SSD_BROKER_URL=redis://... celery -A ssd_workers.celery_app worker \\
        -P threads --without-gossip --without-mingle
"""

from __future__ import annotations

from typing import Any

from celery import Celery

from ssd_workers import transport
from ssd_workers.bootstep import EngineStep
from ssd_workers.settings import WorkerSettings, celery_configuration

settings = WorkerSettings.from_environment()

transport.install()

app: Any = Celery("ssd_workers", set_as_current=False)
app.config_from_object(celery_configuration(settings))
app.ssd_settings = settings
app.steps["worker"].add(EngineStep)
