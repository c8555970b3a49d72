"""The command that measures what a token costs as context and batch grow."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.conftest import ssd_environment
from tests.tiny import make_tiny_model

ROOT = Path(__file__).resolve().parents[2]


def test_every_shape_that_fits_is_timed_and_drawn(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "tiny", "llama", max_position_embeddings=8192)
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.long_context", "--model", str(model), "--rounds", "1",
         "--contexts", "64", "1000", "--batches", "1", "3", "--memory-gib", "0.001",
         "--json", str(tmp_path / "times.json"), "--png", str(tmp_path / "times.png")],
        cwd=ROOT, env=ssd_environment(), capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "times.json").read_text())
    # 512 bytes a token: three sequences of a thousand would need 1.5 MB, with 1 MiB at hand.
    assert {(r["context"], r["batch"]) for r in rows} == {(64, 1), (64, 3), (1000, 1)}
    assert "1 shapes" in done.stdout
    assert all(r["seconds"] > 0 for r in rows)
    assert (tmp_path / "times.png").read_bytes().startswith(b"\x89PNG")
