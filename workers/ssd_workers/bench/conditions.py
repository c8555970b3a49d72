"""Under which conditions a run was taken: machine, versions, command line, load."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("ssd-integrations", "torch", "transformers", "xllamacpp")


def machine() -> dict[str, Any]:
    """Processor, cores, memory, accelerator and load."""
    import psutil
    import torch

    affinity = getattr(os, "sched_getaffinity", None)
    facts: dict[str, Any] = {
        "processor": _processor(),
        "cores": len(affinity(0)) if affinity is not None else os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "platform": platform.platform(),
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name(0)
    return facts


def software() -> dict[str, str | None]:
    """Versions of what the figures depend on; None for what is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def command_line() -> str:
    """The command, as it can be typed again."""
    return shlex.join(["ssd", *sys.argv[1:]])


def now() -> str:
    """The time in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def load() -> float | None:
    """Processes that want to run, averaged over the last minute; None where it is not known."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
