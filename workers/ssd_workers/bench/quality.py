"""What quantisation costs: perplexity and greedy agreement against float32 on held-out text."""

from __future__ import annotations

import gc
import json
import math
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import torch

from ssd_integrations.errors import InvalidRequestError
from ssd_workers.engine.config import DType
from ssd_workers.engine.loading import LoadedModel, load_model
from ssd_workers.engine.runner import RowBlock
from ssd_workers.models.store import ModelSource, resolve_model
from ssd_workers.progress import Progress, no_progress

_HELD_OUT = "held_out.json"
# Rows of logits that exist at a time; a row is as wide as the vocabulary.
_ROWS = 64


@dataclass(frozen=True)
class Scores:
    """What a model says about one text: nats and its own first choice at every position."""

    nats: list[float]
    choices: list[int]


def held_out_texts() -> dict[str, str]:
    """Language to text; written for this purpose, so no model has been trained on them."""
    source = files("ssd_workers.bench").joinpath("data", _HELD_OUT)
    texts: dict[str, str] = json.loads(source.read_text(encoding="utf-8"))
    return texts


def compare_quality(
    model: str, dtype: DType = "auto", device: str = "auto", *, progress: Progress = no_progress
) -> dict[str, Any]:
    """Perplexities of ``model`` in float32 and in ``dtype``, and how often both choose alike.

    The two are loaded one after the other.

    Raises:
      InvalidRequestError: ``dtype`` is float32 itself on this machine.
      SSDError: the model cannot be found or loaded.
    """
    source = resolve_model(model, progress=progress)
    chosen, scores = _score(source, dtype, device, progress)
    if chosen == "float32":
        raise InvalidRequestError(
            f"--quality compares a dtype with float32, and model {model!r} runs in float32 here.",
            remedy="Add --dtype int8, or leave --quality out.",
        )
    _, exact = _score(source, "float32", device, progress)
    languages = {name: _compare(scores[name], exact[name]) for name in scores}
    return {
        "dtype": chosen,
        **_compare(_joined(scores), _joined(exact)),
        "languages": languages,
    }


@torch.inference_mode()
def score(model: LoadedModel, text: str) -> Scores:
    """Teacher-forced scores of ``text``, from its second token on."""
    ids = list(model.tokenizer(text, add_special_tokens=False)["input_ids"])
    ids = ids[: model.context_length]
    cache = model.runner.new_cache(len(ids))
    nats: list[float] = []
    choices: list[int] = []
    for start in range(0, len(ids) - 1, _ROWS):
        rows = ids[start : min(start + _ROWS, len(ids) - 1)]
        logits = model.runner.forward([RowBlock(cache, rows, len(rows))]).float()
        following = torch.tensor(ids[start + 1 : start + 1 + len(rows)], device=logits.device)
        nats += torch.nn.functional.cross_entropy(logits, following, reduction="none").tolist()
        choices += logits.argmax(dim=-1).tolist()
    return Scores(nats, choices)


def _score(
    source: ModelSource, dtype: DType, device: str, progress: Progress
) -> tuple[str, dict[str, Scores]]:
    model = load_model(source, dtype, device, progress)
    texts = held_out_texts()
    scores = {}
    for done, (language, text) in enumerate(texts.items()):
        progress(f"held-out text in {model.dtype}", done, len(texts), "texts")
        scores[language] = score(model, text)
    progress(f"held-out text in {model.dtype}", len(texts), len(texts), "texts")
    chosen = model.dtype
    # Room for the next model, which may be as large as memory allows.
    del model
    gc.collect()
    return chosen, scores


def _joined(scores: dict[str, Scores]) -> Scores:
    return Scores(
        [value for item in scores.values() for value in item.nats],
        [value for item in scores.values() for value in item.choices],
    )


def _compare(scores: Scores, exact: Scores) -> dict[str, float | int]:
    positions = len(exact.choices)
    alike = sum(a == b for a, b in zip(scores.choices, exact.choices, strict=True))
    return {
        "positions": positions,
        "perplexity": _perplexity(scores),
        "perplexity_float32": _perplexity(exact),
        "perplexity_ratio": _perplexity(scores) / _perplexity(exact),
        "greedy_agreement": alike / positions,
    }


def _perplexity(scores: Scores) -> float:
    return math.exp(sum(scores.nats) / len(scores.nats))
