"""The hybrid drafter: who drafts, and what it learns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from ssd_integrations.protocol import SamplingParams
from ssd_workers.engine.drafters.base import Drafter, DraftView
from ssd_workers.engine.drafters.hybrid import Earnings, HybridDrafter, _Given
from ssd_workers.engine.drafters.ngram import NgramDrafter
from ssd_workers.engine.drafters.suffix import SuffixDrafter


@dataclass
class View:
    token_ids: list[int]
    request_id: str = "r"
    prompt_length: int = 0
    sampling: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0


class Scripted:
    """Drafts the token it is told to, with the score it is told, and keeps a diary."""

    def __init__(self, name: str, token: int, score: float = 0.0) -> None:
        self._name = name
        self.token = token
        self.score = score
        self.asked: list[list[str]] = []
        self.observed: list[tuple[str, int, int]] = []
        self.forgotten: list[str] = []

    @property
    def name(self) -> str:
        return self._name

    def propose(self, sequences: Sequence[DraftView], max_tokens: Sequence[int]) -> list[list[int]]:
        return [tokens for tokens, _ in self.propose_scored(sequences, max_tokens)]

    def propose_scored(
        self, sequences: Sequence[DraftView], max_tokens: Sequence[int]
    ) -> list[tuple[list[int], float]]:
        self.asked.append([s.request_id for s in sequences])
        return [([self.token] * limit if self.token else [], self.score) for limit in max_tokens]

    def observe(self, request_id: str, proposed: int, accepted: int) -> None:
        self.observed.append((request_id, proposed, accepted))

    def forget(self, request_id: str) -> None:
        self.forgotten.append(request_id)


def teach(hybrid: HybridDrafter, accepted: int, *, suffix: bool) -> None:
    """Let drafts of four tokens, with the suffix drafter's present score, earn ``accepted``."""
    drafter = hybrid._suffix if suffix else hybrid._other
    assert isinstance(drafter, Scripted)
    hybrid._given["teach"] = _Given(drafter, drafter.score / 4)
    for _ in range(3_000):
        hybrid.observe("teach", 4, accepted)


def test_the_model_drafts_where_the_suffix_promises_less_than_it_usually_earns() -> None:
    suffix, model = Scripted("suffix", 1, 3.0), Scripted("model", 2)
    hybrid = HybridDrafter(suffix, model=model)
    teach(hybrid, 3, suffix=True)
    assert hybrid.trust == pytest.approx(1.0, abs=0.01)
    teach(hybrid, 2, suffix=False)
    assert hybrid.usual == pytest.approx(2.0, abs=0.01)
    assert hybrid.propose([View([0])], [3]) == [[1, 1, 1]]
    teach(hybrid, 4, suffix=False)
    assert hybrid.propose([View([0])], [3]) == [[2, 2, 2]]
    # As much as usual is enough: the suffix draft costs nothing.
    suffix.score = hybrid.usual / hybrid.trust * (1 + 1e-9)
    assert hybrid.propose([View([0])], [3]) == [[1, 1, 1]]


def test_scores_that_promise_too_much_are_trusted_less() -> None:
    suffix, model = Scripted("suffix", 1, 3.9), Scripted("model", 2)
    hybrid = HybridDrafter(suffix, model=model)
    teach(hybrid, 4, suffix=True)
    assert hybrid.propose([View([0])], [3]) == [[1, 1, 1]]
    teach(hybrid, 1, suffix=True)
    assert hybrid.trust == pytest.approx(1 / 3.9, rel=0.01)
    assert hybrid.propose([View([0])], [3]) == [[2, 2, 2]]


def test_a_draft_that_the_engine_cut_short_promised_less() -> None:
    suffix = Scripted("suffix", 1, 4.0)
    hybrid = HybridDrafter(suffix)
    hybrid.propose([View([0])], [4])
    for _ in range(2_000):
        hybrid.observe("r", 2, 2)
    assert hybrid.trust == pytest.approx(1.0, abs=0.01)


def test_the_model_is_run_for_the_rows_that_need_it() -> None:
    class ByRow(Scripted):
        def propose_scored(
            self, sequences: Sequence[DraftView], max_tokens: Sequence[int]
        ) -> list[tuple[list[int], float]]:
            return [([1], 9.0) if s.request_id == "good" else ([1], 0.1) for s in sequences]

    model = Scripted("model", 2)
    hybrid = HybridDrafter(ByRow("suffix", 1), model=model)
    views = [View([0], "bad"), View([0], "good"), View([0], "full"), View([0], "worse")]
    assert hybrid.propose(views, [2, 4, 0, 1]) == [[2, 2], [1], [1], [2]]
    assert model.asked == [["bad", "worse"]]
    views = [View([0], "good")]
    hybrid.propose(views, [4])
    assert len(model.asked) == 1


def test_a_model_without_a_draft_leaves_the_suffix_draft() -> None:
    hybrid = HybridDrafter(Scripted("suffix", 1, 0.1), model=Scripted("model", 0))
    assert hybrid.propose([View([0])], [2]) == [[1, 1]]


def test_without_a_model_ngrams_fill_in_where_there_is_no_suffix_draft() -> None:
    suffix, ngram = Scripted("suffix", 1, 0.1), Scripted("ngram", 3)
    hybrid = HybridDrafter(suffix, ngram=ngram)
    assert hybrid.propose([View([0])], [2]) == [[1, 1]]
    assert ngram.asked == []
    suffix.token = 0
    assert hybrid.propose([View([0])], [2]) == [[3, 3]]
    assert HybridDrafter(suffix).propose([View([0])], [2]) == [[]]


def test_a_model_comes_before_ngrams() -> None:
    ngram = Scripted("ngram", 3)
    hybrid = HybridDrafter(Scripted("suffix", 0), model=Scripted("model", 2), ngram=ngram)
    assert hybrid.propose([View([0])], [1]) == [[2]]
    assert ngram.asked == []


def test_what_became_of_a_draft_goes_to_its_drafter() -> None:
    suffix, model = Scripted("suffix", 1, 9.0), Scripted("model", 2)
    hybrid = HybridDrafter(suffix, model=model)
    hybrid.propose([View([0], "a")], [2])
    suffix.score = 0.0
    hybrid.propose([View([0], "b")], [2])
    usual, trust = hybrid.usual, hybrid.trust
    hybrid.observe("a", 2, 2)
    assert (suffix.observed, model.observed) == ([("a", 2, 2)], [])
    assert hybrid.usual == usual
    assert hybrid.trust < trust
    trust = hybrid.trust
    hybrid.observe("b", 2, 0)
    assert model.observed == [("b", 2, 0)]
    assert hybrid.usual < usual
    # A step without a draft says nothing about drafts.
    usual = hybrid.usual
    hybrid.observe("a", 0, 0)
    hybrid.observe("b", 0, 0)
    hybrid.observe("unknown", 5, 5)
    assert (hybrid.usual, hybrid.trust) == (usual, trust)


def test_forget_reaches_everybody() -> None:
    suffix, model = Scripted("suffix", 1), Scripted("model", 2)
    hybrid = HybridDrafter(suffix, model=model)
    hybrid.propose([View([0], "a")], [2])
    hybrid.forget("a")
    assert suffix.forgotten == model.forgotten == ["a"]
    assert not hybrid._given
    hybrid.observe("a", 2, 2)
    assert suffix.observed == model.observed == []


def test_earnings_are_means_that_follow() -> None:
    earnings = Earnings()
    for _ in range(2_000):
        earnings.add(5, 10.0)
    assert earnings.mean == pytest.approx(5.0, abs=0.01)
    assert earnings.trust == pytest.approx(0.5, abs=0.01)
    for _ in range(400):
        earnings.add(1, 1.0)
    assert earnings.mean == pytest.approx(1.0, abs=0.6)
    assert earnings.trust > 0.6


def test_with_the_real_drafters() -> None:
    suffix = SuffixDrafter()
    hybrid: Drafter = HybridDrafter(suffix, ngram=NgramDrafter())
    assert hybrid.name == "hybrid"
    old = View([1, 10, 11, 12, 13, 14], "old", prompt_length=1)
    assert hybrid.propose([old], [4]) == [[]]
    hybrid.forget("old")
    assert suffix.num_remembered == 1
    views = [View([7, 8, 9, 10, 11, 12], "a"), View([1, 2, 3, 1], "b")]
    assert hybrid.propose(views, [4, 4]) == [[13, 14], [2, 3]]
