"""Random load: seconds of it in every run, five minutes in the slow one; and that it finds faults.

An hour: ``python benchmarks/random_load.py --minutes 60``.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.random_load import Load, growth
from ssd_integrations.backends.local import LocalBackend
from ssd_workers.engine import verifier
from ssd_workers.engine.drafters.ngram import NgramDrafter
from ssd_workers.engine.engine import Engine
from tests.tiny import make_tiny_model

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A target, and a draft model that agrees with it now and then."""
    folder = tmp_path_factory.mktemp("models")
    target = make_tiny_model(folder / "target", num_hidden_layers=2)
    draft = make_tiny_model(folder / "draft", num_hidden_layers=1)
    return str(target), str(draft)


def run_load(models: tuple[str, str], minutes: float, file: Path) -> dict[str, Any]:
    target, draft = models
    done = subprocess.run(
        [
            sys.executable, "benchmarks/random_load.py", "--minutes", str(minutes),
            "--model", target, "--draft-model", draft, "--json", str(file),
        ],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": _python_path()},
        capture_output=True,
        text=True,
        timeout=minutes * 60 + 240,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    report: dict[str, Any] = json.loads(file.read_text())
    return report


def _python_path() -> str:
    return os.pathsep.join([str(ROOT), str(ROOT / "workers"), os.environ.get("PYTHONPATH", "")])


def test_fifteen_seconds(models: tuple[str, str], tmp_path: Path) -> None:
    report = run_load(models, 0.25, tmp_path / "report.json")
    assert not report["faults"]
    assert report["texts_compared"] >= 10
    assert {"length", "stop", "left", "context_length_exceeded"} <= set(report["outcomes"])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_five_minutes(models: tuple[str, str], tmp_path: Path) -> None:
    report = run_load(models, 5, tmp_path / "report.json")
    assert not report["faults"]
    assert report["growth_mib"] is not None
    assert sum(report["outcomes"].values()) > 1000
    assert report["texts_compared"] > 200
    expected = {"cancelled", "left", "deadline_exceeded", "overloaded", "length", "stop"}
    assert expected <= set(report["outcomes"])


@pytest.fixture
def load(models: tuple[str, str]) -> Iterator[Load]:
    target, draft = models
    backend = LocalBackend(model=target, draft_model=draft, dtype="float32")
    yield Load(backend, has_draft=True, seed=1, check_texts=20)
    backend.close()


def test_finds_a_drafter_that_does_not_forget(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NgramDrafter, "forget", lambda self, request_id: None)
    assert any("n-gram indexes left" in fault for fault in load.run(3).faults)


def test_finds_a_sequence_that_is_kept(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []
    release = Engine._release

    def leaking(self: Engine, sequence: Any) -> None:
        release(self, sequence)
        kept.append(sequence)

    monkeypatch.setattr(Engine, "_release", leaking)
    assert any("type Sequence left" in fault for fault in load.run(3).faults)


def test_finds_drafts_that_are_not_verified(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        verifier, "accept_drafts", lambda draft, chosen: (len(draft), [*draft, chosen[-1]])
    )
    assert any("the texts part at token" in fault for fault in load.run(4).faults)


def test_growth_is_told_from_noise() -> None:
    rng = random.Random(0)
    flat = [(10.0 * i, 400 + rng.gauss(0, 2)) for i in range(60)]
    flat[30] = (300.0, 900.0)  # one sample that is far off
    slow = [(at, mib + at / 25) for at, mib in flat]
    level, risen = growth(flat), growth(slow)
    assert level is not None
    assert abs(level) < 3
    assert risen is not None
    assert 20 < risen < 27
    assert growth(flat[:5]) is None
