"""What changes logits before a token is chosen: penalties, bias, min_tokens and a grammar.

Each row is changed on its own and only at the ids that a rule names, so the others keep their
bits. A row in the middle of a draft sees the drafted tokens before it as if they stood already.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ssd_integrations.protocol import SamplingParams


class TokenHistory:
    """Which tokens a sequence holds: all of them once, those of the output with their counts."""

    def __init__(self, prompt: Iterable[int]) -> None:
        self.seen = set(prompt)
        self.output_counts: Counter[int] = Counter()

    @property
    def num_output(self) -> int:
        """How many tokens were put out."""
        return self.output_counts.total()

    def extend(self, tokens: Iterable[int]) -> None:
        """Add accepted output tokens."""
        new = list(tokens)
        self.seen.update(new)
        self.output_counts.update(new)


@dataclass(frozen=True)
class RowRules:
    """What applies to one row of logits: the request's rules and the tokens before the row.

    Without a ``history`` the rules of ``sampling`` change nothing. ``allowed`` is ``[vocab]`` bool,
    the tokens that a grammar allows; None without one.
    """

    sampling: SamplingParams
    history: TokenHistory | None
    end_token_ids: Collection[int] = ()
    drafted: Sequence[int] = field(default=())
    allowed: Tensor | None = None


def has_rules(sampling: SamplingParams) -> bool:
    """Whether logits of this request are changed at all."""
    return bool(
        sampling.repetition_penalty != 1.0
        or sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
        or sampling.logit_bias
        or sampling.min_tokens
    )


def adjust_logits(logits: Tensor, rules: Sequence[RowRules | None]) -> Tensor:
    """``[rows, vocab]`` logits with each row's rules applied; the argument is not changed.

    The order is repetition, frequency and presence penalty, bias, min_tokens, grammar.
    """
    if all(rule is None for rule in rules):
        return logits
    adjusted = logits.to(torch.float32, copy=True)
    for row, rule in zip(adjusted, rules, strict=True):
        if rule is None:
            continue
        if rule.history is not None:
            _adjust_row(row, rule, rule.history)
        if rule.allowed is not None:
            _mask_row(row, rule.allowed)
    return adjusted


def _mask_row(row: Tensor, allowed: Tensor) -> None:
    # A draft model may have fewer tokens than the grammar knows, or padding that it does not know.
    known = min(len(row), len(allowed))
    row[known:] = -torch.inf
    row[:known].masked_fill_(~allowed[:known].to(row.device), -torch.inf)


def _adjust_row(row: Tensor, rule: RowRules, history: TokenHistory) -> None:
    sampling = rule.sampling
    if sampling.repetition_penalty != 1.0:
        ids = _ids(sorted(history.seen.union(rule.drafted)), row)
        values = row[ids]
        penalty = sampling.repetition_penalty
        row[ids] = torch.where(values > 0, values / penalty, values * penalty)
    if sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0:
        counts = history.output_counts
        if rule.drafted:
            counts = counts + Counter(rule.drafted)
        if counts:
            ids = _ids(list(counts), row)
            times = torch.tensor(list(counts.values()), dtype=row.dtype, device=row.device)
            row[ids] -= sampling.frequency_penalty * times + sampling.presence_penalty
    if sampling.logit_bias:
        # A draft model may have fewer tokens than the target, whose ids these are.
        known = {token: bias for token, bias in sampling.logit_bias.items() if token < len(row)}
        ids = _ids(list(known), row)
        bias = list(known.values())
        row[ids] += torch.tensor(bias, dtype=row.dtype, device=row.device)
    if history.num_output + len(rule.drafted) < sampling.min_tokens and rule.end_token_ids:
        row[_ids([token for token in rule.end_token_ids if token < len(row)], row)] = -torch.inf


def _ids(token_ids: list[int], row: Tensor) -> Tensor:
    return torch.tensor(token_ids, dtype=torch.long, device=row.device)
