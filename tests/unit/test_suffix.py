"""The suffix drafter against a search through all that it has seen."""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import dataclass, field
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_integrations.errors import InvalidRequestError
from ssd_integrations.protocol import SamplingParams
from ssd_workers.engine.drafters.base import ScoredDrafter
from ssd_workers.engine.drafters.suffix import SuffixDrafter


@dataclass
class View:
    token_ids: list[int]
    request_id: str = "r"
    prompt_length: int = 0
    sampling: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0


def remember(drafter: SuffixDrafter, output: list[int], request_id: str = "old") -> None:
    view = View([1, *output], request_id, prompt_length=1)
    drafter.propose([view], [0])
    drafter.forget(request_id)


Candidate = tuple[Fraction, int, bool, list[int]]


def by_search(
    finished: list[list[int]],
    own: list[int],
    limit: int,
    depth: int,
    factor: float,
    min_prob: float,
) -> list[Candidate]:
    """Every draft that the rules allow: its score, match length, whether it is from ``own``."""
    found: list[Candidate] = []
    for sequences, is_own in (([own], True), (finished, False)):
        for m in range(1, min(depth, len(own) + 1)):
            path = own[len(own) - m :]
            if len(occurrences(sequences, path)) == (1 if is_own else 0):
                break
            draft: list[int] = []
            prob, score = Fraction(1), Fraction(0)
            while len(draft) < min(limit, int(m * factor)) and len(path) < depth:
                places = occurrences(sequences, path)
                following = [
                    (sequences[i][p + len(path)], (i, p))
                    for i, p in places
                    if p + len(path) < len(sequences[i])
                ]
                if not following:
                    break
                counts = Counter(token for token, _ in following)
                latest = dict(following)
                token = max(counts, key=lambda t: (counts[t], latest[t]))
                doubt = Fraction(0) if draft else Fraction(-1 if is_own else 1, 1 if is_own else 2)
                prob *= counts[token] / (len(places) + doubt)
                if prob < min_prob:
                    break
                draft.append(token)
                path = [*path, token]
                score += prob
            found.append((score, m, is_own, draft))
    return found


def occurrences(sequences: list[list[int]], path: list[int]) -> list[tuple[int, int]]:
    return [
        (i, p)
        for i, sequence in enumerate(sequences)
        for p in range(len(sequence) - len(path) + 1)
        if sequence[p : p + len(path)] == path
    ]


IDS = st.lists(st.integers(0, 3), min_size=2, max_size=14)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(IDS, max_size=5),
    st.lists(IDS, min_size=1, max_size=4),
    st.integers(2, 10),
    st.sampled_from([1.0, 1.5, 2.0]),
    st.sampled_from([0.125, 0.25, 0.5]),
    st.integers(1, 8),
    st.integers(1, 6),
)
def test_equals_a_search_however_the_sequence_grows(
    finished: list[list[int]],
    pieces: list[list[int]],
    depth: int,
    factor: float,
    min_prob: float,
    limit: int,
    max_requests: int,
) -> None:
    drafter = SuffixDrafter(
        depth=depth, factor=factor, min_prob=min_prob, max_requests=max_requests
    )
    for output in finished:
        remember(drafter, output)
    view = View([])
    for piece in pieces:
        view.token_ids += piece
        ((draft, score),) = drafter.propose_scored([view], [limit])
        candidates = by_search(
            finished[-max_requests:], view.token_ids, limit, depth, factor, min_prob
        )
        best = max((c[0] for c in candidates), default=Fraction(0))
        assert score == pytest.approx(float(best))
        # Floats may part equal scores, so any of the best will do.
        assert draft in [c[3] for c in candidates if c[0] == best] or (not best and not draft)


def test_the_longer_match_wins_a_tie_then_the_requests_own() -> None:
    # After "1 2" came 3 and 5, half each, the 5 later; after 2 came 3 in two of four cases.
    own = View([1, 2, 3, 1, 2, 5, 9, 2, 3, 9, 2, 4, 1, 2])
    ((draft, score),) = SuffixDrafter(max_requests=0).propose_scored([own], [1])
    assert (draft, score) == ([5], 0.5)
    # Two of three in the own text, and one single precedent elsewhere: the same score.
    drafter = SuffixDrafter(max_tokens=1000)
    remember(drafter, [2, 8])
    own = View([2, 3, 2, 3, 2, 4, 2])
    ((draft, score),) = drafter.propose_scored([own], [1])
    assert (draft, score) == ([3], 2 / 3)
    ((draft, score),) = drafter.propose_scored([View([9, 2], "b")], [1])
    assert (draft, score) == ([8], 2 / 3)


def test_scores_count_on_what_came_before() -> None:
    drafter = SuffixDrafter()
    for last in (40, 40, 40, 50):
        remember(drafter, [10, 20, 30, last, 60])
    ((draft, score),) = drafter.propose_scored([View([10, 20, 30])], [2])
    assert draft == [40, 60]
    assert score == pytest.approx(2 * 3 / 4.5)
    assert SuffixDrafter(min_prob=0.8).propose([View([10, 20, 30])], [2]) == [[]]


def test_the_draft_is_as_long_as_the_match_allows() -> None:
    text = list(range(20))
    lengths = [
        len(SuffixDrafter(factor=f, offset=o).propose([View([*text, *text[3 : 3 + m]])], [9])[0])
        for f, o, m in [(1.0, 0.0, 3), (2.0, 0.0, 1), (2.0, 0.0, 4), (1.5, 0.5, 2), (9.0, 0.0, 1)]
    ]
    assert lengths == [3, 2, 8, 3, 9]


def test_outputs_are_remembered_and_prompts_are_not() -> None:
    drafter = SuffixDrafter()
    view = View([1, 2, 3, 4, 5], prompt_length=3)
    drafter.propose([view], [4])
    view.token_ids += [6]
    drafter.forget("r")
    assert drafter.num_remembered == 1
    assert drafter.propose([View([4, 5], "s")], [4]) == [[6]]
    assert drafter.propose([View([1, 2], "t")], [4]) == [[]]
    drafter.forget("never seen")
    assert drafter.num_remembered == 1


def test_sequences_do_not_mix_while_they_run() -> None:
    drafter = SuffixDrafter()
    views = [View([1, 2, 3, 1, 2], "a"), View([1, 2, 4, 1, 2], "b"), View([1, 2], "c")]
    assert drafter.propose(views, [1, 1, 1]) == [[3], [4], []]
    assert drafter.propose(views[::-1], [1, 0, 2]) == [[], [], [3, 1]]


def test_a_sequence_that_became_shorter_is_indexed_afresh() -> None:
    drafter = SuffixDrafter()
    drafter.propose([View([1, 2, 3, 4, 5, 6, 1, 2])], [1])
    assert drafter.propose([View([1, 2, 9, 1, 2])], [1]) == [[9]]


@pytest.mark.parametrize("tokens", [[], [1], [1, 2], [1, 2, 3, 4]])
def test_nothing_repeated_gives_no_draft(tokens: list[int]) -> None:
    assert SuffixDrafter().propose([View(tokens)], [4]) == [[]]


def phrases(rng: random.Random, length: int) -> list[int]:
    starts = [rng.randrange(2000) for _ in range(length // 10)]
    return [start + i for start in starts for i in range(10)]


def test_memory_stays_bounded_over_ten_thousand_requests() -> None:
    rng = random.Random(0)
    drafter = SuffixDrafter(depth=16, max_requests=200, max_tokens=5_000)
    highest, late = 0, []
    for index in range(10_000):
        view = View([7, *phrases(rng, rng.choice([10, 30, 60]))], f"r{index}", prompt_length=1)
        drafter.propose([view], [8])
        drafter.forget(view.request_id)
        assert drafter.num_remembered <= 200
        assert drafter._finished.num_tokens <= 5_000
        highest = max(highest, drafter.nbytes)
        if index > 9_000:
            late.append(drafter.nbytes)
    assert not drafter._running
    assert highest < 5_000 * 500
    assert max(late) < 1.2 * min(late)
    assert len(drafter._finished._closed) == drafter.num_remembered


def test_an_output_longer_than_the_memory_keeps_its_end() -> None:
    drafter = SuffixDrafter(max_tokens=10)
    remember(drafter, list(range(100)))
    assert drafter._finished.num_tokens == 10
    assert drafter.propose([View([93, 94])], [8]) == [[95, 96, 97, 98]]
    assert drafter.propose([View([50, 51], "s")], [8]) == [[]]


def test_same_history_same_drafts() -> None:
    def run() -> list[list[int]]:
        rng = random.Random(5)
        drafter = SuffixDrafter(max_requests=20)
        drafts = []
        for index in range(60):
            view = View(phrases(rng, 60), f"r{index}", prompt_length=5)
            drafts += drafter.propose([view], [8])
            drafter.forget(view.request_id)
        return drafts

    assert run() == run()


def test_a_draft_costs_well_under_a_millisecond() -> None:
    """A verification takes 90 ms, and eight rows share it."""
    rng = random.Random(1)
    drafter = SuffixDrafter(depth=64)
    for index in range(200):
        remember(drafter, phrases(rng, 200), f"old{index}")
    views = [View(phrases(rng, 500), f"r{i}") for i in range(8)]
    drafter.propose(views, [8] * 8)
    drafted = 0
    started = time.process_time()
    for _ in range(50):
        for view in views:
            view.token_ids.append((view.token_ids[-1] + 1) % 2000)
        drafted += sum(map(len, drafter.propose(views, [8] * 8)))
    assert (time.process_time() - started) / 400 < 0.001
    assert drafted > 1_000


def test_is_a_drafter() -> None:
    drafter: ScoredDrafter = SuffixDrafter()
    assert drafter.name == "suffix"
    drafter.observe("unknown", 3, 1)


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"depth": 0}, "depth=0"),
        ({"factor": -1.0}, "factor=-1"),
        ({"factor": 0.5}, "factor=0.5 and offset=0"),
        ({"min_prob": 0.0}, "min_prob=0"),
        ({"min_prob": 1.5}, "min_prob=1.5"),
        ({"max_requests": -1}, "max_requests=-1"),
        ({"max_tokens": -1}, "max_tokens=-1"),
    ],
)
def test_parameters_out_of_bounds_are_refused(parameters: dict[str, float], named: str) -> None:
    with pytest.raises(InvalidRequestError, match=named):
        SuffixDrafter(**parameters)  # type: ignore[arg-type]
