"""Per row and step, the drafter that will probably have most tokens accepted."""

from __future__ import annotations

from collections.abc import Sequence

from ssd_workers.engine.drafters.base import Drafter, DraftView, ScoredDrafter

# What a drafter is believed to earn before it was tried, in tokens per draft, and how many drafts
# that belief weighs.
_PRIOR_TOKENS = 2.0
_PRIOR_DRAFTS = 8
# The mean follows the work at hand: an old draft is forgotten after about so many.
_WINDOW = 200


class Earnings:
    """How many tokens of a draft are usually accepted: a running mean that forgets slowly."""

    def __init__(self) -> None:
        self.mean = _PRIOR_TOKENS
        self._drafts = _PRIOR_DRAFTS

    def add(self, accepted: int) -> None:
        """Count one verified draft."""
        self._drafts = min(self._drafts + 1, _WINDOW)
        self.mean += (accepted - self.mean) / self._drafts


class HybridDrafter:
    """The suffix draft where it promises more than another drafter usually earns.

    The suffix drafter is asked for every row: it costs next to nothing. With a draft model, its
    draft is taken if its score is at least what the model's drafts usually earn; the model is run
    for the other rows only. Without one, the suffix draft is taken if there is any, else that of
    the n-gram drafter. What the model usually earns is learned while it works.

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
        self._earnings: dict[str, Earnings] = {}
        # Whose draft a request was given last.
        self._last: dict[str, Drafter] = {}

    def usual(self, drafter: Drafter) -> float:
        """How many tokens a draft of ``drafter`` usually earns."""
        earnings = self._earnings.get(drafter.name)
        return earnings.mean if earnings else _PRIOR_TOKENS

    def propose(self, sequences: Sequence[DraftView], max_tokens: Sequence[int]) -> list[list[int]]:
        """Draft at most ``max_tokens[i]`` tokens for ``sequences[i]``."""
        scored = self._suffix.propose_scored(sequences, max_tokens)
        drafts = [tokens for tokens, _ in scored]
        for sequence in sequences:
            self._last[sequence.request_id] = self._suffix
        other = self._other
        if other is None:
            return drafts
        rows = [
            i
            for i, (tokens, score) in enumerate(scored)
            if max_tokens[i] > 0 and (not tokens or (self._has_model and score < self.usual(other)))
        ]
        if not rows:
            return drafts
        others = other.propose([sequences[i] for i in rows], [max_tokens[i] for i in rows])
        for i, draft in zip(rows, others, strict=True):
            # A sequence that the model cannot read still has its suffix draft.
            if draft:
                drafts[i] = draft
                self._last[sequences[i].request_id] = other
        return drafts

    def observe(self, request_id: str, proposed: int, accepted: int) -> None:
        """Add to what the drafter of the request's last draft earns."""
        drafter = self._last.get(request_id)
        if drafter is None:
            return
        drafter.observe(request_id, proposed, accepted)
        if proposed:
            self._earnings.setdefault(drafter.name, Earnings()).add(accepted)

    def forget(self, request_id: str) -> None:
        """Free what all its drafters keep for a request."""
        self._last.pop(request_id, None)
        self._suffix.forget(request_id)
        if self._other is not None:
            self._other.forget(request_id)
