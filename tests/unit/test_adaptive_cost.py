"""The command that measures what drafting costs where nothing of it stands."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.conftest import ssd_environment
from tests.tiny import make_tiny_model

ROOT = Path(__file__).resolve().parents[2]


def test_every_drafter_is_timed_with_adaptive_and_with_fixed_lengths(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "tiny", "llama", max_position_embeddings=8192)
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.adaptive_cost", "--model", str(model), "--json",
         "--limit", "2", "--rounds", "2", "--max-tokens", "16"],
        cwd=ROOT, env=ssd_environment(), capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    ratios = json.loads(done.stdout)
    names = {f"{d}-{how}" for d in ("ngram", "suffix", "hopeless") for how in ("adaptive", "fixed")}
    assert ratios.keys() == names
    assert all(len(rounds) == 2 and min(rounds) > 0 for rounds in ratios.values())
