"""How many rows of prompts to read in a step."""

from __future__ import annotations

STEP_ROWS = 256
"""Rows of a step that reads prompts, the decoding ones included. The int8 products of one more
would cost as much as 200 more, a block of the library's kernel; larger steps gain nothing."""

_ROWS_APART = 512  # where prompts are read apart from decoding rows

# Of the step beside it; the rest is for what a forecast misses.
_SHARE = 0.9
# Nobody waits for a token: large chunks, but a request that comes is looked at every second or so.
_ALONE_SECONDS = 1.0
_LEAST_ALONE = 64
# However dear rows are, a prompt gets on.
_LEAST_BESIDE = 4
# The same where drafts fill the step.
_LEAST_ROOM = 64
# Products of few rows are bound by reading weights; the rows of a chunk are dearer than those.
_FIRST_GUESS = 2.0
# A chunk dearer than this many times what was expected was held up by something else.
_LONGEST = 4.0
_WEIGHT = 0.5


class PromptPace:
    """Chunks of prompts that at most double a step, by what their rows have cost so far.

    Parameters:
      per_row: seconds of a further row in a decoding step, to begin with.
      joined: whether prompts are read in the same forward as decoding rows. Where steps of fixed
        shapes give way to ordinary ones while a prompt is read, there should be few of those.
    """

    def __init__(self, per_row: float, *, joined: bool = True) -> None:
        self._per_row = _FIRST_GUESS * per_row
        self._joined = joined

    def rows(self, decode_seconds: float, decode_rows: int = 0) -> int:
        """Rows for the next step over all prompts.

        Parameters:
          decode_seconds: what the step takes without them; 0 if nobody is decoding.
          decode_rows: rows that the step has already.
        """
        if not self._joined:
            return _ROWS_APART
        least = _LEAST_BESIDE if decode_seconds else _LEAST_ALONE
        wanted = (_SHARE * decode_seconds or _ALONE_SECONDS) / self._per_row
        return int(min(max(wanted, least), max(STEP_ROWS - decode_rows, _LEAST_ROOM)))

    def observe(self, rows: int, seconds: float) -> None:
        """Learn from a step in which ``rows`` rows of prompts took ``seconds`` more."""
        each = min(max(seconds / rows, self._per_row / _LONGEST), self._per_row * _LONGEST)
        self._per_row += _WEIGHT * (each - self._per_row)
