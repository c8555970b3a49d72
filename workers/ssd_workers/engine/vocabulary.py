"""Tokenizers, and whether those of a target and its draft model go together."""

from __future__ import annotations

from typing import Any

from transformers import AutoTokenizer

from ssd_integrations.errors import DraftModelMismatchError, ModelLoadError
from ssd_workers.models.store import ModelSource

_UNKNOWN_AT_MOST = 0.1


def load_tokenizer(source: ModelSource) -> Any:
    """The tokenizer of ``source``.

    Raises:
      ModelLoadError: its files are damaged or missing.
    """
    try:
        return AutoTokenizer.from_pretrained(source.path, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ModelLoadError(
            f"The tokenizer of model {source.name!r} cannot be loaded: {error}"
        ) from error


def token_ids(tokenizer: Any) -> frozenset[int]:
    """Every id that ``tokenizer`` has a token for; a model may have logits for more (padding)."""
    return frozenset(tokenizer.get_vocab().values())


def check_same_tokenizer(target: ModelSource, draft: ModelSource) -> None:
    """See that the tokens which both tokenizers know have the same ids.

    Either may have some that the other does not have: text with a token that only the target has
    gets no draft from its place on, or a worse one, and what only the draft model has is never
    drafted.

    Raises:
      DraftModelMismatchError: a token has another id, an id another token, or the draft model does
        not know a tenth of the target's tokens.
    """
    ours = load_tokenizer(target).get_vocab()
    theirs = load_tokenizer(draft).get_vocab()
    by_id = {index: token for token, index in theirs.items()}
    differing = sorted(
        (t for t, i in ours.items() if theirs.get(t, i) != i or by_id.get(i, t) != t),
        key=lambda token: ours[token],
    )
    unknown = sum(token not in theirs for token in ours)
    if not differing and unknown <= len(ours) * _UNKNOWN_AT_MOST:
        return
    reason = (
        f"{len(differing)} of them differ, first at {differing[0]!r}"
        if differing
        else f"{unknown} of the latter are missing"
    )
    raise DraftModelMismatchError(
        f"Draft model {draft.name!r} has another tokenizer than model {target.name!r}: "
        f"{len(theirs)} tokens against {len(ours)}, {reason}."
    )
