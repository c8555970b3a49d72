"""The one Celery task: run a request and let its stream speak."""

from __future__ import annotations

from typing import Any

from celery.exceptions import Reject

from ssd_integrations.backends.wire import TASK_NAME
from ssd_workers.celery_app import app
from ssd_workers.runtime import Delivery, HandBack


@app.task(name=TASK_NAME, bind=True, ignore_result=True)  # type: ignore[untyped-decorator]
def generate(task: Any, *arguments: object, **options: object) -> None:
    """Run a request, given as its JSON text, on this process's engine.

    Other arguments are accepted and refused by the runtime, so that the sender learns of it.
    The message is acknowledged when this returns: after the last entry is on the stream.
    """
    message = task.request
    body = arguments[0] if len(arguments) == 1 and not options else None
    delivery = Delivery(
        request_id=message.id,
        body=body if isinstance(body, str) else "",
        delivery_tag=message.properties["delivery_tag"],
        redelivered=bool(message.delivery_info.get("redelivered")),
    )
    try:
        task.app.runtime.execute(delivery)
    except HandBack as outcome:
        raise Reject(str(outcome), requeue=True) from outcome
