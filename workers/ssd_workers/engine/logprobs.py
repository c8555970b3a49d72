"""Log-probabilities of emitted tokens and their best alternatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ssd_integrations.protocol import TokenLogprob


def token_logprobs(
    logits: Tensor, tokens: Sequence[int], num_top: int, decode: Callable[[list[int]], str]
) -> tuple[TokenLogprob, ...]:
    """One entry for each of ``tokens``, from the model's own logits.

    Parameters:
      logits: ``[rows, vocab]``, at least one row for each token; row i chose token i.
      tokens: emitted token ids.
      num_top: how many of the best alternatives to list.
      decode: ids to text.
    """

    def entry(token: int, logprob: float, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
        return TokenLogprob(
            token_id=token, token=decode([token]), logprob=min(logprob, 0.0), top=top
        )

    found = []
    for row, token in zip(logits, tokens, strict=False):
        # Row by row: the sum over the vocabulary must not depend on the rows beside it.
        scores = torch.log_softmax(row.to(torch.float32), dim=0)
        values, ids = torch.topk(scores, num_top)
        top = tuple(
            entry(best, value)
            for best, value in zip(ids.tolist(), values.tolist(), strict=True)
            if value > -torch.inf
        )
        found.append(entry(token, float(scores[token]), top))
    return tuple(found)
