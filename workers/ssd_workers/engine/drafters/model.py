"""A small model of the same tokenizer as drafter."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ssd_workers.engine.drafters.base import DraftView
from ssd_workers.engine.kv_cache import SequenceCache
from ssd_workers.engine.logit_rules import adjust_logits
from ssd_workers.engine.rejection import stream_seed
from ssd_workers.engine.runner import ModelRunner, RowBlock
from ssd_workers.engine.sampling import choose_tokens, process_logits

# Tokens read in a step by those that have many to read, all together; few are read at once.
_PREFILL_ROWS = 256
_FEW = 64


@dataclass
class _State:
    """``cache`` holds the first ``base`` accepted tokens, then all but the last of ``drafted``.

    ``distributions`` are those that ``drafted`` was drawn from, where the rejection rule needs
    them. ``unreadable``: the sequence holds a token beyond the draft's vocabulary.
    """

    cache: SequenceCache
    base: int = 0
    drafted: list[int] = field(default_factory=list)
    distributions: list[Tensor] = field(default_factory=list)
    unreadable: bool = False


class ModelDrafter:
    """Drafts with the same noise as the target, so the two agree as often as p and q allow.

    A sequence too long for the draft model's context, or with a token that only the target's
    vocabulary has, gets no draft, which costs speed only. Nor does one whose prompt is long, until
    the draft model has read it: a chunk in each step, so that nobody else has to wait for it.

    Parameters:
      runner: the draft model.
      context_length: its longest sequence, in tokens.
      target_vocab_size: ids from here on are never drafted (padding of a larger vocabulary).
      target_token_ids: what the target's tokenizer has tokens for; nothing else is drafted. None
        for every id below ``target_vocab_size``.
    """

    name = "model"

    def __init__(
        self,
        runner: ModelRunner,
        context_length: int,
        target_vocab_size: int,
        target_token_ids: Collection[int] | None = None,
    ) -> None:
        self._runner = runner
        self._context_length = context_length
        self._vocab_size = min(runner.vocab_size, target_vocab_size)
        self._never: Tensor | None = None
        if target_token_ids is not None:
            self._vocab_size = min(self._vocab_size, 1 + max(target_token_ids))
            holes = sorted(set(range(self._vocab_size)).difference(target_token_ids))
            self._never = torch.tensor(holes, device=runner.device) if holes else None
        self._states: dict[str, _State] = {}

    def propose(self, sequences: Sequence[DraftView], max_tokens: Sequence[int]) -> list[list[int]]:
        """One draft forward per drafted position, over every sequence that still wants one."""
        wanted = [
            min(limit, self._context_length - len(sequence.token_ids))
            for sequence, limit in zip(sequences, max_tokens, strict=True)
        ]
        active = [i for i, count in enumerate(wanted) if count > 0]
        drafts: list[list[int]] = [[] for _ in sequences]
        budget = _PREFILL_ROWS
        pending: dict[int, list[int]] = {}
        for i in active:
            pending[i], read = self._catch_up(sequences[i], budget)
            budget -= read
        active = [i for i in active if pending[i]]
        while active:
            blocks = [RowBlock(self._state(sequences[i]).cache, pending[i], 1) for i in active]
            logits = self._runner.forward(blocks)[:, : self._vocab_size]
            if self._never is not None:
                logits = logits.index_fill(1, self._never, -torch.inf)
            logits = adjust_logits(logits, [sequences[i].rules(drafts[i]) for i in active])
            for i, row in zip(active, logits, strict=True):
                if sequences[i].by_rejection:
                    drawn_from = process_logits(row[None], [sequences[i].sampling])
                    self._state(sequences[i]).distributions.append(drawn_from)
            chosen = choose_tokens(
                logits,
                [sequences[i].sampling for i in active],
                [_seed(sequences[i]) for i in active],
                [len(sequences[i].token_ids) + len(drafts[i]) for i in active],
            )
            for i, token in zip(active, chosen, strict=True):
                if token < 0:  # NaN logits: the draft model cannot help this row
                    wanted[i] = len(drafts[i])
                    continue
                drafts[i].append(token)
                pending[i] = [token]
            active = [i for i in active if len(drafts[i]) < wanted[i]]
        for i, draft in enumerate(drafts):
            if i in pending:
                state = self._state(sequences[i])
                state.base, state.drafted = len(sequences[i].token_ids), list(draft)
        return drafts

    def distributions(self, request_id: str) -> Tensor | None:
        """``[drafted, vocab]`` log-probabilities of the last draft under the rejection rule."""
        state = self._states.get(request_id)
        return torch.cat(state.distributions) if state and state.distributions else None

    def observe(self, request_id: str, proposed: int, accepted: int) -> None:
        """Nothing to learn: the tokens accepted are read off the sequence."""

    def forget(self, request_id: str) -> None:
        """Free the request's draft cache."""
        self._states.pop(request_id, None)

    def _state(self, sequence: DraftView) -> _State:
        return self._states[sequence.request_id]

    def _catch_up(self, sequence: DraftView, budget: int) -> tuple[list[int], int]:
        """Roll back what was rejected; the tokens still missing from the draft's cache.

        If there are many, more than ``budget``, so many are read now and there is no draft yet.

        Returns: what to start the draft with, empty for no draft, and what it takes of ``budget``.
        """
        state = self._states.get(sequence.request_id)
        if state is None:
            state = _State(self._runner.new_cache(len(sequence.token_ids)))
            self._states[sequence.request_id] = state
        state.distributions.clear()
        tokens = sequence.token_ids
        valid = state.base
        for drafted, accepted in zip(state.drafted, tokens[state.base :], strict=False):
            if drafted != accepted:
                break
            valid += 1
        # The last accepted token is always fed again: its logits are the first draft.
        state.cache.truncate(min(valid, len(tokens) - 1))
        missing = tokens[state.cache.length :]
        if state.unreadable or max(missing) >= self._runner.vocab_size:
            state.unreadable = True
            return [], 0
        if len(missing) <= _FEW:
            return missing, 0
        chunk = missing[:budget]
        if len(chunk) == len(missing):
            return missing, len(missing)
        if chunk:
            self._runner.forward([RowBlock(state.cache, chunk, 0)])
        return [], len(chunk)


def _seed(sequence: DraftView) -> int:
    """Coupled, the target's own noise; under the rejection rule, noise independent of its coin."""
    return stream_seed(sequence.seed, "draft") if sequence.by_rejection else sequence.seed
