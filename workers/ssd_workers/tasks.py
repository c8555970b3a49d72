"""The one Celery task: run a request and let its stream speak."""

from __future__ import annotations

from typing import Any

from celery.exceptions import Reject

from ssd_integrations.backends.wire import TASK_NAME
from ssd_workers.celery_app import app
from ssd_workers.runtime import Delivery, HandBack


@app.task(name=TASK_NAME, bind=True, ignore_result=True)  # type: ignore[untyped-decorator]
def generate(task: Any, request_json: str) -> None:
    """Run the request ``request_json`` on this process's engine.

    The message is acknowledged when this returns: after the last entry is on the stream.
    """
    message = task.request
    delivery = Delivery(
        request_id=message.id,
        body=request_json,
        delivery_tag=message.properties["delivery_tag"],
        redelivered=bool(message.delivery_info.get("redelivered")),
    )
    try:
        task.app.runtime.execute(delivery)
    except HandBack as outcome:
        raise Reject(str(outcome), requeue=True) from outcome
