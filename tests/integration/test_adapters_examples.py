"""The example programs run as they are, here with a tiny model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ssd_environment
from tests.tiny import make_tiny_model

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["langchain_chain.py", "llamaindex_query.py"])
def test_example(name: str, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "tiny", max_position_embeddings=4096)
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), "--model", str(model)],
        env=ssd_environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
