"""What a drafter is: it proposes tokens, the target decides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from ssd_integrations.protocol import SamplingParams
from ssd_workers.engine.logit_rules import RowRules


class DraftView(Protocol):
    """What a drafter may see of a running sequence. Read it, do not change it."""

    @property
    def request_id(self) -> str:
        """Names the sequence from its first step to :meth:`Drafter.forget`."""
        ...

    @property
    def token_ids(self) -> list[int]:
        """Prompt and accepted output; grows at the end only. The live list, not a copy."""
        ...

    @property
    def prompt_length(self) -> int:
        """How many of ``token_ids`` are the prompt."""
        ...

    @property
    def sampling(self) -> SamplingParams:
        """How the target will choose."""
        ...

    @property
    def by_rejection(self) -> bool:
        """Whether the draft is verified by the rejection rule rather than by equality."""
        ...

    def rules(self, drafted: list[int]) -> RowRules | None:
        """What changes the logits of the position after ``drafted``."""
        ...

    @property
    def seed(self) -> int:
        """The seed of the noise that the target will choose with."""
        ...


class Drafter(Protocol):
    """Proposes continuations. One thread calls it; it keeps what it needs between calls."""

    @property
    def name(self) -> str:
        """The method's name in statistics: ``ngram``, ``model``..."""
        ...

    def propose(self, sequences: Sequence[DraftView], max_tokens: Sequence[int]) -> list[list[int]]:
        """Draft at most ``max_tokens[i]`` tokens for ``sequences[i]``; an empty list is fine."""
        ...

    def distributions(self, request_id: str) -> Tensor | None:
        """``[drafted, vocab]`` log-probabilities that the request's last draft was drawn from.

        None for a drafter that does not draw but copies. Only the rejection rule asks.
        """
        ...

    def observe(self, request_id: str, proposed: int, accepted: int) -> None:
        """Learn what became of the request's last draft: ``accepted`` of ``proposed`` tokens.

        Called after each verification, before the next :meth:`propose`. ``proposed`` may be less
        than what was drafted: the engine may cut a draft short.
        """
        ...

    def forget(self, request_id: str) -> None:
        """Free what is kept for a request that ended or waits again; unknown ids are fine."""
        ...


class CopyingDrafter:
    """The part of a :class:`Drafter` that is the same for all that copy earlier text."""

    def distributions(self, request_id: str) -> None:
        """None: what is copied is not drawn from a distribution."""
        del request_id
        return None

    def observe(self, request_id: str, proposed: int, accepted: int) -> None:
        """Nothing to learn: the tokens accepted are read off the sequence."""


class ScoredDrafter(Drafter, Protocol):
    """A drafter that can say beforehand how good a draft is."""

    def propose_scored(
        self, sequences: Sequence[DraftView], max_tokens: Sequence[int]
    ) -> list[tuple[list[int], float]]:
        """Drafts as of :meth:`propose`, each with a score: an estimate, in tokens, of how many of
        it will stand. Scores of one drafter compare; how far to trust them must be measured.
        """
        ...
