"""The demo's broker and worker: `ssd up` in a process of its own."""

from __future__ import annotations

import json
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ssd_integrations.errors import EngineError
from ssd_integrations.protocol import ErrorInfo
from ssd_workflows.demo.screen import Screen

_START_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 60.0


@contextmanager
def demo_worker(model: str, screen: Screen) -> Iterator[str]:
    """The broker URL of an embedded Valkey with a worker that has loaded ``model``.

    Both are stopped at the end, and the memory of the model with them.

    Raises:
      SSDError: what kept the worker from starting.
    """
    from ssd_workers.lifetime import child_setup, stop_process

    screen.heading("An embedded Valkey and a Celery worker (`ssd up`)")
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ssd-demo-") as folder:
        log = Path(folder) / "worker.log"
        command = [sys.executable, "-m", "ssd_integrations.cli", "up", "--json"]
        command += ["--model", model, "--data-dir", str(Path(folder) / "valkey")]
        with log.open("wb") as errors:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                # Ctrl-C is for the demo, which then stops the worker.
                start_new_session=True,
                preexec_fn=child_setup(signal.SIGTERM),
            )
        try:
            with screen.console.status("loading the model"):
                broker_url = _wait_until_ready(process, log)
            screen.dim(f"   {broker_url}, ready after {time.monotonic() - start:.1f} s")
            yield broker_url
        finally:
            stop_process(process, _STOP_TIMEOUT_S)


def _wait_until_ready(process: subprocess.Popen[bytes], log: Path) -> str:
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], _START_TIMEOUT_S)
    line = process.stdout.readline() if readable else b""
    if not line:
        what = "ended" if readable else f"was not ready after {_START_TIMEOUT_S:.0f} s"
        raise EngineError(f"The worker {what}. Its last words: {_last_lines(log)}")
    answer = json.loads(line)
    if "error" in answer:
        raise ErrorInfo(**answer["error"]).to_error()
    return str(answer["broker_url"])


def _last_lines(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return " / ".join(lines[-3:]) or "none"
