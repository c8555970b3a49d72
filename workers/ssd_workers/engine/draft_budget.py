"""How many tokens to draft for each sequence in the next step.

A drafted token pays if it brings more expected tokens per second than the step has without it.
With a the chance that a drafted token stands when those before it do, the j-th one brings a**j
tokens; it costs one more row of the target's forward and, with a draft model, its share of one
more draft forward. Both are measured while decoding. As the batch grows, the rows of the others
make the step dearer and each further row is weighed against a higher rate, so drafts shrink, to
nothing where speculation would lose.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from ssd_workers.engine.drafters.base import Drafter
from ssd_workers.engine.sequence import Sequence
from ssd_workers.engine.step_cost import StepCost

# Weight of the shared estimate in a sequence's own, in drafted tokens.
_PRIOR_WEIGHT = 4.0
# What happened long ago counts less: after 30 drafted tokens, about a third.
_DECAY = 0.965
# Even where drafts do not pay, one token is drafted now and then, to notice when they would.
PROBE_EVERY = 24


class AcceptanceRate:
    """The chance that a drafted token is accepted, given that those before it were.

    Parameters:
      shared: the estimate over all sequences, which a new one starts from; None for that one.
    """

    def __init__(self, shared: AcceptanceRate | None = None) -> None:
        self._shared = shared
        self._accepted = 0.0
        self._rejected = 0.0

    @property
    def value(self) -> float:
        """Between 0 and 1, neither included."""
        prior = 0.5 if self._shared is None else self._shared.value
        total = self._accepted + self._rejected + _PRIOR_WEIGHT
        return (self._accepted + prior * _PRIOR_WEIGHT) / total

    def observe(self, proposed: int, accepted: int) -> None:
        """Learn from one verified draft."""
        if proposed == 0:
            return
        decay = _DECAY ** min(proposed, accepted + 1)
        self._accepted = self._accepted * decay + accepted
        # Tokens after the first rejected one say nothing: they never had a chance.
        self._rejected = self._rejected * decay + (accepted < proposed)
        if self._shared is not None:
            self._shared.observe(proposed, accepted)


class DraftBudget:
    """The draft lengths of every step, from what drafts have earned and cost so far."""

    def __init__(self) -> None:
        self._shared: dict[str, AcceptanceRate] = {}
        self._rates: dict[Sequence, AcceptanceRate] = {}
        self._draft_seconds: dict[str, float] = {}
        self._idle_steps: dict[Sequence, int] = {}

    def lengths(self, sequences: list[Sequence], cost: StepCost) -> dict[Sequence, int]:
        """The longest draft of each sequence for the next step."""
        fixed = {s: s.draft_limit for s in sequences if not s.request.speculation.adaptive}
        adaptive = [s for s in sequences if s not in fixed and s.draft_limit > 0]
        candidates = [
            Candidate(s.draft_limit, self._rate(s).value, self._seconds(s)) for s in adaptive
        ]
        count = len(sequences)
        rows = count + sum(fixed.values())
        chosen = allocate(candidates, lambda n: cost.seconds(count, rows + n), cost.per_row)
        lengths = dict.fromkeys(sequences, 0) | fixed
        for sequence, length in zip(adaptive, chosen, strict=True):
            lengths[sequence] = length or self._probe(sequence)
        return lengths

    def observe(self, sequence: Sequence, proposed: int, accepted: int) -> None:
        """Learn what became of a draft, and tell its drafter."""
        if sequence.drafter is None:
            return
        sequence.drafter.observe(sequence.request_id, proposed, accepted)
        self._rate(sequence).observe(proposed, accepted)

    def observe_drafting(self, drafter: Drafter, lengths: list[int], seconds: float) -> None:
        """Learn what a round of drafting cost: the forwards of a draft model share its rows."""
        if sum(lengths) == 0:
            return
        each = seconds / sum(lengths)
        before = self._draft_seconds.get(drafter.name, each)
        self._draft_seconds[drafter.name] = 0.9 * before + 0.1 * each

    def forget(self, sequence: Sequence) -> None:
        """Free what is kept for a sequence that ended."""
        self._rates.pop(sequence, None)
        self._idle_steps.pop(sequence, None)

    def _rate(self, sequence: Sequence) -> AcceptanceRate:
        assert sequence.drafter is not None
        shared = self._shared.setdefault(sequence.drafter.name, AcceptanceRate())
        return self._rates.setdefault(sequence, AcceptanceRate(shared))

    def _seconds(self, sequence: Sequence) -> float:
        assert sequence.drafter is not None
        return self._draft_seconds.get(sequence.drafter.name, 0.0)

    def _probe(self, sequence: Sequence) -> int:
        """One token now and then where drafts do not pay at present."""
        idle = self._idle_steps.get(sequence, 0) + 1
        self._idle_steps[sequence] = idle % PROBE_EVERY
        return 1 if idle == PROBE_EVERY else 0


@dataclass(frozen=True)
class Candidate:
    """A sequence that could have a draft of at most ``limit`` tokens.

    ``rate`` is its acceptance rate, ``draft_seconds`` what drafting one token for it costs beside
    the row it takes (nothing for drafters without a model).
    """

    limit: int
    rate: float
    draft_seconds: float = 0.0


def allocate(
    candidates: Seq[Candidate], seconds: Callable[[int], float], per_row: float
) -> list[int]:
    """The draft lengths that give the most expected tokens per second.

    Parameters:
      candidates: one for each decoding sequence.
      seconds: what the forward takes with so many drafted rows over all sequences.
      per_row: about what one more row costs.

    Returns: a length for each candidate, at most its limit.
    """
    # The best next token of each sequence, by what it brings per second. Along one draft the
    # chance only falls, so for each number of rows taking the best first finds the best set.
    queue = [
        (-c.rate / (per_row + c.draft_seconds), i) for i, c in enumerate(candidates) if c.limit > 0
    ]
    heapq.heapify(queue)
    tokens, drafting = float(len(candidates)), 0.0
    order: list[int] = []
    taken = [0] * len(candidates)
    best, best_rate = 0, tokens / seconds(0)
    while queue:
        negative, i = heapq.heappop(queue)
        candidate = candidates[i]
        order.append(i)
        taken[i] += 1
        tokens += -negative * (per_row + candidate.draft_seconds)
        drafting += candidate.draft_seconds
        # Rows come in blocks: behind one that does not pay there may be some that do.
        rate = tokens / (seconds(len(order)) + drafting)
        if rate > best_rate:
            best, best_rate = len(order), rate
        if taken[i] < candidate.limit:
            heapq.heappush(queue, (negative * candidate.rate, i))
    lengths = [0] * len(candidates)
    for i in order[:best]:
        lengths[i] += 1
    return lengths
