"""What may stand before a call and between calls, each as a whole and as the beginning of it."""

from __future__ import annotations

import re

# Blanks are bounded, so that what is held back is, and as much is looked at whatever its pieces.
FENCE = re.compile(r"```(?:json|tool_calls?)?[ \t]{0,16}\r?\n\s{0,64}(?=[{[])", re.IGNORECASE)
PARTIAL_FENCE = re.compile(r"```[a-z_]{0,10}[ \t]{0,16}\r?(?:\n\s{0,64})?\Z", re.IGNORECASE)
# A name before its arguments: `get_weather[ARGS]{`, also with an id between, or nothing.
NAMED = re.compile(
    r"([A-Za-z0-9_.-]{1,64})(?:\[CALL_ID\][A-Za-z0-9]{0,64})?(?:\[ARGS\])?\s{0,16}(?=\{)"
)
PARTIAL_NAMED = re.compile(r"[A-Za-z0-9_.-]{0,64}(?:\[[][A-Za-z0-9_]{0,80})?\s{0,16}\Z")
NEXT_IN_LIST = (re.compile(r",\s{0,64}(?=\{)"), re.compile(r",\s{0,64}\Z"))
NEXT = (re.compile(r"[;,]\s{0,64}(?=\{)"), re.compile(r"[;,]\s{0,64}\Z"))
