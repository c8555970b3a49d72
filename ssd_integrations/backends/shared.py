"""One backend per process for the same options.

Frameworks copy and rebuild their model objects freely (configurable fields do so on every
call); each copy must not cost another engine or another connection pool.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from ssd_integrations.backends import open_backend
from ssd_integrations.backends.base import Backend

BackendOptions = tuple[tuple[str, Any], ...]

_backends: dict[BackendOptions, Backend] = {}
_lock = threading.Lock()


def shared_backend(options: BackendOptions) -> Backend:
    """The backend that :func:`ssd_integrations.backends.open_backend` opens for ``options``.

    Raises:
      SSDError: as ``open_backend`` does.
    """
    with _lock:
        if options not in _backends:
            _backends[options] = open_backend(**dict(options))
        return _backends[options]


async def ashared_backend(options: BackendOptions) -> Backend:
    """:func:`shared_backend` for an event loop."""
    if options in _backends:
        return _backends[options]
    # In a thread, for the first of its kind imports packages that take a while.
    return await asyncio.to_thread(shared_backend, options)
