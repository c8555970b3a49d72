"""Penalties, bias and minimum length: against transformers' own, and row by row."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from ssd_integrations.protocol import SamplingParams
from ssd_workers.engine.logit_rules import RowRules, TokenHistory, adjust_logits, has_rules

VOCAB = 30
EVERYTHING = SamplingParams(
    temperature=0.7,
    repetition_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=0.2,
    logit_bias={3: 5.0, 7: -100.0},
    min_tokens=6,
)


def history(prompt: list[int], output: list[int]) -> TokenHistory:
    made = TokenHistory(prompt)
    made.extend(output)
    return made


def logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def test_repetition_penalty_is_transformers() -> None:
    row = logits(1)
    prompt, output = [1, 2, 2, 5], [9, 1]
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([prompt + output]), row.clone())
    rules = RowRules(SamplingParams(repetition_penalty=1.7), history(prompt, output))
    assert torch.equal(adjust_logits(row, [rules]), expected)


def test_presence_and_frequency_count_the_output_only() -> None:
    row = logits(1)
    sampling = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    got = adjust_logits(row, [RowRules(sampling, history([1, 1, 4], [4, 6, 6, 6]))])[0]
    expected = row[0].clone()
    expected[4] -= 0.5 + 0.25
    expected[6] -= 0.5 + 3 * 0.25
    torch.testing.assert_close(got, expected)


def test_bias_and_minimum_length() -> None:
    row = logits(1)
    sampling = SamplingParams(logit_bias={2: 4.0}, min_tokens=3)
    early = RowRules(sampling, history([1], [5]), end_token_ids={0, 9}, drafted=[6])
    got = adjust_logits(row, [early])[0]
    assert got[2] == row[0, 2] + 4.0
    assert got[0] == got[9] == -torch.inf
    late = RowRules(sampling, history([1], [5]), end_token_ids={0, 9}, drafted=[6, 7])
    assert torch.equal(adjust_logits(row, [late])[0, [0, 9]], row[0, [0, 9]])


@settings(max_examples=60, deadline=None)
@given(
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12),
    output=st.lists(st.integers(0, VOCAB - 1), max_size=12),
    drafted=st.lists(st.integers(0, VOCAB - 1), max_size=5),
)
def test_a_drafted_row_equals_the_same_row_without_draft(
    prompt: list[int], output: list[int], drafted: list[int]
) -> None:
    """The row after drafted tokens is what it would be had they been accepted one by one."""
    block = logits(len(drafted) + 1)
    base = history(prompt, output)
    together = adjust_logits(
        block,
        [RowRules(EVERYTHING, base, {0, 9}, drafted[:i]) for i in range(len(drafted) + 1)],
    )
    for i in range(len(drafted) + 1):
        alone = RowRules(EVERYTHING, history(prompt, output + drafted[:i]), {0, 9})
        assert torch.equal(together[i], adjust_logits(block[i : i + 1], [alone])[0])


def test_rows_without_rules_keep_their_bits_and_the_argument_is_not_changed() -> None:
    block = logits(3)
    before = block.clone()
    got = adjust_logits(block, [None, RowRules(EVERYTHING, history([1], [2])), None])
    assert torch.equal(block, before)
    assert torch.equal(got[[0, 2]], before[[0, 2]])
    assert not torch.equal(got[1], before[1])
    assert adjust_logits(block, [None] * 3) is block


def test_ids_beyond_a_smaller_vocabulary_are_left_out() -> None:
    sampling = SamplingParams(logit_bias={VOCAB + 5: 3.0, 1: 1.0}, min_tokens=2)
    row = logits(1)
    got = adjust_logits(row, [RowRules(sampling, history([1], []), {VOCAB + 1})])[0]
    assert got[1] == row[0, 1] + 1.0


def test_what_counts_as_a_rule() -> None:
    assert not has_rules(SamplingParams(temperature=0.5, top_k=3, seed=1, stop_token_ids=(4,)))
    for field in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
        assert has_rules(SamplingParams(**{field: 1.5}))
    assert has_rules(SamplingParams(logit_bias={1: 0.5}))
    assert has_rules(SamplingParams(min_tokens=1))
