"""The rejection rule of speculative sampling (Leviathan et al. 2023; Chen et al. 2023).

A draft token x, drawn from q, is accepted with probability min(1, p(x) / q(x)); at the first
rejection a token is drawn from norm(max(0, p - q)), and after a fully accepted draft a bonus from
the last p. Every emitted token then follows p. A drafter that does not draw (n-gram, suffix) has
all its mass on its token: x is accepted with probability p(x), and the residual is p without x.

All randomness comes from the request's seed and the position, in streams of their own: the
draft's choice, the coin and the residual draw must be independent of each other.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from ssd_integrations.errors import EngineError
from ssd_workers.engine.noise import gumbel_noise, gumbel_noise_at

Stream = Literal["draft", "coin", "residual"]


def stream_seed(seed: int, stream: Stream) -> int:
    """A seed of its own for one kind of random number of a request: 63 bits."""
    digest = hashlib.blake2b(f"{stream}:{seed}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def verify_by_rejection(
    log_p: Tensor, draft: Sequence[int], log_q: Tensor | None, seed: int, first_position: int
) -> tuple[int, list[int]]:
    """Verify the draft of one sequence.

    Parameters:
      log_p: ``[K+1, vocab]`` processed log-probabilities of the target, up to a constant per row
        (see :func:`ssd_workers.engine.sampling.process_logits`); NaN where it broke down.
      draft: K token ids.
      log_q: ``[K, draft_vocab]`` the distributions that the draft was drawn from, alike; None for
        a drafter that does not draw.
      seed: the request's seed.
      first_position: the index of the first drafted token in its sequence.

    Returns: (number of accepted draft tokens, tokens to emit: the accepted ones and one more; that
      one is -1 where the target's row is not a number).

    Raises:
      EngineError: the lengths do not fit together.
    """
    if log_p.shape[0] != len(draft) + 1:
        raise EngineError(
            f"A draft of {len(draft)} tokens was verified with {log_p.shape[0]} rows; "
            f"{len(draft) + 1} are needed."
        )
    coin, residual = stream_seed(seed, "coin"), stream_seed(seed, "residual")
    for i, token in enumerate(draft):
        position = first_position + i
        p = _probabilities(log_p[i])
        if p is None:
            return i, [*draft[:i], -1]
        q = None if log_q is None else _probabilities(log_q[i])
        drafted = 1.0 if q is None else float(q[token])
        if _uniform(coin, position) * drafted < float(p[token]):
            continue
        return i, [*draft[:i], _draw(_residual(p, token, q), residual, position)]
    last = _probabilities(log_p[-1])
    if last is None:
        return len(draft), [*draft, -1]
    return len(draft), [*draft, _draw(last, residual, first_position + len(draft))]


def _probabilities(log_weights: Tensor) -> Tensor | None:
    """``[vocab]`` float64 summing to 1, or None for a row that is not a number."""
    if bool(log_weights.isnan().any()):
        return None
    return torch.softmax(log_weights.to(torch.float64), dim=0)


def _residual(p: Tensor, token: int, q: Tensor | None) -> Tensor:
    rest = p.clone()
    if q is None:
        rest[token] = 0.0
    else:
        shared = min(len(p), len(q))
        rest[:shared] = (p[:shared] - q[:shared]).clamp_min(0.0)
    # p and q may be equal but for rounding; then a rejection has no mass to fall on.
    return rest if float(rest.sum()) > 0.0 else p


def _draw(weights: Tensor, seed: int, position: int) -> int:
    noise = gumbel_noise(seed, position, len(weights), weights.device)
    return int((weights.log() + noise).argmax())


def _uniform(seed: int, position: int) -> float:
    """Uniform in (0, 1): the distribution function of the Gumbel law, at a Gumbel number."""
    gumbel = float(gumbel_noise_at(seed, position, torch.zeros(1, dtype=torch.int32))[0])
    return math.exp(-math.exp(-gumbel))
