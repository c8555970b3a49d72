"""The command that compares every drafter with plain decoding over a suite finds differences."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import suite_exactness
from benchmarks.suite_exactness import DRAFTERS, Answer, Suite
from tests.conftest import ssd_environment
from tests.tiny import make_tiny_model

ROOT = Path(__file__).resolve().parents[2]


def arguments(model: Path, report: Path) -> list[str]:
    return [
        "--model", str(model), "--draft-layers", "1", "--suite", "business", "--limit", "6",
        "--max-tokens", "12", "--batch", "4", "--json", str(report),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(
        tmp_path_factory.mktemp("suite") / "tiny", "llama", max_position_embeddings=8192
    )


def test_every_drafter_is_compared_at_both_temperatures(model: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.suite_exactness", *arguments(model, tmp_path / "r")],
        cwd=ROOT, env=ssd_environment(), capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "r").read_text())
    compared = {(r["mode"], r["temperature"]) for r in results if r["texts"] >= 6}
    assert compared == {(f"{mode}, 2 at once", t) for mode in DRAFTERS for t in (0.0, 0.8)}
    # Some conversations have a second turn, and with a draft model there is always a draft.
    assert all(r["texts"] > 6 for r in results if "off" not in r["mode"])
    assert all(r["drafted"] > 0 for r in results if r["mode"].startswith("model"))


def test_a_single_other_token_is_reported(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = Suite.answer

    def answer(self: Suite, request) -> Answer:  # type: ignore[no-untyped-def]
        result = right(self, request)
        if request.speculation.mode != "suffix" or request.sampling.seed != 3:
            return result
        ids = (*result.token_ids[:-1], result.token_ids[-1] ^ 1)
        return Answer(ids, result.text, result.drafted, result.accepted)

    monkeypatch.setattr(Suite, "answer", answer)
    monkeypatch.setattr(suite_exactness, "DRAFTERS", ("ngram", "suffix"))
    monkeypatch.setattr(sys, "argv", ["x", *arguments(model, tmp_path / "r")])
    assert suite_exactness.main() == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if "suffix" in line]
    assert len(lines) == 2
    assert all("differing: none" not in line for line in lines)
