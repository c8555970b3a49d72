"""Names that an application and its workers share on Redis: queues, keys, ids, records.

Everything lives under one prefix, so that one access rule (``~ssd:*``) covers it.
"""

from __future__ import annotations

import hashlib
import re
from urllib.parse import parse_qsl, urlsplit

from pydantic import BaseModel, ConfigDict, ValidationError

from ssd_integrations.errors import (
    BrokerUnavailableError,
    InvalidRequestError,
    MalformedMessageError,
)
from ssd_integrations.protocol import ModelInfo, QueueName
from ssd_integrations.validation import describe_validation_error

KEY_PREFIX = "ssd:"
TASK_NAME = "ssd.generate"

#: Set of worker ids; each has a record under :func:`worker_key` that expires on its own.
WORKERS_KEY = f"{KEY_PREFIX}workers"
#: Pub/sub channel that carries request ids to cancel; the durable word is :func:`cancel_key`.
CANCEL_CHANNEL = f"{KEY_PREFIX}cancel"

#: Seconds that a finished stream stays readable.
RETENTION_S = 3600
#: Seconds that an unfinished stream without a deadline of its own is kept.
UNFINISHED_RETENTION_S = 2 * 86_400

#: Field of a stream entry that holds an event as JSON.
EVENT_FIELD = b"event"
#: Field of the first entry of an attempt: the id of the worker that took it.
TAKEN_FIELD = b"taken"

_SCHEMES = ("redis", "rediss")
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*://|//)?(.*)", re.IGNORECASE | re.DOTALL)
_HOST_AND_PORT = re.compile(r"(\[[^]]*\]|[^:/?#]*)(:[^/?#]*)?(.*)", re.DOTALL)
_QUERY_PASSWORD = re.compile(r"(password=)[^&\s]*", re.IGNORECASE)


def queue_name(model: str, kind: QueueName) -> str:
    """The Celery queue of ``model``."""
    return f"{model_slug(model)}.{kind}"


def model_slug(model: str) -> str:
    """``model`` as part of a name: readable, with a hash that tells equal slugs apart."""
    slug = re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")[-40:].strip("-")
    digest = hashlib.sha256(model.encode()).hexdigest()[:8]
    return f"{slug or 'model'}-{digest}"


def stream_key(request_id: str) -> str:
    """The stream of events of a request; entry ids are ``<attempt>-<sequence>``."""
    return f"{KEY_PREFIX}stream:{request_id}"


def state_key(request_id: str) -> str:
    """The hash of a request: when it came, which attempt runs, whether it is done."""
    return f"{KEY_PREFIX}request:{request_id}"


def cancel_key(request_id: str) -> str:
    """Exists once somebody asked for the request's cancellation."""
    return f"{KEY_PREFIX}cancel:{request_id}"


def worker_key(worker_id: str) -> str:
    """The JSON :class:`WorkerRecord` of a live worker."""
    return f"{KEY_PREFIX}worker:{worker_id}"


def entry_id(attempt: int, sequence: int) -> str:
    """The stream id of an attempt's entry; Redis refuses one that is not above the last."""
    return f"{attempt}-{sequence}"


def parse_entry_id(raw: bytes) -> tuple[int, int]:
    """``(attempt, sequence)`` of a stream id."""
    attempt, _, sequence = raw.decode().partition("-")
    return int(attempt), int(sequence)


class WorkerRecord(BaseModel):
    """How a worker announces itself."""

    model_config = ConfigDict(extra="ignore", frozen=True, protected_namespaces=())

    worker_id: str
    pid: int
    host: str
    queue_model: str
    model: ModelInfo

    @classmethod
    def from_json(cls, data: str | bytes) -> WorkerRecord:
        """Parse a record.

        Raises:
          MalformedMessageError: not a record of this protocol.
        """
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            raise MalformedMessageError(
                describe_validation_error("worker record", error)
            ) from error


def check_broker_url(url: str) -> str:
    """``url`` itself, if it names a Redis or Valkey server.

    Raises:
      InvalidRequestError: another scheme, or no host.
    """
    try:
        parts = urlsplit(url)
        valid = parts.scheme in _SCHEMES and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise InvalidRequestError(
            f"broker_url={mask_url(url)!r} is not a Redis URL.",
            remedy="Use redis://[user:password@]host:port/0, or rediss:// for TLS.",
        )
    return url


def tls_options(url: str) -> dict[str, str] | None:
    """The TLS options of a ``rediss://`` URL, certificate check on unless it says otherwise.

    Celery and kombu would leave the check out by default; redis-py does not.
    """
    parts = urlsplit(url)
    if parts.scheme != "rediss":
        return None
    given = {name: value for name, value in parse_qsl(parts.query) if name.startswith("ssl_")}
    return {"ssl_cert_reqs": "required", **given}


def mask_url(url: str) -> str:
    """``url`` with whatever may be a password replaced, for messages and logs.

    Also where it is no proper URL: a password with an unescaped ``/`` or ``@``, or without the
    host that should follow, is the usual reason why an address is refused and printed.
    """
    url = _QUERY_PASSWORD.sub(r"\1***", url)
    scheme, rest = _SCHEME.fullmatch(url).groups("")  # type: ignore[union-attr]  # matches all
    secret, at, place = rest.rpartition("@")
    if at:
        user, colon, _ = secret.partition(":")
        return f"{scheme}{user}:***@{place}" if colon else f"{scheme}***@{place}"
    host, port, tail = _HOST_AND_PORT.fullmatch(rest).groups("")  # type: ignore[union-attr]
    if port and not re.fullmatch(r":\d{0,5}", port):
        return f"{scheme}{host}:***"
    return f"{scheme}{host}{port}{tail}"


def mask_text(text: str) -> str:
    """``text`` with the passwords of URLs in it replaced."""
    return _QUERY_PASSWORD.sub(r"\1***", re.sub(r"//\S*@", "//***@", text))


def refused(url: str, error: Exception) -> BrokerUnavailableError:
    """The error that says that the server at ``url`` refuses a command, and why."""
    reason = mask_text(str(error)).rstrip(".")
    return BrokerUnavailableError(
        f"The broker {mask_url(url)} refused a command: {reason}.",
        remedy="Check the user's permissions (~ssd:* keys, &ssd:* channels), memory and disk.",
    )


def unreachable(url: str, error: Exception) -> BrokerUnavailableError:
    """The error that says that the server at ``url`` is away, and why."""
    reason = mask_text(str(error).replace(url, mask_url(url))).rstrip(".")
    return BrokerUnavailableError(f"The broker {mask_url(url)} cannot be reached: {reason}.")
