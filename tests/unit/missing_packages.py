"""Commands under test, as they run where a package is not installed."""

from __future__ import annotations

import textwrap
from pathlib import Path


def environment_without(tmp_path: Path, *modules: str) -> dict[str, str]:
    """An environment in which ``modules`` cannot be found, as if they were not installed."""
    (tmp_path / "sitecustomize.py").write_text(
        textwrap.dedent(
            f"""
            from importlib import metadata
            from importlib.machinery import PathFinder

            hidden = {modules!r}
            find_spec, version = PathFinder.find_spec, metadata.version

            def find_visible(name, path=None, target=None):
                return None if name in hidden else find_spec(name, path, target)

            def visible_version(name):
                if name in hidden:
                    raise metadata.PackageNotFoundError(name)
                return version(name)

            PathFinder.find_spec = staticmethod(find_visible)
            metadata.version = visible_version
            """
        )
    )
    return {"PYTHONPATH": str(tmp_path)}
