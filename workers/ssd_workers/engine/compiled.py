"""How numba compiles this engine's loops, and where it keeps the code.

Loops are compiled at their first call and kept on disk. numba notices that the file a loop stands
in has changed, by its date and size, but not the files that it takes others from; and a package
may be installed with the dates of its archive. So code is kept for the contents of all of them.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

from numba import njit

logger = logging.getLogger(__name__)

_F = TypeVar("_F", bound=Callable[..., Any])

_FOLDER = Path(__file__).parent
SOURCES = ("attention_loops", "attention_tiles", "compiled", "kernels", "vectors")
_STAMP = "ssd-loops.sha256"


def _can_keep_code() -> bool:
    """Whether there is a folder to write to, beside this file or the user's cache."""

    def probe() -> None: ...

    try:
        folder = njit(cache=True)(probe).stats.cache_path
        drop_other_code(Path(folder), _FOLDER)
    except (RuntimeError, OSError) as error:
        logger.warning(
            "Compiled code cannot be kept, so every start takes some seconds longer: %s "
            "Set NUMBA_CACHE_DIR to a folder that can be written to.",
            error,
        )
        return False
    return True


def drop_other_code(kept: Path, sources: Path) -> None:
    """Delete what is in ``kept`` unless it was compiled from the files as they are in ``sources``.

    Raises:
      OSError: ``kept`` cannot be read or written.
    """
    contents = b"\0".join((sources / f"{name}.py").read_bytes() for name in SOURCES)
    digest = hashlib.sha256(contents).hexdigest()
    stamp = kept / _STAMP
    if stamp.exists() and stamp.read_text() == digest:
        return
    kept.mkdir(parents=True, exist_ok=True)
    for name in SOURCES:
        for file in [*kept.glob(f"{name}.*.nbi"), *kept.glob(f"{name}.*.nbc")]:
            # Another process may have been faster.
            file.unlink(missing_ok=True)
    stamp.write_text(digest)


#: Options of whatever is compiled.
CACHED: dict[str, Any] = {"cache": _can_keep_code(), "error_model": "numpy"}


def exactly(function: _F) -> _F:
    """Compile a loop whose operations stay in the order written; it runs without Python's lock."""
    return cast(_F, njit(nogil=True, **CACHED)(function))


def with_sums(function: _F) -> _F:
    """The same, but sums may be reordered, in one way that is compiled in."""
    return cast(_F, njit(nogil=True, fastmath={"reassoc"}, **CACHED)(function))
