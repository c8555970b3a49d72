"""Per row and step, the drafter that will probably have most tokens accepted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ssd_workers.engine.drafters.base import Drafter, DraftView, ScoredDrafter

# What is believed before anything was measured: the tokens that a draft earns, the accepted
# tokens per unit of score, and how many drafts these beliefs weigh.
_PRIOR_EARNED = 2.0
_PRIOR_TRUST = 0.5
_PRIOR_DRAFTS = 8
# The means follow the work at hand: a draft is forgotten after about so many others.
_WINDOW = 200


class Earnings:
    """What a drafter's drafts earn: running means that forget slowly."""

    def __init__(self) -> None:
        self._earned = _PRIOR_EARNED
        self._promised = _PRIOR_EARNED / _PRIOR_TRUST
        self._drafts = _PRIOR_DRAFTS

    @property
    def mean(self) -> float:
        """Accepted tokens per draft."""
        return self._earned

    @property
    def trust(self) -> float:
        """Accepted tokens per unit of score."""
        return self._earned / self._promised

    def add(self, accepted: int, score: float) -> None:
        """Count one verified draft."""
        self._drafts = min(self._drafts + 1, _WINDOW)
        self._earned += (accepted - self._earned) / self._drafts
        self._promised += (score - self._promised) / self._drafts


@dataclass
class _Given:
    """Whose draft a request was given last, and its score per token (0 without one)."""

    drafter: Drafter
    token_score: float


class HybridDrafter:
    """The suffix draft where it promises more than another drafter usually earns.

    The suffix drafter is asked for every row: it costs next to nothing. With a draft model, its
    draft is taken if it promises at least what the model's drafts usually earn; the model is run
    for the other rows only. Without one, the suffix draft is taken if there is any, else that of
    the n-gram drafter.

    Both sides are measured while it works (:meth:`observe`): what the model's drafts earn, and
    what part of their score the suffix drafts do. Scores say which suffix draft is better, but
    they are too high, and by how much depends on the text.

    Parameters:
      suffix: the drafter with scores.
      model: the drafter whose drafts cost time; None if no draft model is loaded.
      ngram: used without a model, where ``suffix`` has no draft.
    """

    name = "hybrid"

    def __init__(
        self, suffix: ScoredDrafter, *, model: Drafter | None = None, ngram: Drafter | None = None
    ) -> None:
        self._suffix = suffix
        self._other = model or ngram
        self._has_model = model is not None
        self._suffix_earnings = Earnings()
        self._other_earnings = Earnings()
        self._given: dict[str, _Given] = {}

    @property
    def usual(self) -> float:
        """How many tokens a draft of the model (or n-gram) drafter usually earns."""
        return self._other_earnings.mean

    @property
    def trust(self) -> float:
        """How many tokens a suffix draft usually earns per unit of its score."""
        return self._suffix_earnings.trust

    def propose(self, sequences: Sequence[DraftView], max_tokens: Sequence[int]) -> list[list[int]]:
        """Draft at most ``max_tokens[i]`` tokens for ``sequences[i]``."""
        scored = self._suffix.propose_scored(sequences, max_tokens)
        drafts = [tokens for tokens, _ in scored]
        for sequence, (tokens, score) in zip(sequences, scored, strict=True):
            token_score = score / len(tokens) if tokens else 0.0
            self._given[sequence.request_id] = _Given(self._suffix, token_score)
        rows = [i for i in range(len(sequences)) if max_tokens[i] > 0 and self._is_poor(*scored[i])]
        if self._other is None or not rows:
            return drafts
        others = self._other.propose([sequences[i] for i in rows], [max_tokens[i] for i in rows])
        for i, draft in zip(rows, others, strict=True):
            # A sequence that the model cannot read still has its suffix draft.
            if draft:
                drafts[i] = draft
                self._given[sequences[i].request_id] = _Given(self._other, 0.0)
        return drafts

    def distributions(self, request_id: str) -> Tensor | None:
        """Those of the drafter whose draft the request was given last."""
        given = self._given.get(request_id)
        return given.drafter.distributions(request_id) if given else None

    def observe(self, request_id: str, proposed: int, accepted: int) -> None:
        """Learn from the request's last draft, and let its drafter learn."""
        given = self._given.get(request_id)
        if given is None:
            return
        given.drafter.observe(request_id, proposed, accepted)
        if proposed and given.drafter is self._suffix:
            self._suffix_earnings.add(accepted, given.token_score * proposed)
        elif proposed:
            self._other_earnings.add(accepted, 0.0)

    def forget(self, request_id: str) -> None:
        """Free what all its drafters keep for a request."""
        self._given.pop(request_id, None)
        self._suffix.forget(request_id)
        if self._other is not None:
            self._other.forget(request_id)

    def _is_poor(self, tokens: list[int], score: float) -> bool:
        """Whether another drafter should have a go instead of this suffix draft."""
        return not tokens or (self._has_model and score * self.trust < self.usual)
