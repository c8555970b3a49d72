"""A look into an idle engine, for benchmarks/random_load.py. It reads what is private on purpose:
what must not be there cannot be seen from outside."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import torch

from ssd_integrations.protocol import GenerationRequest
from ssd_workers.engine.drafters.suffix_tree import SuffixTree
from ssd_workers.engine.kv_cache import GrowingCache
from ssd_workers.engine.logit_rules import TokenHistory, adjust_logits
from ssd_workers.engine.noise import gumbel_noise
from ssd_workers.engine.runner import RowBlock
from ssd_workers.engine.sampling import process_logits
from ssd_workers.engine.sequence import Sequence
from ssd_workers.engine.service import EngineService
from ssd_workers.engine.slots import SlotCache

NEAR_TIE = 1e-3
# Nothing of these outlives its request, wherever a reference may hide.
_KINDS = (Sequence, GrowingCache, SlotCache, TokenHistory, SuffixTree)


def limit_suffix_memory(service: EngineService, max_tokens: int) -> None:
    """Let the suffix drafter remember ``max_tokens`` tokens of finished requests only."""
    _drafters(service)._suffix._max_tokens = max_tokens


def leftovers(service: EngineService) -> dict[str, int]:
    """What an idle engine still holds of its requests, by kind; empty if nothing."""
    engine, drafters = service._engine, _drafters(service)
    assert engine is not None
    suffix = drafters._suffix
    held = {
        "sequences": len(engine.sequences),
        "live requests": len(service._live),
        "acceptance rates": len(engine._budget._rates),
        "idle counters": len(engine._budget._idle_steps),
        "n-gram indexes": len(drafters._ngram._indexes),
        "suffix trees": len(suffix._running),
        "hybrid drafts": len(drafters._hybrid._given),
        "draft caches": 0 if drafters._model is None else len(drafters._model._states),
        "suffix tokens too many": max(0, suffix._finished.num_tokens - suffix._max_tokens),
    }
    gc.collect()
    # Not isinstance: it would ask proxies of other libraries for their class.
    kinds = Counter(kind.__name__ for thing in gc.get_objects() if (kind := type(thing)) in _KINDS)
    kinds[SuffixTree.__name__] -= 1  # the one of finished requests
    held |= {f"objects of type {kind}": count for kind, count in kinds.items()}
    return {what: count for what, count in held.items() if count > 0}


@torch.inference_mode()
def parts_at_a_tie(
    service: EngineService, request: GenerationRequest, plain: list[int], other: list[int]
) -> str | None:
    """None if two answers to ``request`` part where the two tokens are as good; else what is wrong.

    Only while the engine is idle: the model is run from here.
    """
    at = next((i for i, (a, b) in enumerate(zip(plain, other, strict=False)) if a != b), None)
    if at is None:
        return f"one text goes on after {min(len(plain), len(other))} equal tokens"
    engine, builder = service._engine, service._builder
    assert engine is not None
    assert builder is not None
    sequence = builder.build(request, lambda _: None)
    sequence.extend(plain[:at])
    runner = engine._target.runner
    logits = runner.forward([RowBlock(runner.new_cache(), sequence.token_ids, 1)])
    logits = adjust_logits(logits, [sequence.rules([])])
    tolerance = NEAR_TIE
    if request.sampling.temperature:
        position = len(sequence.token_ids)
        scores = process_logits(logits, [request.sampling])[0]
        scores = scores + gumbel_noise(sequence.seed, position, len(scores), scores.device)
        tolerance /= request.sampling.temperature
    else:
        scores = logits[0].float()
    gap = abs(float(scores[plain[at]] - scores[other[at]]))
    if gap <= tolerance:
        return None
    return f"the texts part at token {at} ({plain[at]} or {other[at]}), {gap:.4g} apart"


def _drafters(service: EngineService) -> Any:
    assert service._builder is not None
    return service._builder._drafters
