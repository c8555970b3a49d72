"""Our errors as LangChain's own: each is caught under either name.

``except ssd_integrations.errors.DeadlineExceededError`` and
``except langchain_core.exceptions.ModelTimeoutError`` both catch what a deadline raises, so that
retry and fallback middleware written for any model works with this one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import cast

from langchain_core import exceptions as framework

from ssd_integrations import errors

# Looked up along the class's ancestors, so the most specific entry wins and a new error class
# falls under its parent's.
_COUNTERPARTS: dict[type[errors.SSDError], type[framework.ModelError]] = {
    errors.SSDError: framework.ModelError,
    errors.EngineError: framework.ModelAPIError,
    errors.InvalidRequestError: framework.ModelInvalidRequestError,
    errors.ContextLengthError: framework.ContextOverflowError,
    errors.ModelNotFoundError: framework.ModelNotFoundError,
    errors.DownloadError: framework.ModelConnectionError,
    errors.BrokerUnavailableError: framework.ModelConnectionError,
    errors.WorkerUnavailableError: framework.ModelConnectionError,
    errors.DeadlineExceededError: framework.ModelTimeoutError,
    errors.OverloadedError: framework.ModelRateLimitError,
}


def to_framework_error(error: errors.SSDError) -> errors.SSDError:
    """``error`` as an instance of both its own class and LangChain's counterpart."""
    if isinstance(error, framework.ModelError):
        return error
    return _rebuild(type(error), error.message, error.remedy)


@contextmanager
def framework_errors() -> Iterator[None]:
    """Errors of ours that leave the block are LangChain's as well."""
    try:
        yield
    except errors.SSDError as error:
        raise to_framework_error(error) from error


def _rebuild(kind: type[errors.SSDError], message: str, remedy: str) -> errors.SSDError:
    joined = _joined_class(kind)  # type: ignore[arg-type]  # classes are hashable
    return joined(message, remedy=remedy)


@cache
def _joined_class(kind: type[errors.SSDError]) -> type[errors.SSDError]:
    counterpart = next(_COUNTERPARTS[base] for base in kind.__mro__ if base in _COUNTERPARTS)

    def reduce(self: errors.SSDError) -> tuple[object, ...]:
        # The joined class has no importable name; pickle finds its way through its parent.
        return (_rebuild, (kind, self.message, self.remedy))

    body = {"__module__": __name__, "__doc__": kind.__doc__, "__reduce__": reduce}
    return cast(type[errors.SSDError], type(kind.__name__, (kind, counterpart), body))
