"""The command that extracts facts as JSON judges every answer, and compares the modes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import json_extraction
from benchmarks.extraction_cases import NUM_CASES, Case, cases
from benchmarks.extraction_schemas import SCHEMAS
from benchmarks.json_extraction import Answer, Extraction
from tests.conftest import ssd_environment
from tests.tiny import make_tiny_model

ROOT = Path(__file__).resolve().parents[2]
# A random model fills every string to its end, and its tokens are short.
SHORT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["damaged", "late"]},
        "amount": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["kind"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(
        tmp_path_factory.mktemp("extraction") / "tiny", "llama", max_position_embeddings=8192
    )


@pytest.fixture
def short_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [Case(case.name, case.prompt, SHORT) for case in cases()]
    monkeypatch.setattr(json_extraction, "cases", lambda count: made[:count])


def run(model: Path, report: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> tuple[int, Any]:
    arguments = ["x", "--model", str(model), "--limit", "4", "--json", str(report), *more]
    monkeypatch.setattr(sys, "argv", arguments)
    code = json_extraction.main()
    return code, json.loads(report.read_text(encoding="utf-8"))


def test_cases() -> None:
    found = cases()
    assert found == cases()
    assert len(found) == len({case.prompt for case in found}) == NUM_CASES == 200
    used = {json.dumps(case.schema) for case in found[:12]}
    assert used == {json.dumps(schema) for schema in SCHEMAS.values()}


@pytest.mark.usefixtures("short_cases")
@pytest.mark.parametrize("batch", ["1", "3"])
def test_valid_answers(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    more = ("--modes", "suffix", "ngram", "--batch", batch)
    code, results = run(model, tmp_path / "r", monkeypatch, *more)
    assert code == 0
    modes = ("off", "suffix", "ngram")
    assert [(r["temperature"], r["mode"]) for r in results] == [
        (temperature, mode) for temperature in (0.0, 1.0) for mode in modes
    ]
    assert all(r["valid"] == 4 and r["tokens_per_second"] > 0 for r in results)
    assert all((r["tokens_per_pass"] == 1.0) == (r["mode"] == "off") for r in results)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6
    assert all("4 complete and valid" in line for line in lines)
    assert all("differing: none" in line for line in lines)


@pytest.mark.usefixtures("short_cases")
def test_invalid_and_differing_answers(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = Extraction._ask

    def ask(
        self: Extraction, case: Case, mode: Any, temperature: float, seed: int, max_tokens: int
    ) -> Answer:
        answer = right(self, case, mode, temperature, seed, max_tokens)
        texts = {0: "{", 1: '{"kind":"lost"}', 2: answer.text}
        if mode == "off" or seed not in texts or temperature:
            return answer
        return Answer((*answer.token_ids, 1), texts[seed], answer.tokens, answer.steps, 1.0)

    monkeypatch.setattr(Extraction, "_ask", ask)
    code, results = run(model, tmp_path / "r", monkeypatch)
    assert code == 1
    plain, suffix = results[:2]
    names = [case.name for case in cases(3)]
    assert plain["faults"] == {}
    assert plain["differing"] == []
    assert list(suffix["faults"]) == names[:2]
    assert suffix["differing"] == names
    assert [r["differing"] for r in results[2:]] == [[], []]
    printed = capsys.readouterr().out
    assert f"(char 1): {names[0]}" in printed
    assert f"invalid: 'lost' is not one of ['damaged', 'late']: {names[1]}" in printed


def test_a_cut_answer_is_a_failure_and_fails_the_command(model: Path) -> None:
    done = subprocess.run(
        [
            sys.executable, "-m", "benchmarks.json_extraction", "--model", str(model),
            "--limit", "2", "--max-tokens", "5", "--temperatures", "0",
        ],
        cwd=ROOT, env=ssd_environment(), capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert sum("0 complete and valid" in line for line in lines) == 2
    assert sum("2 x incomplete_structure: 001-order_mail, 002-" in line for line in lines) == 2
