"""Where models, locks and learnt drafts are kept."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs


def cache_dir() -> Path:
    """``$SSD_CACHE_DIR``, or this project's folder in the user's cache."""
    override = os.environ.get("SSD_CACHE_DIR")
    if override:
        return Path(override).expanduser().absolute()
    return Path(platformdirs.user_cache_dir("ssd-integrations"))
