"""Converting a GGUF file in a process of its own, watched from here."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from ssd_integrations.errors import (
    DiskFullError,
    ModelLoadError,
    SSDError,
    UnsupportedModelError,
)
from ssd_workers.models.cache import folder_bytes, format_bytes
from ssd_workers.models.gguf import GgufHeader
from ssd_workers.progress import Progress

_POLL_S = 0.5


@dataclass(frozen=True)
class Conversion:
    """What the conversion found out."""

    eos_token_ids: tuple[int, ...]


def convert_gguf(
    gguf_file: Path, target: Path, header: GgufHeader, *, progress: Progress
) -> Conversion:
    """Write ``gguf_file`` as float32 safetensors with config and tokenizer into ``target``.

    Takes about 4 bytes of memory per weight. Stages: read tokenizer, convert, save.

    Raises:
      DiskFullError: the disk became full.
      UnsupportedModelError: transformers does not know this architecture in GGUF.
      ModelLoadError: the file is damaged, or memory ran out.
    """
    command = [sys.executable, "-m", "ssd_workers.models.convert_child"]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        child = subprocess.Popen(
            [*command, str(gguf_file.absolute()), str(target)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            encoding="utf-8",
            env=_environment(),
        )
        try:
            result = _follow(cast(IO[str], child.stdout), target, header, progress)
            child.wait()
        finally:
            child.kill()
            child.wait()
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    pipe.close()
        log.seek(0)
        return _outcome(result, child.returncode, gguf_file, header, log.read())


def _environment() -> dict[str, str]:
    """This process's, with the same modules in reach and no network: all that is needed is here."""
    modules = os.pathsep.join(folder for folder in sys.path if folder)
    return {**os.environ, "PYTHONPATH": modules, "PYTHONSAFEPATH": "1", "HF_HUB_OFFLINE": "1"}


def _follow(
    reports: IO[str], target: Path, header: GgufHeader, progress: Progress
) -> dict[str, Any]:
    """Pass the child's reports on; the last line it sent, or {} if it died without one."""
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_pump, args=(reports, lines), daemon=True).start()
    saving, total = False, header.float32_bytes
    last: dict[str, Any] = {}
    while True:
        try:
            line = lines.get(timeout=_POLL_S)
        except queue.Empty:
            if saving:
                progress("save", min(folder_bytes(target), total), total, "B")
            continue
        if line is None:
            if "ok" in last:
                progress("save", total, total, "B")
            return last
        last = json.loads(line)
        if "stage" in last:
            saving = last["stage"] == "save"
            if not saving:
                progress(last["stage"], last["done"], last["total"], last["unit"])


def _pump(source: IO[str], lines: queue.Queue[str | None]) -> None:
    for line in source:
        lines.put(line)
    lines.put(None)


def _outcome(
    result: dict[str, Any], status: int, gguf_file: Path, header: GgufHeader, log: str
) -> Conversion:
    if status == 0 and "ok" in result:
        return Conversion(tuple(result["ok"]["eos_token_ids"]))
    error = result.get("error")
    if error is None:
        if status == -9:
            raise ModelLoadError(
                f"Converting {str(gguf_file)!r} was ended by the system, most likely because "
                f"memory ran out: it needs about {format_bytes(1.3 * header.float32_bytes)}.",
                remedy="Free some memory or use a smaller model.",
            )
        tail = " ".join(log.split()[-60:])
        raise ModelLoadError(
            f"Converting {str(gguf_file)!r} ended with status {status}: {tail}",
            remedy="Fetch the file again; if that does not help, report the message.",
        )
    kinds: dict[str, type[SSDError]] = {
        "disk_full": DiskFullError,
        "unsupported_model": UnsupportedModelError,
    }
    kind = kinds.get(error["code"], ModelLoadError)
    raise kind(f"Converting {str(gguf_file)!r} ({header.architecture}) failed: {error['message']}.")
