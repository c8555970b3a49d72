"""Chunks of prompts: as large as what decodes beside them allows."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch

from ssd_workers.engine.drafters.ngram import NgramDrafter
from ssd_workers.engine.loading import LoadedModel
from ssd_workers.engine.prompt_pace import STEP_ROWS, PromptPace
from ssd_workers.engine.runner import RowBlock
from tests.engine_support import Job, load_tiny, make_engine, make_sequence
from tests.tiny import VOCAB_SIZE


def test_a_chunk_takes_no_longer_than_the_step_beside_it() -> None:
    rng = random.Random(0)
    for per_row in (0.0003, 0.002, 0.009):
        pace = PromptPace(0.001)
        for _ in range(12):
            rows = pace.rows(0.1)
            pace.observe(rows, rows * per_row * rng.uniform(0.95, 1.05))
        assert pace.rows(0.1) == pytest.approx(min(0.09 / per_row, STEP_ROWS), rel=0.15)
        assert pace.rows(0.2) >= pace.rows(0.1)


def test_alone_chunks_are_large_and_prompts_always_get_on() -> None:
    pace = PromptPace(0.004)
    assert pace.rows(0.0) == 125
    pace = PromptPace(10.0)
    assert (pace.rows(0.0), pace.rows(0.1)) == (64, 4)
    assert PromptPace(10.0, joined=False).rows(0.1) == 512
    assert PromptPace(1e-9).rows(0.0) == STEP_ROWS


def test_decoding_rows_are_a_part_of_a_step() -> None:
    pace = PromptPace(1e-9)
    assert pace.rows(0.1, 72) == STEP_ROWS - 72
    # However many there are, prompts get on.
    assert pace.rows(0.1, 1000) == 64


def test_a_stall_is_not_taken_for_the_cost_of_rows() -> None:
    pace = PromptPace(0.001)
    for _ in range(10):
        pace.observe(50, 0.1)
    pace.observe(50, 60.0)
    assert pace.rows(0.1) >= 15
    pace.observe(50, -1.0)  # the step was shorter than expected without any prompt
    assert pace.rows(0.1) <= 200


class Clock:
    """Time passes in forwards only: ``base`` and ``per_row`` for each row, in seconds."""

    def __init__(
        self, model: LoadedModel, monkeypatch: pytest.MonkeyPatch, base: float, per_row: float
    ) -> None:
        self.now = 0.0
        self.rows: list[int] = []
        runner: Any = model.runner
        forward = runner.forward

        def timed(blocks: list[RowBlock]) -> torch.Tensor:
            self.rows.append(sum(len(block.token_ids) for block in blocks))
            self.now += base + per_row * self.rows[-1]
            logits: torch.Tensor = forward(blocks)
            return logits

        monkeypatch.setattr(runner, "forward", timed)
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)


@pytest.mark.parametrize("per_row", [0.001, 0.004])
@pytest.mark.parametrize("drafts", [False, True])
def test_a_streaming_row_keeps_going_beside_a_long_prompt(
    roomy_model: Any, monkeypatch: pytest.MonkeyPatch, *, drafts: bool, per_row: float
) -> None:
    target = load_tiny(roomy_model)
    clock = Clock(target, monkeypatch, base=0.1, per_row=per_row)
    engine = make_engine(target)
    rng = random.Random(0)
    drafter = NgramDrafter() if drafts else None
    streaming = make_sequence(target, Job([5, 6, 7], 4000), lambda event: None, drafter=drafter)
    engine.add(streaming)
    for _ in range(10):
        engine.step()
    prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(1500)]
    reading = make_sequence(target, Job(prompt, 5), lambda event: None, "long")
    engine.add(reading)
    clock.rows.clear()
    steps = []
    while reading.num_output_tokens == 0:
        before, tokens = clock.now, len(streaming.token_ids)
        engine.step()
        steps.append(clock.now - before)
        assert len(streaming.token_ids) > tokens
    alone = 0.1 + per_row * (1 + (streaming.num_draft_tokens if drafts else 0))
    assert max(steps) <= 2.1 * alone
    # Half of each step is for the prompt: it takes twice its own time, not much more.
    assert len(steps) <= 1.3 * 1500 / (0.1 / per_row) + 5


def test_a_prompt_alone_is_read_in_large_chunks(
    roomy_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = load_tiny(roomy_model)
    clock = Clock(target, monkeypatch, base=0.1, per_row=0.001)
    engine = make_engine(target)
    engine.add(make_sequence(target, Job([7] * 1500, 1), lambda event: None))
    clock.rows.clear()
    while engine.has_work:
        engine.step()
    assert len(clock.rows) == 6
    assert max(clock.rows) == STEP_ROWS
