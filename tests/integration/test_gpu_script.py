"""The GPU script, on a CPU here and on a GPU where there is one; and that it would find a fault."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu_check import GREEDY, SEEDED, Check
from benchmarks.gpu_models import QUICK
from benchmarks.gpu_requests import Answer

ROOT = Path(__file__).parents[2]


def run_script(*options: str) -> dict[str, Any]:
    """The report of ``benchmarks/gpu.sh --quick`` with ``options``."""
    done = subprocess.run(
        ["bash", str(ROOT / "benchmarks" / "gpu.sh"), "--quick", *options],
        env={**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "step"), [("packed", "eager"), ("sdpa", "eager"), ("packed", "static")]
)
def test_script_on_a_cpu(attention: str, step: str, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    report = run_script(
        "--device", "cpu", "--attention", attention, "--step", step, "--json", str(file)
    )
    assert report["exact"]
    assert report["texts_that_part_at_a_tie"] == 0 or (attention, step) != ("packed", "eager")
    assert report["decode_step"] == step
    assert {"eager, packed, context 100", "static, context 100"} < set(report["forwards"])
    assert report["tokens_compared"] == 2 * 5 * 8 * 24
    assert {f"{mode}, batch {n}" for mode in ("off", "ngram", "model") for n in (1, 8)} == set(
        report["modes"]
    )
    assert report["acceptance_length_of_full_drafts"]["model"] > 1.5
    assert json.loads(file.read_text()) == report


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    ("attention", "step"), [("packed", "eager"), ("sdpa", "eager"), ("packed", "graphs")]
)
def test_script_on_a_gpu(attention: str, step: str) -> None:
    report = run_script("--device", "cuda", "--attention", attention, "--step", step)
    assert report["exact"]
    assert report["dtype"] == "bfloat16"


@pytest.fixture
def check(tmp_path: Path) -> Iterator[Check]:
    args = argparse.Namespace(device="cpu", dtype="float32", attention="packed", step="eager")
    made = Check(args, QUICK, tmp_path)
    yield made
    made.close()


def test_a_wrong_token_is_found(check: Check) -> None:
    for sampling in (GREEDY, SEEDED):
        plain = check.run([0, 1], "off", sampling, adaptive=False)
        again = check.run([0, 1], "model", sampling, adaptive=False)
        check._compare("model", sampling, plain, again)
        assert not check.faults
        wrong = list(plain[1].tokens)
        wrong[10] = (wrong[10] + 1) % 512
        check._compare("wrong", sampling, plain, [plain[0], Answer(wrong)])
        check._compare("short", sampling, plain, [Answer(plain[0].tokens[:-1]), plain[1]])
        assert [fault.split(":")[0].split(",")[0] for fault in check.faults] == ["wrong", "short"]
        assert "token 10 is" in check.faults[0]
        check.faults.clear()
