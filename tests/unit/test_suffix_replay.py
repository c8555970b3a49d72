"""The replay benchmark counts what a verification would have emitted."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.replay_drafters import Answer, read_answers, replay, settings
from ssd_workers.engine.drafters.base import DraftView
from ssd_workers.engine.drafters.suffix import SuffixDrafter


class Fixed:
    """Drafts the next token right, and all others wrong."""

    name = "fixed"

    def __init__(self) -> None:
        self.observed: list[tuple[int, int]] = []
        self.forgotten: list[str] = []

    def propose(self, sequences: Sequence[DraftView], max_tokens: Sequence[int]) -> list[list[int]]:
        following = [len(s.token_ids) - s.prompt_length for s in sequences]
        return [([n] + [-1] * 9)[:limit] for n, limit in zip(following, max_tokens, strict=True)]

    def observe(self, request_id: str, proposed: int, accepted: int) -> None:
        self.observed.append((proposed, accepted))

    def forget(self, request_id: str) -> None:
        self.forgotten.append(request_id)


@pytest.mark.parametrize("concurrency", [1, 3])
def test_counts_tokens_and_rows(concurrency: int) -> None:
    answers = [Answer([9, 9], list(range(7))) for _ in range(4)]
    drafter = Fixed()
    result = replay(answers, drafter, num_draft_tokens=3, concurrency=concurrency)
    for half in result.halves:
        # Six tokens after the first: two, two, and two, the last draft of one token.
        assert (half.verifications, half.emitted, half.drafted) == (6, 12, 2 * (3 + 3 + 1))
        assert half.tokens() == 2.0
        assert half.gain(0.1) == pytest.approx(2.0 / (1 + 0.1 * 7 / 3))
    assert sorted(drafter.forgotten) == ["r0", "r1", "r2", "r3"]
    assert set(drafter.observed) == {(3, 1), (1, 1)}


def test_a_drafter_learns_from_the_first_half() -> None:
    answers = [Answer([1], list(range(100, 160))) for _ in range(2)]
    result = replay(answers, SuffixDrafter(), num_draft_tokens=8, concurrency=1)
    assert result.halves[0].tokens() == 1.0
    assert result.halves[1].tokens() > 5.0


def test_the_command_prints_a_line_for_each_setting(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    record = json.dumps({"prompt_ids": [1, 2, 3], "output_ids": [4, 5, 6, 4, 5, 6]})
    file.write_text(f"{record}\n\n{record}\n")
    command = [sys.executable, "benchmarks/replay_drafters.py", str(file)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root)
    lines = done.stdout.splitlines()
    assert lines[0].startswith("2 answers, 12 tokens")
    assert len(lines) == 2 + len(settings())
    file.write_text(f"{record}\n")
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root)
    assert done.returncode != 0
    assert "fewer than two answers" in done.stderr


def test_answers_without_anything_to_draft_are_left_out() -> None:
    lines = [
        '{"prompt_ids": [1], "output_ids": [2]}',
        "",
        '{"prompt_ids": [], "output_ids": [2, 3]}',
    ]
    assert read_answers(lines) == [Answer([], [2, 3])]
