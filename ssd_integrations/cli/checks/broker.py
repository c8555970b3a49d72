"""The Redis or Valkey server, and the workers behind it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from ssd_integrations.backends.wire import check_broker_url, mask_text, mask_url
from ssd_integrations.cli.checks import Check
from ssd_integrations.errors import InvalidRequestError, SSDError

_TIMEOUT_S = 5.0


def checks(broker_url: str | None) -> Iterator[Check]:
    """Whether the broker answers, what it is, and which models its workers announce."""
    if broker_url is None:
        yield Check("broker", "ok", "none given: requests run in this process")
        return
    if importlib.util.find_spec("redis") is None or importlib.util.find_spec("celery") is None:
        yield Check(
            "broker",
            "fail",
            f"{mask_url(broker_url)} cannot be reached: redis and celery are missing",
            "pip install 'ssd-integrations[celery]'",
        )
        return
    check = _ping(broker_url)
    yield check
    if check.status == "ok":
        yield _workers(broker_url)


def _ping(broker_url: str) -> Check:
    import redis

    shown = mask_url(broker_url)
    try:
        check_broker_url(broker_url)
        with redis.Redis.from_url(
            broker_url, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S
        ) as client:
            client.ping()
            info = client.info("server")
    except InvalidRequestError as error:
        return Check("broker", "fail", error.message, error.remedy)
    except (redis.RedisError, OSError, ValueError) as error:
        return Check(
            "broker",
            "fail",
            f"{shown} does not answer: {mask_text(str(error))}",
            "Start it (`ssd up` runs an embedded one) or correct the URL.",
        )
    assert isinstance(info, dict)
    name = info.get("server_name", "redis")
    version = info.get(f"{name}_version", info.get("redis_version", "?"))
    return Check("broker", "ok", f"{shown} answers: {name} {version}")


def _workers(broker_url: str) -> Check:
    from ssd_integrations.backends import open_backend

    try:
        backend = open_backend(model="demo", broker_url=broker_url)
        try:
            models = backend.models()
        finally:
            backend.close()
    except SSDError as error:
        return Check("workers", "warn", error.message, error.remedy)
    if not models:
        return Check("workers", "warn", "none announces itself", "Start one: `ssd worker --help`")
    rows = (f"{m.name} ({m.architecture}, {m.dtype} on {m.device})" for m in models)
    return Check("workers", "ok", ", ".join(rows))
