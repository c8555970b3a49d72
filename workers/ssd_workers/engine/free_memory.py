"""How much memory keys and values may take, where nobody has said so."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import psutil
import torch

# Left to everything else: activations, the operating system, other programs.
_RESERVE_SHARE = 0.1
_LEAST_RESERVE = 2**30

_CGROUP = Path("/sys/fs/cgroup")


def default_budget(devices: Iterable[torch.device]) -> int:
    """Bytes for keys and values on the ``devices`` of a model that is loaded.

    On GPUs nine tenths of what is free, counting each as the fullest of them; elsewhere the
    available memory without a tenth of the machine's, at least 1 GiB. Never less than half of what
    is available.
    """
    gpus = {device for device in devices if device.type == "cuda"}
    if gpus:
        free = min(torch.cuda.mem_get_info(device)[0] for device in gpus)
        return int((1 - _RESERVE_SHARE) * free * len(gpus))
    memory = psutil.virtual_memory()
    contained = container_memory(_CGROUP)
    available = memory.available if contained is None else min(memory.available, contained)
    reserve = max(_LEAST_RESERVE, int(_RESERVE_SHARE * memory.total))
    return int(max(available - reserve, available // 2))


def container_memory(folder: Path) -> int | None:
    """Bytes that the container's limit leaves; None where there is no limit.

    Parameters:
      folder: of control group version 2, with ``memory.max`` and its siblings.
    """
    try:
        limit = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
        stat = (folder / "memory.stat").read_text()
    except OSError:  # no container, or version 1, which counts differently
        return None
    if limit == "max":
        return None
    fields = dict(line.split(maxsplit=1) for line in stat.splitlines())
    # Files read and not used since are given up when somebody needs the memory.
    return max(0, int(limit) - used + int(fields.get("inactive_file", 0)))
