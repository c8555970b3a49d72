"""From a step's logits to a verdict for each sequence: what was accepted, what is emitted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from ssd_integrations.protocol import SamplingParams, TokenLogprob
from ssd_workers.engine.logit_rules import RowRules, adjust_logits
from ssd_workers.engine.logprobs import token_logprobs
from ssd_workers.engine.rejection import verify_by_rejection
from ssd_workers.engine.runner import RowBlock
from ssd_workers.engine.sampling import choose_tokens, process_logits
from ssd_workers.engine.sequence import Sequence
from ssd_workers.engine.verification import accept_drafts


@dataclass(frozen=True)
class StepRows:
    """What one sequence brings to a forward: its new tokens and, while decoding, its draft."""

    sequence: Sequence
    block: RowBlock
    draft: list[int]


@dataclass(frozen=True)
class Verdict:
    """``accepted`` draft tokens and one more are ``emitted``; -1 where logits were no numbers.

    Nothing is emitted by a chunk of a prompt that is not its last.
    """

    accepted: int
    emitted: list[int]
    logprobs: tuple[TokenLogprob, ...] | None


def verify(
    rows: list[StepRows], logits: torch.Tensor, decode: Callable[[list[int]], str]
) -> list[Verdict]:
    """One verdict for each of ``rows``.

    Parameters:
      rows: what was fed to the forward.
      logits: ``[sum of keep, vocab]``, the rows' kept logits one after the other.
      decode: ids to text, for log-probabilities.
    """
    if not len(logits):
        return [Verdict(0, [], None) for _ in rows]
    adjusted = adjust_logits(logits, _rules(rows))
    pieces = torch.split(adjusted, [r.block.keep for r in rows])
    coupled = _coupled_choices(rows, adjusted, pieces)
    verdicts, at = [], 0
    for r, piece in zip(rows, pieces, strict=True):
        part = slice(at, at + r.block.keep)
        at = part.stop
        if r.block.keep == 0:
            verdicts.append(Verdict(0, [], None))
            continue
        if r.sequence.by_rejection:
            accepted, emitted = _by_rejection(r, piece)
        else:
            accepted, emitted = accept_drafts(r.draft, [next(coupled) for _ in range(len(piece))])
        wanted = r.sequence.sampling.logprobs
        details = None
        if wanted is not None and emitted[-1] >= 0:
            details = token_logprobs(logits[part], emitted, wanted, decode)
        verdicts.append(Verdict(accepted, emitted, details))
    return verdicts


def _rules(rows: list[StepRows]) -> list[RowRules | None]:
    rules: list[RowRules | None] = []
    for r in rows:
        if r.sequence.history is None and r.sequence.grammar is None:
            rules += [None] * r.block.keep
        else:
            rules += [r.sequence.rules(r.draft[:i]) for i in range(r.block.keep)]
    return rules


def _coupled_choices(
    rows: list[StepRows], logits: torch.Tensor, pieces: Seq[torch.Tensor]
) -> Iterator[int]:
    """The target's token after every kept row that the rejection rule does not decide."""
    sampling: list[SamplingParams] = []
    seeds: list[int] = []
    positions: list[int] = []
    chosen: list[torch.Tensor] = []
    for r, piece in zip(rows, pieces, strict=True):
        if r.sequence.by_rejection or not len(piece):
            continue
        first = len(r.sequence.token_ids)
        sampling += [r.sequence.sampling] * len(piece)
        seeds += [r.sequence.seed] * len(piece)
        positions += range(first, first + len(piece))
        chosen.append(piece)
    if not chosen:
        return iter(())
    if len(positions) < len(logits):
        logits = torch.cat(chosen)
    return iter(choose_tokens(logits, sampling, seeds, positions))


def _by_rejection(rows: StepRows, logits: torch.Tensor) -> tuple[int, list[int]]:
    sequence = rows.sequence
    log_p = process_logits(logits, [sequence.sampling] * len(logits))
    drafter = sequence.drafter
    log_q = drafter.distributions(sequence.request_id) if drafter and rows.draft else None
    if log_q is not None:
        log_q = log_q[: len(rows.draft)]
    return verify_by_rejection(log_p, rows.draft, log_q, sequence.seed, len(sequence.token_ids))
