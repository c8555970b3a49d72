"""The ways of decoding that can be compared, and what each needs."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ssd_integrations.errors import InvalidRequestError
from ssd_integrations.extras import require_extra
from ssd_integrations.protocol import build_speculation

Runtime = Literal["transformers", "llama-cpp", "engine"]

_LLAMA_PACKAGE = "xllamacpp"


@dataclass(frozen=True)
class Mode:
    """One way of decoding.

    ``speculation`` is the protocol's mode for our engine; ``float32`` loads a second engine of
    ours without quantisation; ``lookup`` is a runtime's own draftless speculation.
    """

    name: str
    runtime: Runtime
    speculation: str = "off"
    lookup: bool = False
    needs_draft_model: bool = False
    float32: bool = False

    @property
    def remembers(self) -> bool:
        """Whether its drafts come from earlier answers too."""
        return self.speculation in ("suffix", "hybrid")

    @property
    def is_ours(self) -> bool:
        """Whether this project's engine decodes, so that its text is exact."""
        return self.runtime == "engine"


_ALL = (
    Mode("transformers", "transformers"),
    Mode("transformers-prompt-lookup", "transformers", lookup=True),
    Mode("transformers-assisted", "transformers", needs_draft_model=True),
    Mode("llama-cpp", "llama-cpp"),
    Mode("llama-cpp-lookup", "llama-cpp", lookup=True),
    Mode("ar-float32", "engine", float32=True),
    Mode("ar", "engine"),
    Mode("ngram", "engine", "ngram"),
    Mode("suffix", "engine", "suffix"),
    Mode("model", "engine", "model", needs_draft_model=True),
    Mode("hybrid", "engine", "hybrid"),
    Mode("auto", "engine", "auto"),
)
MODES = {mode.name: mode for mode in _ALL}

# The speed-up is the ratio to the first of these that takes part.
REFERENCES = ("transformers", "ar")


def parse_modes(names: str, *, draft_model: str | None) -> list[Mode]:
    """The modes of a comma-separated list, if all of them can run here.

    Raises:
      InvalidRequestError: a name is unknown or given twice, a mode needs a draft model, or this
        release's engine does not know a way of drafting.
      MissingExtraError: a mode needs a package that is not installed.
    """
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if not wanted:
        raise InvalidRequestError("No modes are given.", remedy=_known())
    modes = [_mode(name) for name in wanted]
    for name in wanted:
        if wanted.count(name) > 1:
            raise InvalidRequestError(f"The mode {name!r} is given twice.")
    _check_needs(modes, draft_model)
    return modes


def _mode(name: str) -> Mode:
    if name in MODES:
        return MODES[name]
    close = difflib.get_close_matches(name, MODES, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise InvalidRequestError(f"There is no mode {name!r}.{hint}", remedy=_known())


def _known() -> str:
    return f"The modes are {', '.join(MODES)}."


def _check_needs(modes: Sequence[Mode], draft_model: str | None) -> None:
    for mode in modes:
        if mode.is_ours:
            build_speculation(mode=mode.speculation)
        if mode.needs_draft_model and draft_model is None:
            raise InvalidRequestError(
                f"The mode {mode.name!r} needs a draft model.",
                remedy="Add --draft-model NAME, or leave the mode out.",
            )
        if mode.runtime == "llama-cpp":
            require_extra(f"The mode {mode.name!r}", "bench", _LLAMA_PACKAGE)
