"""Processor, accelerator, memory, disk and the demo model."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path

from ssd_integrations.cache_folder import cache_dir
from ssd_integrations.cli.checks import Check

# The demo model: 1.1 GB as fetched, 7.1 GB of converted weights and 2.5 GB of quantised ones.
_DEMO_DISK_BYTES = 11e9
_DEMO_MEMORY_BYTES = 2.6e9
# Once, while the demo model is converted.
_CONVERSION_MEMORY_BYTES = 9e9
_SMALL_DISK_BYTES = 2e9
_VNNI_FLAGS = ("avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm")


def checks() -> Iterator[Check]:
    """Everything about this machine; needs no torch, and says less without it."""
    yield _processor()
    yield _torch()
    cached = _demo_model()
    yield from _memory(needs_demo=cached.status != "ok")
    yield _disk(needs_demo=cached.status != "ok")
    yield cached


def cpu_flags() -> set[str]:
    """The processor's abilities as Linux names them; empty where they cannot be read."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return set()
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return set(value.split())
    return set()


def _processor() -> Check:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    flags = cpu_flags()
    detail = f"{platform.machine()}, {cores} cores"
    if not flags:
        return Check("processor", "ok", f"{detail}; its int8 abilities cannot be read here")
    vnni = [flag for flag in _VNNI_FLAGS if flag in flags]
    if vnni:
        return Check("processor", "ok", f"{detail}, int8 instructions: {', '.join(vnni)}")
    return Check(
        "processor",
        "warn",
        f"{detail}, no int8 dot-product instructions (VNNI)",
        'dtype="auto" takes float32 here, several times slower; use another processor or a GPU.',
    )


def _torch() -> Check:
    if importlib.util.find_spec("torch") is None:
        return Check(
            "device",
            "warn",
            "torch is not installed, so no model runs in this process",
            "Use --broker-url, or: pip install 'ssd-integrations[worker]'",
        )
    try:
        import torch
    except (ImportError, OSError) as error:
        return Check(
            "device",
            "fail",
            f"torch is installed but cannot be imported: {error}",
            "Reinstall it: pip install --force-reinstall torch",
        )
    version = f"torch {torch.__version__}"
    if torch.cuda.is_available():
        names = ", ".join(
            f"cuda:{index} {torch.cuda.get_device_name(index)} "
            f"({torch.cuda.get_device_properties(index).total_memory / 1e9:.0f} GB)"
            for index in range(torch.cuda.device_count())
        )
        return Check("device", "ok", f"{version}; {names}")
    return _cpu_device(version)


def _cpu_device(version: str) -> Check:
    from ssd_workers.engine.int8 import cpu_is_exact

    if cpu_is_exact():
        return Check("device", "ok", f"{version}; cpu, int8 kernel checked: exact")
    return Check(
        "device",
        "warn",
        f"{version}; cpu, the int8 kernel saturates on this processor",
        'dtype="auto" takes float32 here, several times slower; use another processor or a GPU.',
    )


def _memory(*, needs_demo: bool) -> Iterator[Check]:
    if importlib.util.find_spec("psutil") is None:
        return
    import psutil

    free = psutil.virtual_memory().available
    needed = _CONVERSION_MEMORY_BYTES if needs_demo else _DEMO_MEMORY_BYTES
    purpose = "Converting the demo model, once," if needs_demo else "The demo model"
    enough = free >= needed
    yield Check(
        "memory",
        "ok" if enough else "warn",
        f"{free / 1e9:.1f} GB available",
        "" if enough else f"{purpose} needs {needed / 1e9:.1f} GB; free some.",
    )


def _disk(*, needs_demo: bool) -> Check:
    folder = cache_dir()
    existing = folder
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    needed = _DEMO_DISK_BYTES if needs_demo else _SMALL_DISK_BYTES
    detail = f"{free / 1e9:.1f} GB free for {folder}"
    if free >= needed:
        return Check("disk", "ok", detail)
    return Check(
        "disk",
        "warn",
        f"{detail}, {needed / 1e9:.0f} GB wanted",
        "Free some space, or set SSD_CACHE_DIR to a folder on a larger disk.",
    )


def _demo_model() -> Check:
    if importlib.util.find_spec("filelock") is None:
        return Check("demo model", "warn", "cannot be looked for without the worker extra")
    from ssd_workers.models.cache import complete_manifest, entry_dir

    if complete_manifest(entry_dir("demo")) is not None:
        return Check("demo model", "ok", f"in the cache ({entry_dir('demo')})")
    return Check(
        "demo model",
        "warn",
        "not in the cache yet",
        "The first use fetches it (1.1 GB); beforehand: ssd models pull demo",
    )
