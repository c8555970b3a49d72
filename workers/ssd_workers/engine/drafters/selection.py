"""Which drafter a request gets."""

from __future__ import annotations

from ssd_integrations.errors import InvalidRequestError
from ssd_integrations.protocol import SpeculationMode
from ssd_workers.engine.drafters.base import Drafter
from ssd_workers.engine.drafters.hybrid import HybridDrafter
from ssd_workers.engine.drafters.model import ModelDrafter
from ssd_workers.engine.drafters.ngram import NgramDrafter
from ssd_workers.engine.drafters.suffix import SuffixDrafter
from ssd_workers.engine.drafters.suffix_store import SuffixStore, store_fingerprint
from ssd_workers.engine.loading import LoadedModel
from ssd_workers.engine.vocabulary import token_ids


class DrafterSelection:
    """The drafters of one engine; requests of the same mode share one.

    Parameters:
      target: the loaded target model.
      draft: the loaded draft model, if there is one.
      suffix_store: a file that keeps the suffix drafter's memory between starts.
    """

    def __init__(
        self, target: LoadedModel, draft: LoadedModel | None, suffix_store: str | None
    ) -> None:
        self._ngram = NgramDrafter()
        self._suffix = SuffixDrafter(store=_open_store(target, suffix_store))
        self._model = None
        if draft is not None:
            self._model = ModelDrafter(
                draft.runner,
                draft.context_length,
                target.vocab_size,
                token_ids(target.tokenizer),
            )
        self._hybrid = HybridDrafter(self._suffix, model=self._model, ngram=self._ngram)

    def pick(self, mode: SpeculationMode) -> Drafter | None:
        """The drafter for ``mode``, None for ``off``.

        ``auto`` is the hybrid: the suffix drafter's memory costs nothing, and what it does not
        know is left to the draft model if one is loaded, else to n-grams.

        Raises:
          InvalidRequestError: the mode needs a draft model and none is loaded.
        """
        if mode == "model" and self._model is None:
            raise InvalidRequestError(
                "speculation='model' needs a draft model, and none is loaded.",
                remedy="Give draft_model= (a worker: --draft-model), or use 'hybrid' or 'auto'.",
            )
        drafters: dict[SpeculationMode, Drafter | None] = {
            "off": None,
            "ngram": self._ngram,
            "suffix": self._suffix,
            "model": self._model,
            "hybrid": self._hybrid,
            "auto": self._hybrid,
        }
        return drafters[mode]

    def close(self) -> None:
        """Write what the suffix drafter still holds back for its store."""
        self._suffix.close()


def _open_store(target: LoadedModel, path: str | None) -> SuffixStore | None:
    if path is None:
        return None
    fingerprint = store_fingerprint(target.fingerprint, target.tokenizer.get_vocab())
    return SuffixStore(path, fingerprint, vocab_size=target.vocab_size)
