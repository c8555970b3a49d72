"""Prompt lookup: what followed the last few tokens the last time they occurred."""

from __future__ import annotations

from collections.abc import Sequence

from ssd_integrations.errors import InvalidRequestError
from ssd_workers.engine.drafters.base import CopyingDrafter, DraftView

# Token ids are packed into one integer key; this many bits each hold any vocabulary.
_ID_BITS = 32


class NgramDrafter(CopyingDrafter):
    """Drafts by copying from the sequence itself; needs no model.

    The longest n-gram (``max_n`` down to ``min_n`` tokens) that ends the sequence and occurred
    before is found, its most recent occurrence is taken, and what followed is proposed. A copy
    that reaches the end of the sequence goes on with its own tokens, so a repeating pattern is
    continued for as long as asked.

    Every sequence has an index from n-gram to the place after its latest occurrence, extended
    by the new tokens at each call: a call costs O(new tokens), whatever the length. Memory is
    about 100 bytes per token and n-gram size, until :meth:`forget`.

    A short match is weak evidence, and a draft that fails costs rows of the next verification.
    So a match of n < ``max_n`` tokens proposes at most ``per_match`` * n; a match of ``max_n``
    proposes as many as asked.

    Parameters:
      max_n: longest n-gram looked up, at least ``min_n``.
      min_n: shortest n-gram looked up, at least 1.
      per_match: tokens proposed per matched token, at least 1.

    Raises:
      InvalidRequestError: the sizes are out of order.
    """

    name = "ngram"

    def __init__(self, *, max_n: int = 4, min_n: int = 1, per_match: int = 2) -> None:
        if not 1 <= min_n <= max_n:
            raise InvalidRequestError(
                f"n-gram sizes min_n={min_n} and max_n={max_n} are out of order.",
                remedy="Give 1 <= min_n <= max_n.",
            )
        if per_match < 1:
            raise InvalidRequestError(
                f"per_match={per_match} proposes nothing.", remedy="Give at least 1."
            )
        self._max_n = max_n
        self._min_n = min_n
        self._per_match = per_match
        self._indexes: dict[str, _Index] = {}

    def propose(self, sequences: Sequence[DraftView], max_tokens: Sequence[int]) -> list[list[int]]:
        """Draft at most ``max_tokens[i]`` tokens for ``sequences[i]``."""
        return [
            self._propose_one(sequence, limit)
            for sequence, limit in zip(sequences, max_tokens, strict=True)
        ]

    def forget(self, request_id: str) -> None:
        """Free the index of a request; unknown ids are fine."""
        self._indexes.pop(request_id, None)

    def _propose_one(self, sequence: DraftView, limit: int) -> list[int]:
        if limit <= 0:
            return []
        index = self._indexes.get(sequence.request_id)
        if index is None or index.length > len(sequence.token_ids):
            index = _Index(self._min_n, self._max_n)
            self._indexes[sequence.request_id] = index
        found = index.find(sequence.token_ids)
        if found is None:
            return []
        start, n = found
        if n < self._max_n:
            limit = min(limit, self._per_match * n)
        return _copy_from(sequence.token_ids, start, limit)


class _Index:
    """For each n-gram size, n-gram -> the position after its latest occurrence."""

    def __init__(self, min_n: int, max_n: int) -> None:
        self._min_n = min_n
        self._after: list[dict[int, int]] = [{} for _ in range(min_n, max_n + 1)]
        self.length = 0

    def find(self, tokens: list[int]) -> tuple[int, int] | None:
        """Where what followed the longest known suffix of ``tokens`` begins, and its length."""
        # The n-gram at the very end is not entered: it would be found as its own occurrence.
        for end in range(max(self.length, 1), len(tokens)):
            for key, table in zip(self._keys(tokens, end), self._after, strict=False):
                table[key] = end
        self.length = len(tokens)
        keys = self._keys(tokens, len(tokens))
        for i in range(len(keys) - 1, -1, -1):
            start = self._after[i].get(keys[i])
            if start is not None:
                return start, self._min_n + i
        return None

    def _keys(self, tokens: list[int], end: int) -> list[int]:
        """Keys of the n-grams that end before ``end``, shortest first; fewer near the start."""
        longest = min(self._min_n + len(self._after) - 1, end)
        key = 0
        keys = []
        for n in range(1, longest + 1):
            key |= tokens[end - n] << (_ID_BITS * (n - 1))
            if n >= self._min_n:
                keys.append(key)
        return keys


def _copy_from(tokens: list[int], start: int, limit: int) -> list[int]:
    copied = tokens[start : start + limit]
    period = len(tokens) - start
    while len(copied) < limit:
        copied.append(copied[len(copied) - period])
    return copied
