"""What the tests share: a tiny model, the `ssd` command in a process of its own, system tools."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

# A shell that starts the tests in the background has them, and every process they start, ignore
# Ctrl-C; tests that send it would then wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)

SSD = [sys.executable, "-c", "from ssd_integrations.cli import main; main()"]
RunSSD = Callable[..., "subprocess.CompletedProcess[str]"]


def ssd_environment(**changes: str) -> dict[str, str]:
    """The environment of an `ssd` process under test: one thread, no broker, plain output."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("SSD_")}
    if "SSD_CACHE_DIR" in os.environ:
        inherited["SSD_CACHE_DIR"] = os.environ["SSD_CACHE_DIR"]
    return {**inherited, "OMP_NUM_THREADS": "1", "COLUMNS": "100", "NO_COLOR": "1", **changes}


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random model of the Llama architecture and a small real tokenizer."""
    from tests.tiny import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def run_ssd() -> RunSSD:
    """Run `ssd ARGS` to its end: ``run_ssd("generate", "hi", stdin="", env={...})``."""

    def run(
        *args: str, stdin: str = "", env: dict[str, str] | None = None, timeout: float = 120
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*SSD, *args],
            input=stdin,
            env=ssd_environment(**(env or {})),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    return run


def require_system_tool(name: str) -> str:
    """The path of a program that `make system-deps` installs.

    Without it the test skips on a developer's machine and fails where CI is set.
    """
    path = shutil.which(name)
    if path is None:
        message = f"{name} is not installed; run: make system-deps"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return path
