"""One backend per process for the same options.

Frameworks copy and rebuild their model objects freely (configurable fields do so on every
call); each copy must not cost another engine or another connection pool.
"""

from __future__ import annotations

import asyncio
from typing import Any

from ssd_integrations.backends import open_backend
from ssd_integrations.backends.base import Backend
from ssd_integrations.backends.by_options import ByOptions

BackendOptions = tuple[tuple[str, Any], ...]

_backends: ByOptions[BackendOptions, Backend] = ByOptions()


def shared_backend(options: BackendOptions) -> Backend:
    """The backend that :func:`ssd_integrations.backends.open_backend` opens for ``options``.

    Raises:
      SSDError: as ``open_backend`` does.
    """
    return _backends.get(options, lambda: open_backend(**dict(options)))


async def ashared_backend(options: BackendOptions) -> Backend:
    """:func:`shared_backend` for an event loop."""
    backend = _backends.find(options)
    if backend is None:
        # In a thread, for the first of its kind imports packages that take a while.
        backend = await asyncio.to_thread(shared_backend, options)
    return backend
