"""Whether the packages of an extra are installed, without importing them."""

from __future__ import annotations

from importlib.util import find_spec

from ssd_integrations.errors import MissingExtraError


def require_extra(what: str, extra: str, *packages: str) -> None:
    """See that the packages which the pip extra ``extra`` brings for ``what`` are installed.

    Raises:
      MissingExtraError: one of ``packages`` (import names) is missing.
    """
    if any(find_spec(package) is None for package in packages):
        raise MissingExtraError.for_extra(what, extra)
