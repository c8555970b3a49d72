"""Which drafted tokens stand, given what the target chose. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ssd_integrations.errors import EngineError


def accept_drafts(draft: Sequence[int], chosen: Sequence[int]) -> tuple[int, list[int]]:
    """Compare a draft of K tokens with the target's K + 1 choices.

    The target is run once over the rows ``[t*, x1 .. xK]``: the last accepted token and the
    draft. ``chosen[i]`` is the token that the target takes after row i, by
    :func:`ssd_workers.engine.sampling.choose_tokens`. That function is deterministic: given the
    tokens before a position, the request's seed and the position, there is one token that plain
    autoregressive decoding would emit there (the argmax when greedy; the argmax of log p + noise
    when sampling, which is an exact draw from p because the noise is). Row i saw exactly the
    tokens that autoregressive decoding would have seen as long as x1 .. xi all equal the target's
    own choices. So a draft token stands exactly if it *is* the target's choice, whatever proposed
    it; the first unequal one is replaced by the choice, and after a fully accepted draft the
    choice of the last row is a bonus. No draft probabilities are needed and no second random
    number is drawn: accepting or redrawing by some other coin would spoil the law.

    Parameters:
      draft: K token ids, K >= 0 (no draft gives plain decoding).
      chosen: K + 1 token ids; -1 where the row's logits were not numbers. A -1 in the tokens to
        emit can only be the last one, and means that the request fails there.

    Returns: (number of accepted draft tokens, tokens to emit: the accepted ones and one more).

    Raises:
      EngineError: the lengths do not fit together.
    """
    if len(chosen) != len(draft) + 1:
        raise EngineError(
            f"A draft of {len(draft)} tokens was verified with {len(chosen)} choices; "
            f"{len(draft) + 1} are needed."
        )
    accepted = 0
    while accepted < len(draft) and draft[accepted] == chosen[accepted]:
        accepted += 1
    return accepted, list(chosen[: accepted + 1])
