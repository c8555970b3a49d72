"""Entry point of the process that holds the model: ``python -m ssd_workers.process``.

The supervisor starts it, with the settings in the environment.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import warnings

from ssd_integrations.errors import SSDError
from ssd_workers.lifetime import die_with_parent
from ssd_workers.settings import EXIT_BAD_SETTINGS, PARENT_VARIABLE

_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
#: Seconds after which a thread must let another one run. The default of 5 ms is what a task,
#: a token or a cancellation would wait each time that it meets the engine's thread.
_SWITCH_INTERVAL_S = 0.001


def main() -> int:
    """Run the Celery worker until it is told to stop; its exit code."""
    parent = os.environ.get(PARENT_VARIABLE, "")
    die_with_parent(signal.SIGTERM, int(parent) if parent.isdecimal() else None)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        from ssd_workers.celery_app import app, settings
    except SSDError as error:
        print(f"The worker cannot start. {error}", file=sys.stderr, flush=True)
        return EXIT_BAD_SETTINGS
    # Celery's remarks on running as root (containers do) and on its next major release.
    warnings.filterwarnings("ignore", category=UserWarning, module="celery.platforms")
    warnings.filterwarnings("ignore", category=PendingDeprecationWarning, module="celery")
    logging.getLogger("celery.app.trace").addFilter(_tell_hand_back)
    app.conf.worker_log_format = _LOG_FORMAT
    app.conf.worker_task_log_format = _LOG_FORMAT
    worker = app.Worker(
        hostname=f"ssd@{settings.worker_id}",
        loglevel=logging.INFO,
        quiet=True,
        without_gossip=True,
        without_mingle=True,
    )
    worker.start()
    return int(worker.exitcode or 0)


def _tell_hand_back(record: logging.LogRecord) -> bool:
    """A request that goes back to the queue is part of a stop: one line, no traceback."""
    from celery.exceptions import Reject

    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, Reject) and error.requeue:
        record.msg, record.args = "Request %s goes back to the queue.", (error.reason,)
        record.exc_info = None
    return True


if __name__ == "__main__":
    sys.exit(main())
