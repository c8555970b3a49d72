"""From token ids to text, piece by piece, without ever splitting a character or a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ssd_integrations.errors import EngineError, InvalidRequestError

_REPLACEMENT = "\ufffd"
# A character has at most four bytes, so three tokens may pass before its text shows.
_MAX_PENDING = 3
# Tokens decoded together: cut to _WINDOW_KEPT when there are more than _WINDOW_MAX.
_WINDOW_MAX = 24
_WINDOW_KEPT = 12


@dataclass(frozen=True)
class TextDelta:
    """What one push added.

    ``token_ids`` are the pushed tokens that belong to the output: all of them, or those up to
    and including the one that completed a stop string. ``text`` may be behind them (an unfinished
    character, a possible beginning of a stop string); later deltas bring it.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    stopped: str | None = None

    @property
    def kept_tokens(self) -> int:
        """How many of the pushed tokens belong to the output."""
        return len(self.token_ids)


class TextStream:
    """Incremental detokenisation and stop strings for one request.

    Tokens are handled one at a time, so the text, the stop and the kept tokens do not depend on
    how many tokens a push brings. The deltas add up to what ``decode`` gives for all tokens at
    once, cut before the first stop string.

    *First* is the stop string that is complete first, reading character by character; of
    several that end at the same character, the longest. So generation can end at that very
    character, without waiting for a longer candidate. The stop string is not part of the text.

    A token costs one decode of about 24 tokens, now and then a few more, and time in proportion
    to its text.

    Parameters:
      decode: ids -> text. Special tokens are skipped there (and need not be filtered here);
        it must not tidy up spaces (``clean_up_tokenization_spaces=False``), and the text of a
        sequence may change under an appended token only where it ended in U+FFFD.
      stop: stop strings, none empty.
      prompt_ids_tail: the last few ids of the prompt (12 are used), as context: where a
        tokenizer drops the space before the first word of a text, the first word of the output
        keeps its own.

    Raises:
      InvalidRequestError: a stop string is empty.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        stop: Sequence[str] = (),
        prompt_ids_tail: Sequence[int] = (),
    ) -> None:
        self._detokenizer = _Detokenizer(decode, prompt_ids_tail[-_WINDOW_KEPT:])
        self._matcher = _StopMatcher(stop)
        self._parts: list[str] = []
        self._stopped: str | None = None

    @property
    def text(self) -> str:
        """Everything emitted so far."""
        return "".join(self._parts)

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the output."""
        return self._stopped

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """Take the next accepted tokens.

        Raises:
          EngineError: a stop string has already ended this output.
        """
        if self._stopped is not None:
            raise EngineError(f"Tokens were pushed after the stop string {self._stopped!r}.")
        texts = []
        kept = []
        for token_id in token_ids:
            kept.append(token_id)
            texts.append(self._match(self._detokenizer.push(token_id)))
            if self._stopped is not None:
                break
        return self._delta("".join(texts), kept)

    def finish(self) -> TextDelta:
        """Give out what was held back; an unfinished character becomes U+FFFD."""
        if self._stopped is not None:
            return TextDelta(stopped=self._stopped)
        text = self._match(self._detokenizer.flush())
        if self._stopped is None:
            text += self._matcher.flush()
        return self._delta(text, [])

    def _match(self, text: str) -> str:
        safe, self._stopped = self._matcher.push(text)
        return safe

    def _delta(self, text: str, token_ids: list[int]) -> TextDelta:
        if text:
            self._parts.append(text)
        return TextDelta(text, token_ids, self._stopped)


class _Detokenizer:
    """Decodes a sliding window of tokens and gives out what is new and final.

    ``_window`` are the last tokens, ``_decoded`` is their text, ``_given`` the beginning of it
    that has been given out. The window's own beginning may lie inside a character or lack a
    leading space: that spoils its first characters only, and those have been given out before.
    """

    def __init__(self, decode: Callable[[list[int]], str], context: Sequence[int]) -> None:
        self._decode = decode
        self._window = list(context)
        self._decoded = decode(self._window) if self._window else ""
        if not self._decoded or self._decoded.endswith(_REPLACEMENT):
            # A fragment of a character, or nothing visible: no use as context.
            self._window, self._decoded = [], ""
        self._given = self._decoded
        self._pending = 0  # tokens since the text last ended in a whole character

    def push(self, token_id: int) -> str:
        """Take one token; returns the text that is now final."""
        text = self._decode([*self._window, token_id])
        if text == self._decoded and not self._decode([token_id, token_id]):
            # A skipped special token: kept, a run of them would grow the window. (Doubled,
            # because a single space token at the start of a text may show nothing either.)
            return ""
        self._window.append(token_id)
        self._decoded = text
        pending = self._pending + 1
        if not text.startswith(self._given):
            self._restart(pending)
        self._pending = pending if self._decoded.endswith(_REPLACEMENT) else 0
        new = self._take(self._final_length())
        self._slide()
        return new

    def flush(self) -> str:
        """The rest, whatever it is."""
        return self._take(len(self._decoded))

    def _take(self, end: int) -> str:
        new = self._decoded[len(self._given) : end]
        self._given += new
        return new

    def _final_length(self) -> int:
        """How much of the window's text no further token can change."""
        length = len(self._decoded)
        whole = len(self._decoded.rstrip(_REPLACEMENT))
        if self._pending > _MAX_PENDING:
            # No character takes this long: all but the last bytes are invalid for good.
            return max(whole, length - _MAX_PENDING)
        return whole

    def _restart(self, tokens: int) -> None:
        """Decode the last ``tokens``, which have shown nothing yet, on their own.

        While the last character of a run of bytes is unfinished, a byte-fallback decoder shows
        the whole run as U+FFFD, also the characters that were given out. What is out stays.
        """
        self._window = self._window[-tokens:]
        self._decoded = self._decode(self._window)
        self._given = ""

    def _slide(self) -> None:
        """Forget the oldest tokens once there are many, if the end of the text stays the same."""
        if len(self._window) <= _WINDOW_MAX:
            return
        window = self._window[-_WINDOW_KEPT:]
        decoded = self._decode(window)
        given = len(decoded) - (len(self._decoded) - len(self._given))
        # One character that is out must match too, so that what is spoilt lies before it.
        if given >= 1 and decoded[given - 1 :] == self._decoded[len(self._given) - 1 :]:
            self._window, self._decoded, self._given = window, decoded, decoded[:given]


class _StopMatcher:
    """Finds stop strings in a stream of characters and holds back what may begin one."""

    def __init__(self, stop: Sequence[str]) -> None:
        if "" in stop:
            raise InvalidRequestError(
                "A stop string is empty.", remedy="Remove it, or give at least one character."
            )
        # Longest first: of those that end at one character, the first found is the longest.
        self._stops = sorted(set(stop), key=len, reverse=True)
        self._borders = [_border_lengths(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)  # characters of each stop string matched so far
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Take more text; returns the text that is safe to give out, and the stop string found."""
        if not self._stops:
            return text, None
        for end, character in enumerate(text, start=1):
            stop = self._advance(character)
            if stop is not None:
                seen = self._held + text[:end]
                self._held = ""
                return seen[: -len(stop)], stop
        seen = self._held + text
        safe = len(seen) - max(self._matched)
        self._held = seen[safe:]
        return seen[:safe], None

    def flush(self) -> str:
        """Give up waiting: the text that was held back."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> str | None:
        """Knuth-Morris-Pratt, all stop strings side by side."""
        found = None
        for i, (stop, borders) in enumerate(zip(self._stops, self._borders, strict=True)):
            matched = self._matched[i]
            while matched and stop[matched] != character:
                matched = borders[matched - 1]
            if stop[matched] == character:
                matched += 1
            if matched == len(stop):
                found = found or stop
                matched = borders[matched - 1]
            self._matched[i] = matched
        return found


def _border_lengths(pattern: str) -> list[int]:
    """For each prefix of ``pattern``, the length of its longest proper prefix that also ends it."""
    borders = [0] * len(pattern)
    length = 0
    for i in range(1, len(pattern)):
        while length and pattern[i] != pattern[length]:
            length = borders[length - 1]
        if pattern[i] == pattern[length]:
            length += 1
        borders[i] = length
    return borders
