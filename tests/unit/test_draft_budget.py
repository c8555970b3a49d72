"""Draft lengths: the best split, learned rates and costs, and nothing where nothing pays."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_workers.engine.draft_budget import AcceptanceRate, Candidate, allocate
from ssd_workers.engine.drafters.ngram import NgramDrafter
from ssd_workers.engine.step_cost import StepCost
from tests.engine_support import Job, load_tiny, run_batch
from tests.tiny import make_tiny_model


def rate_of(
    candidates: list[Candidate], lengths: tuple[int, ...], base: float, row: float
) -> float:
    pairs = list(zip(candidates, lengths, strict=True))
    tokens = sum(c.rate**j for c, length in pairs for j in range(length + 1))
    return tokens / (base + sum(length * (row + c.draft_seconds) for c, length in pairs))


@settings(max_examples=150, deadline=None)
@given(
    candidates=st.lists(
        st.builds(
            Candidate,
            limit=st.integers(0, 4),
            rate=st.floats(0.01, 0.99),
            draft_seconds=st.sampled_from([0.0, 0.002, 0.02]),
        ),
        min_size=1,
        max_size=3,
    ),
    base=st.floats(0.02, 0.3),
    row=st.floats(1e-4, 0.1),
)
def test_no_split_is_faster(candidates: list[Candidate], base: float, row: float) -> None:
    got = allocate(candidates, lambda n: base + row * n, row)
    assert all(0 <= n <= c.limit for n, c in zip(got, candidates, strict=True))
    choices = itertools.product(*(range(c.limit + 1) for c in candidates))
    best = max(rate_of(candidates, lengths, base, row) for lengths in choices)
    assert rate_of(candidates, tuple(got), base, row) == pytest.approx(best, rel=1e-9)


def test_drafts_shrink_with_the_batch_to_nothing() -> None:
    """Where rows are dear (a compute-bound batch), speculation stops by itself."""

    def total(batch: int) -> int:
        step = 0.08 + 0.02 * batch
        return sum(allocate([Candidate(8, 0.6)] * batch, lambda n: step + 0.02 * n, 0.02))

    assert total(1) / 1 > total(8) / 8
    assert total(200) == 0


def test_a_dear_draft_model_is_not_used_where_it_loses() -> None:
    def seconds(rows: int) -> float:
        return 0.08 + 0.001 * rows

    assert allocate([Candidate(8, 0.4, draft_seconds=0.05)], seconds, 0.001) == [0]
    assert allocate([Candidate(8, 0.8, draft_seconds=0.005)], seconds, 0.001)[0] >= 3


def test_acceptance_rate_follows_what_happens() -> None:
    rng = random.Random(0)
    shared = AcceptanceRate()
    for chance in (0.8, 0.1):
        own = AcceptanceRate(shared)
        for _ in range(300):
            accepted = next((i for i in range(4) if rng.random() > chance), 4)
            own.observe(4, accepted)
        assert own.value == pytest.approx(chance, abs=0.15)
        assert shared.value == pytest.approx(chance, abs=0.15)
    # A new sequence starts from what the others had.
    assert AcceptanceRate(shared).value == pytest.approx(shared.value)
    before = own.value
    own.observe(0, 0)
    assert own.value == before


@settings(max_examples=100, deadline=None)
@given(
    rates=st.lists(st.floats(0.05, 0.95), min_size=1, max_size=3),
    block=st.integers(1, 5),
    jump=st.floats(0.0, 0.1),
)
def test_where_rows_come_in_blocks_a_block_is_filled_or_not_begun(
    rates: list[float], block: int, jump: float
) -> None:
    candidates = [Candidate(4, rate) for rate in rates]

    def seconds(rows: int) -> float:
        return 0.08 + 0.001 * rows + jump * (rows // block)

    def rate_of(lengths: tuple[int, ...]) -> float:
        pairs = zip(rates, lengths, strict=True)
        tokens = sum(rate**j for rate, length in pairs for j in range(length + 1))
        return tokens / seconds(sum(lengths))

    got = allocate(candidates, seconds, 0.001 + jump / block)
    best = max(map(rate_of, itertools.product(range(5), repeat=len(rates))))
    assert rate_of(tuple(got)) == pytest.approx(best, rel=1e-9)


def test_step_cost_learns_base_and_slope() -> None:
    rng = random.Random(1)
    cost = StepCost(0.5, 0.1)
    for _ in range(400):
        rows = rng.randint(1, 16)
        cost.observe(1, rows, (0.08 + 0.002 * rows) * rng.uniform(0.95, 1.1))
    assert cost.seconds(1, 8) == pytest.approx(0.096, rel=0.15)
    assert cost.per_row == pytest.approx(0.002, rel=0.5)


def test_step_cost_tells_sequences_from_rows_and_finds_blocks() -> None:
    """What a batch costs must not be taken for what drafts cost."""
    rng = random.Random(2)

    def true(sequences: int, rows: int) -> float:
        return 0.07 + 0.004 * sequences + 0.001 * rows + 0.03 * (rows > 16)

    cost = StepCost(0.07, 0.001)
    for _ in range(400):
        sequences = rng.randint(1, 8)
        rows = sequences * rng.randint(1, 4)
        cost.observe(sequences, rows, true(sequences, rows) * rng.uniform(0.97, 1.05))
    for sequences, rows in ((1, 1), (1, 4), (4, 4), (8, 8), (8, 16), (8, 24), (8, 32)):
        expected = true(sequences, rows)
        assert cost.seconds(sequences, rows) == pytest.approx(expected, rel=0.12)
    assert cost.seconds(8, 17) - cost.seconds(8, 16) > 0.01


def test_a_batch_is_foreseen_before_there_was_one() -> None:
    """With one sequence its cost cannot be told from the base, and is left there."""
    cost = StepCost(0.08, 0.002)
    for _ in range(300):
        cost.observe(1, 4, 0.12)
    assert cost.seconds(8, 11) == pytest.approx(0.12 + 7 * 0.002, rel=0.15)


def test_step_cost_survives_a_stall_and_equal_rows() -> None:
    cost = StepCost(0.08, 0.002)
    for _ in range(300):
        cost.observe(1, 4, 0.09)
    cost.observe(1, 4, 60.0)
    assert 0 < cost.per_row < cost.seconds(1, 4) < 0.2


def test_the_rows_of_a_prompt_do_not_count_as_the_cost_of_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    monkeypatch.setattr(StepCost, "observe", lambda self, n, rows, seconds: seen.append(rows))
    target = load_tiny(make_tiny_model(tmp_path))
    run_batch(target, [Job([5, 6, 7] * 30, 10), Job([8, 9] * 20, 10)], NgramDrafter())
    assert seen
    # Two sequences, each with its last token and at most five drafted ones.
    assert max(seen) <= 2 * (1 + 5)
