"""Structured output and tool calls: which tokens may come next.

A grammar is a function of the tokens before a position: it gives the set of tokens with which
the text can still become a whole one. Logits outside it are masked before a token is chosen, so
the choice stays a function of model, seed and position, and drafts change nothing but the speed.

The parser is llguidance. It keeps one state per sequence; here that state looks ahead along a
draft, one mask for every place, and is rolled back to what was really put out.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from llguidance import LLMatcher
from torch import Tensor

from ssd_integrations.errors import (
    EngineError,
    IncompleteStructureError,
    InvalidStructureError,
    SSDError,
)
from ssd_integrations.protocol import FinishReason


class GrammarState:
    """Where one sequence stands in its grammar. Only the engine thread touches it.

    ``_ahead`` are tokens that the parser has read beyond the output, ``_masks[i]`` is the mask
    after the first i of them, one bit per token. An error of the parser ends this sequence alone,
    at the next :meth:`advance`; until then its rows are not masked.

    Parameters:
      matcher: the parser at the beginning of the output.
      end_token_ids: the tokens that end it.
      kind: what it is called in errors.
      may_be_cut: whether the token limit may end it anywhere.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        end_token_ids: Collection[int],
        kind: str,
        *,
        may_be_cut: bool = False,
    ) -> None:
        self._matcher = matcher
        self._end_token_ids = end_token_ids
        self._kind = kind
        self._may_be_cut = may_be_cut
        self._ahead: list[int] = []
        self._masks: list[bytes] = []
        self._error: SSDError | None = None
        self._num_forced = 0

    @property
    def num_forced(self) -> int:
        """How many tokens at the end of the last :meth:`fit` the grammar gave itself."""
        return self._num_forced

    def allowed(self, drafted: Sequence[int]) -> Tensor | None:
        """``[vocab]`` bool: which tokens may follow the output and ``drafted``.

        None if ``drafted`` cannot follow the output: what comes after it does not matter.
        """
        mask = self._mask_after(drafted)
        if mask is None:
            return None
        bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")
        return torch.from_numpy(bits.view(np.bool_))

    def fit(self, proposed: Sequence[int], limit: int, *, force: bool) -> list[int]:
        """A draft that the grammar allows: the beginning of ``proposed``, and what must follow.

        Parameters:
          proposed: what a drafter proposes.
          limit: the longest draft.
          force: go on with tokens that have no alternative, which the target cannot but accept.
        """
        draft: list[int] = []
        own = 0
        while len(draft) < limit:
            mask = self._mask_after(draft)
            if mask is None:
                break
            if own == len(draft) and own < len(proposed) and _has(mask, proposed[own]):
                token = proposed[own]
                own += 1
            else:
                forced = _only(mask) if force else None
                # The end needs no draft: the row before it chooses it.
                if forced is None or forced in self._end_token_ids:
                    break
                token = forced
            draft.append(token)
            if token in self._end_token_ids:
                break
        self._num_forced = len(draft) - own
        return draft

    def advance(self, tokens: Sequence[int], reason: FinishReason | None) -> FinishReason | None:
        """Take what was put out, and say why the output ends there, if it does.

        ``reason`` is what the engine found. An output at its token limit to which nothing can be
        added ends by itself ("stop").

        Raises:
          IncompleteStructureError: the limit comes before the grammar's end.
          InvalidStructureError: the parser gave up.
        """
        body = tokens[:-1] if tokens and tokens[-1] in self._end_token_ids else tokens
        if self._error is None:
            self._look_ahead(body)
        if self._error is None and len(self._ahead) > len(body):
            self._rewind(len(body))
        if self._error is not None:
            raise self._error
        if self._ahead != list(body):
            raise EngineError(f"The grammar does not allow the tokens {list(body)} that came out.")
        self._ahead, self._masks = [], self._masks[len(body) :]
        if reason != "length":
            return reason
        if not self._matcher.is_accepting():
            if self._may_be_cut:
                return reason
            raise IncompleteStructureError(
                f"The token limit was reached before the answer was a complete {self._kind}."
            )
        return "stop" if self._is_over() else reason

    def _is_over(self) -> bool:
        mask = self._mask_after([])
        ends = sum(_has(mask, token) for token in self._end_token_ids) if mask else 0
        return mask is not None and int.from_bytes(mask, "little").bit_count() == ends

    def _mask_after(self, drafted: Sequence[int]) -> bytes | None:
        if not self._look_ahead(drafted):
            return None
        if len(drafted) < len(self._masks):
            return self._masks[len(drafted)]
        return self._newest_mask()

    def _look_ahead(self, drafted: Sequence[int]) -> bool:
        """Read ``drafted``, from where it parts from what was read; False where it is not allowed.

        What was read beyond it stays, and its masks with it.
        """
        common = 0
        for read, wanted in zip(self._ahead, drafted, strict=False):
            if read != wanted:
                break
            common += 1
        if common < len(drafted):
            self._rewind(common)
            for token in drafted[common:]:
                if not self._read(token):
                    return False
        return self._error is None

    def _read(self, token: int) -> bool:
        mask = self._newest_mask()
        # The parser never recovers from a token that it does not allow, so it does not see one;
        # nor the end, which it does not count as a token when rolled back.
        if mask is None or token in self._end_token_ids or not _has(mask, token):
            return False
        if not self._matcher.consume_token(token):
            self._give_up()
            return False
        self._ahead.append(token)
        return True

    def _rewind(self, length: int) -> None:
        surplus = len(self._ahead) - length
        if surplus > 0 and not self._matcher.rollback(surplus):
            self._give_up()
        del self._ahead[length:]
        del self._masks[length + 1 :]

    def _newest_mask(self) -> bytes | None:
        """The mask after all that was read."""
        if self._error is None and len(self._masks) == len(self._ahead):
            mask = self._matcher.compute_bitmask()
            if self._matcher.is_error():
                self._give_up()
            else:
                self._masks.append(mask)
        return None if self._error else self._masks[len(self._ahead)]

    def _give_up(self) -> None:
        self._error = InvalidStructureError(
            f"The {self._kind} could not be followed further: {reason(self._matcher)}.",
            remedy="Simplify it: no text that satisfies it continues this one, or it is too large.",
        )


def reason(matcher: LLMatcher) -> str:
    """What the parser says is wrong, in one line of at most 300 characters."""
    text = " ".join(matcher.get_error().removesuffix("<non-verbose/>").split()).rstrip(".")
    return text if len(text) <= 300 else text[:297] + "..."


def _has(mask: bytes, token: int) -> bool:
    return token >> 3 < len(mask) and bool(mask[token >> 3] >> (token & 7) & 1)


def _only(mask: bytes) -> int | None:
    """The token that ``mask`` allows, if it is just one."""
    bits = int.from_bytes(mask, "little")
    return bits.bit_length() - 1 if bits.bit_count() == 1 else None
