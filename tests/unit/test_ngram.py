"""The n-gram drafter against a plain scan of the whole sequence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, SupportsIndex

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_integrations.errors import InvalidRequestError
from ssd_integrations.protocol import SamplingParams
from ssd_workers.engine.drafters.base import Drafter
from ssd_workers.engine.drafters.ngram import NgramDrafter


@dataclass
class View:
    token_ids: list[int]
    request_id: str = "r"
    prompt_length: int = 0
    sampling: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0


def by_scan(tokens: list[int], limit: int, min_n: int, max_n: int, per_match: int) -> list[int]:
    """Longest n first, most recent occurrence, copying token by token."""
    for n in range(min(max_n, len(tokens) - 1), min_n - 1, -1):
        for start in range(len(tokens) - n - 1, -1, -1):
            if tokens[start : start + n] == tokens[-n:]:
                whole = list(tokens)
                for i in range(limit if n == max_n else min(limit, n * per_match)):
                    whole.append(whole[start + n + i])
                return whole[len(tokens) :]
    return []


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 3), max_size=12), min_size=1, max_size=8),
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(1, 3),
    st.integers(0, 10),
)
def test_equals_a_scan_however_the_sequence_grows(
    pieces: list[list[int]], min_n: int, extra: int, per_match: int, limit: int
) -> None:
    drafter = NgramDrafter(min_n=min_n, max_n=min_n + extra, per_match=per_match)
    view = View([])
    for piece in pieces:
        view.token_ids += piece
        expected = by_scan(view.token_ids, limit, min_n, min_n + extra, per_match)
        assert drafter.propose([view], [limit]) == [expected]


def test_prefers_the_longest_match_then_the_latest() -> None:
    drafter = NgramDrafter(min_n=1, max_n=3)
    tokens = [1, 2, 3, 50, 9, 2, 3, 60, 3, 70, 8, 1, 2, 3]
    assert drafter.propose([View(tokens)], [1]) == [[50]]
    assert drafter.propose([View([2, 3, 4, 2, 3, 5, 2, 3], "s")], [2]) == [[5, 2]]


def test_a_repeating_end_is_continued_through_the_draft_itself() -> None:
    tokens = [9, 1, 2, 3, 1, 2, 3, 1]
    assert NgramDrafter().propose([View(tokens)], [8]) == [[2, 3, 1, 2, 3, 1, 2, 3]]
    assert NgramDrafter().propose([View([7] * 5, "s")], [6]) == [[7] * 6]


def test_a_short_match_gives_a_short_draft() -> None:
    drafter = NgramDrafter(max_n=3, per_match=2)
    tokens = list(range(10))
    assert drafter.propose([View([*tokens, 2], "a")], [8]) == [[3, 4]]
    assert drafter.propose([View([*tokens, 2, 3], "b")], [8]) == [[4, 5, 6, 7]]
    assert drafter.propose([View([*tokens, 2, 3], "c")], [3]) == [[4, 5, 6]]
    assert drafter.propose([View([*tokens, 0, 1, 2], "d")], [7]) == [[3, 4, 5, 6, 7, 8, 9]]


@pytest.mark.parametrize("tokens", [[], [1], [1, 2], [1, 2, 3, 4]])
def test_nothing_repeated_gives_no_draft(tokens: list[int]) -> None:
    assert NgramDrafter().propose([View(tokens)], [4]) == [[]]


def test_sequences_do_not_mix() -> None:
    drafter = NgramDrafter()
    views = [View([1, 2, 3, 1, 2], "a"), View([1, 2, 4, 1, 2], "b"), View([1, 2], "c")]
    assert drafter.propose(views, [1, 1, 1]) == [[3], [4], []]
    assert drafter.propose(views[::-1], [1, 0, 2]) == [[], [], [3, 1]]


def test_large_token_ids_do_not_collide() -> None:
    tokens = [2**31 - 1, 0, 5, 1, 2**31 - 1, 6, 2**31 - 1, 0]
    assert NgramDrafter(min_n=2, max_n=2).propose([View(tokens)], [1]) == [[5]]


def test_forget_frees_the_index_and_an_id_may_come_back() -> None:
    drafter = NgramDrafter()
    drafter.propose([View([1, 2, 3, 1, 2])], [1])
    assert len(drafter._indexes) == 1
    drafter.forget("r")
    drafter.forget("never seen")
    assert not drafter._indexes
    assert drafter.propose([View([1, 2, 4, 1, 2])], [1]) == [[4]]


def test_a_sequence_that_became_shorter_is_indexed_afresh() -> None:
    drafter = NgramDrafter()
    drafter.propose([View([1, 2, 3, 4, 5, 6, 1, 2])], [1])
    assert drafter.propose([View([1, 2, 9, 1, 2])], [1]) == [[9]]


class Counting(list[int]):
    """A list that counts how often it is looked into."""

    looks = 0

    def __getitem__(self, index: SupportsIndex | slice) -> Any:
        self.looks += 1
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("the sequence was read from beginning to end")


def test_a_step_costs_the_same_in_a_long_sequence() -> None:
    drafter = NgramDrafter()
    tokens = Counting(list(range(50_000)) * 2)
    view = View(tokens)
    drafter.propose([view], [8])
    tokens += [3, 4, 5, 6]
    tokens.looks = 0
    assert drafter.propose([view], [8]) == [[7, 8, 9, 10, 11, 12, 13, 14]]
    assert tokens.looks < 50


def test_is_a_drafter() -> None:
    drafter: Drafter = NgramDrafter()
    assert drafter.name == "ngram"


@pytest.mark.parametrize(("min_n", "max_n"), [(0, 3), (3, 2), (-1, 1)])
def test_sizes_out_of_order_are_refused(min_n: int, max_n: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"min_n={min_n} and max_n={max_n}"):
        NgramDrafter(min_n=min_n, max_n=max_n)
    with pytest.raises(InvalidRequestError, match="per_match=0"):
        NgramDrafter(per_match=0)
