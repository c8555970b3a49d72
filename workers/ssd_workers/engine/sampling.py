"""From logits to tokens: temperature, top-k, top-p, min-p, and drafter-invariant sampling.

The token at a position is ``argmax(processed logits + Gumbel noise)``, where the noise depends
only on (seed, position, token id). That is an exact draw from the processed distribution, and a
deterministic one: see :mod:`ssd_workers.engine.verification` for what it buys.

The knobs apply in this order: temperature, top-k, top-p, min-p.

- *top-k* keeps the tokens whose logit is at least the k-th largest.
- *top-p* keeps, of what top-k left (renormalised), the most probable tokens up to and including
  the one that brings their mass to ``top_p``.
- *min-p* keeps the tokens with at least ``min_p`` times the probability of the best one.

Each is a cut-off on the logit, so tokens of equal logit stay or go together and the result does
not depend on how a sort breaks ties. A row's result depends on that row alone, bit for bit:
across rows there is only elementwise work and selection; sums are taken row by row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ssd_integrations.errors import EngineError
from ssd_integrations.protocol import SamplingParams
from ssd_workers.engine.noise import (
    NOISE_MAX,
    NOISE_MIN,
    gumbel_noise_at,
    gumbel_noise_rows,
)

_INF = float("inf")
# Below this a temperature is the limit T -> 0 in float32 already; smaller ones would divide by 0.
_MIN_TEMPERATURE = 1e-20
# A token further than this below the best one loses whatever the noise; the slack covers rounding.
_REACH = NOISE_MAX - NOISE_MIN + 0.01
# From this size on a CPU does better to pick the tokens that can win before making their noise.
_LARGE_VOCAB = 4096


def process_logits(
    logits: Tensor, params: Sequence[SamplingParams], *, valid_vocab: int | None = None
) -> Tensor:
    """The distributions that tokens are drawn from.

    Parameters:
      logits: ``[rows, vocab]``, any float type; not changed.
      params: one per row. Temperature 0 gives all mass to the best token (lowest id on a tie).
      valid_vocab: ids from here on are padding of the output layer and excluded.

    Returns: ``[rows, vocab]`` float32 log-probabilities, up to one constant per row (the best
      token has 0), -inf for what is excluded; all NaN for a row without a finite maximum.

    Raises:
      EngineError: shapes do not fit together.
    """
    valid = _checked(logits, params, valid_vocab)
    out = torch.full(logits.shape, -_INF, device=logits.device, dtype=torch.float32)
    best, best_ids = valid.max(dim=-1)
    finite = best.isfinite().tolist()
    for row, param in enumerate(params):
        if not finite[row]:
            out[row] = float("nan")
        elif param.temperature == 0.0:
            out[row, int(best_ids[row])] = 0.0
        else:
            x = _scaled(valid[row], best[row], param.temperature)
            kept = x >= _cutoff(x, param)
            out[row, : x.shape[0]] = x.masked_fill_(~kept, -_INF)
    return out


def choose_tokens(
    logits: Tensor,
    params: Sequence[SamplingParams],
    seeds: Sequence[int],
    positions: Sequence[int],
    *,
    valid_vocab: int | None = None,
) -> list[int]:
    """The target's token for every row.

    Parameters:
      logits: ``[rows, vocab]``, any float type; not changed.
      params: one per row. Temperature 0 takes the largest logit, the lowest id on a tie.
      seeds: one per row, the request's; greedy rows ignore it.
      positions: one per row, the index (prompt included) of the token being chosen. The same
        (seed, position) always gets the same noise, so a position must not be used twice for
        different tokens of a request.
      valid_vocab: ids from here on are padding of the output layer and never chosen.

    Returns: one token id per row; -1 for a row whose logits contain NaN or whose maximum is
      infinite (a model that has broken down; the other rows are not affected).

    Raises:
      EngineError: shapes do not fit together.
    """
    valid = _checked(logits, params, valid_vocab)
    if not len(seeds) == len(positions) == len(params):
        raise EngineError(
            f"{len(params)} rows came with {len(seeds)} seeds and {len(positions)} positions."
        )
    # max returns the first of equal maxima, and NaN if there is one.
    best, best_ids = valid.max(dim=-1)
    tokens: list[int] = best_ids.masked_fill(~best.isfinite(), -1).tolist()
    drawn = [row for row, p in enumerate(params) if p.temperature > 0.0 and tokens[row] >= 0]
    if not drawn:
        return tokens
    by_row = logits.device.type == "cpu" and valid.shape[1] >= _LARGE_VOCAB
    draw = _draw_by_row if by_row else _draw_together
    ids = draw(
        valid[drawn],
        best[drawn],
        [params[row] for row in drawn],
        [seeds[row] for row in drawn],
        [positions[row] for row in drawn],
    )
    for row, token in zip(drawn, ids, strict=True):
        tokens[row] = token
    return tokens


def _draw_by_row(
    logits: Tensor,
    best: Tensor,
    params: Sequence[SamplingParams],
    seeds: Sequence[int],
    positions: Sequence[int],
) -> list[int]:
    """Noise only for the tokens that can win: on a CPU the noise of all is the dear part."""
    ids = []
    for row, param in enumerate(params):
        x = _scaled(logits[row], best[row], param.temperature)
        rivals = (x >= max(_cutoff(x, param), -_REACH)).nonzero().squeeze(1)
        scores = gumbel_noise_at(seeds[row], positions[row], rivals.to(torch.int32))
        winner = scores.add_(x[rivals]).max(dim=0).indices
        ids.append(int(rivals[winner]))
    return ids


def _draw_together(
    logits: Tensor,
    best: Tensor,
    params: Sequence[SamplingParams],
    seeds: Sequence[int],
    positions: Sequence[int],
) -> list[int]:
    """The same tokens with few operations: what counts on a GPU and for a small vocabulary."""
    device = logits.device
    temperatures = [max(param.temperature, _MIN_TEMPERATURE) for param in params]
    scale = torch.tensor(temperatures, device=device).unsqueeze(1)
    x = logits.to(torch.float32).sub(best.to(torch.float32).unsqueeze(1)).div_(scale)
    cutoffs = [_cutoff(x[row], param) for row, param in enumerate(params)]
    excluded = x < torch.tensor(cutoffs, device=device).unsqueeze(1)
    x.add_(gumbel_noise_rows(seeds, positions, x.shape[1], device))
    ids: list[int] = x.masked_fill_(excluded, -_INF).max(dim=-1).indices.tolist()
    return ids


def _checked(logits: Tensor, params: Sequence[SamplingParams], valid_vocab: int | None) -> Tensor:
    """The part of ``logits`` that holds real tokens."""
    if logits.dim() != 2 or logits.shape[0] != len(params):
        raise EngineError(f"Logits of shape {list(logits.shape)} came with {len(params)} rows.")
    if valid_vocab is None:
        return logits
    if not 0 < valid_vocab <= logits.shape[1]:
        raise EngineError(f"{valid_vocab} valid tokens do not fit {logits.shape[1]} logits.")
    return logits[:, :valid_vocab]


def _scaled(logits: Tensor, best: Tensor, temperature: float) -> Tensor:
    """``[vocab]`` logits over temperature, the best token at 0.

    Subtracting the maximum first keeps a tiny temperature from overflowing.
    """
    x = logits.to(torch.float32) - best.to(torch.float32)
    return x.div_(max(temperature, _MIN_TEMPERATURE))


def _cutoff(x: Tensor, param: SamplingParams) -> float:
    """The smallest entry of ``x`` (``[vocab]``, maximum 0) that top-k, top-p and min-p keep."""
    cutoff = -_INF
    if 0 < param.top_k < x.shape[0]:
        cutoff = float(x.topk(param.top_k).values[-1])
    if param.top_p < 1.0:
        cutoff = max(cutoff, _nucleus_cutoff(x, cutoff, param.top_p))
    if param.min_p > 0.0:
        cutoff = max(cutoff, math.log(param.min_p))
    return cutoff


def _nucleus_cutoff(x: Tensor, floor: float, top_p: float) -> float:
    """The smallest entry in the top-p nucleus of the entries of ``x`` that are >= ``floor``.

    Sorting a whole vocabulary costs milliseconds, and the nucleus is almost always among the
    few tokens near the best one: look there first, then wider.
    """
    if floor > -_INF:
        x = x[x >= floor]
    needed = top_p * float(x.to(torch.float64).exp_().sum())
    for depth in (-8.0, -16.0, -_INF):
        near = x[x >= depth]
        if float(near.to(torch.float64).exp_().sum()) >= needed:
            break
    order = near.sort(descending=True).values
    cumulative = order.to(torch.float64).exp_().cumsum(0)
    # Rounding may leave the whole sum a hair below what is needed: then everything stays.
    last = min(int((cumulative < needed).sum()), len(order) - 1)
    return float(order[last])
