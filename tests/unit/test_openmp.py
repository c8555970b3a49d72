"""OpenMP's threads end when who used them has nothing more to compute."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ssd_environment

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")

COUNT = (
    "import os, time, torch\n"
    "from ssd_workers.engine.openmp import release_threads\n"
    "def threads(expected=None):\n"
    "    for _ in range(200):\n"  # an ended thread stays listed for a moment
    "        found = len(os.listdir('/proc/self/task'))\n"
    "        if expected is None or found == expected:\n"
    "            return found\n"
    "        time.sleep(0.01)\n"
    "    return found\n"
    "torch.set_num_threads(3)\n"
    "def compute(): return torch.ones(1000, 1000).exp_().sum().item()\n"
)


def run(code: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", COUNT + code, *arguments],
        env=ssd_environment(), capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    return done.stdout.strip()


def test_threads_end_and_come_back() -> None:
    code = (
        "before = threads()\n"
        "first = compute(); busy = threads()\n"
        "release_threads(); idle = threads(before)\n"
        "assert compute() == first; again = threads()\n"
        "print(busy - before, idle - before, again - before)\n"
    )
    assert run(code) == "2 0 2"


def test_an_idle_engine_keeps_none(tiny_model: Path) -> None:
    code = (
        "import sys\n"
        "from ssd_integrations.backends.local import LocalBackend\n"
        "from ssd_integrations.protocol import build_request, build_sampling\n"
        "backend = LocalBackend(model=sys.argv[1], num_threads=3)\n"
        "backend.models(); compute(); release_threads()\n"
        "time.sleep(0.5); loaded = threads()\n"
        "def ask(count):\n"
        "    sampling = build_sampling(max_tokens=count)\n"
        "    prompt = 'a b c d ' * 40\n"
        "    return build_request(model=sys.argv[1], prompt=prompt, sampling=sampling)\n"
        "busy = max(threads() for event in backend.generate(ask(100)))\n"
        "print(busy - loaded, threads(loaded) - loaded)\n"
    )
    assert run(code, str(tiny_model)) == "2 0"


def test_how_long_threads_wait_awake() -> None:
    """Bounded unless the user has said something; see ssd_workers/__init__.py."""
    code = "import os, ssd_workers; print(os.environ.get('GOMP_SPINCOUNT'))"

    def spins(**settings: str) -> str:
        environment = ssd_environment()
        environment.pop("GOMP_SPINCOUNT", None)  # set by this process's own import
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**environment, **settings}, capture_output=True, text=True, check=True, timeout=60,
        )  # fmt: skip
        return done.stdout.strip()

    assert spins() == "30000"
    assert spins(GOMP_SPINCOUNT="7") == "7"
    assert spins(OMP_WAIT_POLICY="passive") == "None"
