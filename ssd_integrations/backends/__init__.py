"""Where requests run: in this process, or on Celery workers."""

from __future__ import annotations

from typing import Any

from ssd_integrations.backends.base import Backend
from ssd_integrations.errors import InvalidRequestError

__all__ = ["Backend", "open_backend"]


def open_backend(*, model: str, broker_url: str | None = None, **engine_options: Any) -> Backend:
    """The backend for ``model``: Celery workers behind ``broker_url``, else this process.

    Nothing is loaded or connected yet.

    Raises:
      InvalidRequestError: engine options are given that belong to the worker, or are unknown.
      MissingExtraError: the extra that the backend needs is not installed.
    """
    given = {name: value for name, value in engine_options.items() if value is not None}
    if broker_url is None:
        from ssd_integrations.backends.local import LocalBackend

        return LocalBackend(model=model, **given)
    if given:
        name, value = next(iter(given.items()))
        raise InvalidRequestError(
            f"{name}={value!r} is set on the worker, not by an application that uses broker_url.",
            remedy=f"Drop {name} here and give it to `ssd worker`.",
        )
    from ssd_integrations.backends.celery import CeleryBackend

    return CeleryBackend(broker_url)
