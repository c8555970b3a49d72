"""Random models, prompts, drafts and batches with joins and cancellations: the text stays the same.

int8 without any exception. ``SSD_STRESS_SEEDS=40`` runs more of it.
"""

from __future__ import annotations

import os
import queue
import random
import time
from pathlib import Path
from typing import Any

import pytest

from ssd_integrations.protocol import (
    DeltaEvent,
    FinishedEvent,
    GenerationRequest,
    build_request,
    build_sampling,
    build_speculation,
    is_terminal,
)
from ssd_workers.engine.config import EngineConfig
from ssd_workers.engine.int8 import cpu_is_exact
from ssd_workers.engine.service import EngineService
from tests.tiny import ARCHITECTURES, make_tiny_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not cpu_is_exact(), reason="this processor has no exact int8 products"),
]

SEEDS = range(int(os.environ.get("SSD_STRESS_SEEDS", "6")))
MODES = ("off", "ngram", "suffix", "model", "hybrid")
WORDS = ("router", "restart", "the cable", "revenue", "안녕", "🙂", " x", "\n", "123")


def shape(rng: random.Random, arch: str) -> dict[str, Any]:
    """Odd widths, head counts and windows of a small model."""
    heads, head_dim = rng.choice([2, 3, 4, 6]), rng.choice([8, 12, 16, 20, 32])
    inner = rng.choice([50, 77, 128, 130, 1100])
    if arch == "gpt2":
        return {
            "n_embd": heads * head_dim, "n_layer": rng.randint(1, 3), "n_head": heads,
            "n_positions": 4096, "n_inner": inner,
        }  # fmt: skip
    found = {
        "hidden_size": heads * rng.choice([12, 20]),
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": rng.choice([n for n in (1, 2, 3, heads) if heads % n == 0]),
        "head_dim": head_dim,
        "max_position_embeddings": 4096,
    }
    if arch == "gemma3":
        found["sliding_window"] = rng.choice([4, 63, 64, 65, 100, 300])
    return found


def text(rng: random.Random) -> str:
    """A prompt of up to several chunks of the prefill, repetitive or not."""
    size = rng.choice([1, 10, 60, 130, 260])
    phrase = [rng.choice(WORDS) for _ in range(rng.randint(1, 6))]
    chosen = phrase * size if rng.random() < 0.5 else [rng.choice(WORDS) for _ in range(size)]
    return " ".join(chosen)[:1200]


def sampling(rng: random.Random) -> dict[str, Any]:
    found: dict[str, Any] = {"max_tokens": rng.choice([1, 10, 80, 130])}
    if rng.random() < 0.5:
        found |= {"temperature": rng.choice([0.8, 1.5]), "seed": rng.randrange(10**9)}
        found |= {"top_p": rng.choice([1, 0.9]), "top_k": rng.choice([0, 50])}
    if rng.random() < 0.3:
        found["stop"] = (rng.choice("ethR"), rng.choice(["ou", "세", "."]))
    return found


class Running:
    """A request in flight."""

    def __init__(self, service: EngineService, request: GenerationRequest) -> None:
        self.request = request
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        service.submit(request, self._events.put)

    def outcome(self) -> tuple[object, ...]:
        """Token ids, text, and why it ended."""
        ids: list[int] = []
        while not is_terminal(event := self._events.get(timeout=120)):
            if isinstance(event, DeltaEvent):
                ids += event.token_ids
        assert isinstance(event, FinishedEvent), event
        assert event.usage.completion_tokens == len(ids)
        return ids, event.text, event.finish_reason, event.stop_sequence


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_text_is_the_same_however_it_is_decoded(
    arch: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSD_CACHE_DIR", str(tmp_path / "cache"))
    rng = random.Random(f"{arch} {seed}")
    model = str(make_tiny_model(tmp_path / "target", arch, seed=seed, **shape(rng, arch)))
    draft = str(make_tiny_model(tmp_path / "draft", "llama", seed=seed, **shape(rng, "llama")))
    config = EngineConfig(
        model=model, draft_model=draft, dtype="int8", max_num_seqs=rng.choice([1, 2, 5, 20]),
        num_threads=rng.choice([1, 2, 3]),
    )  # fmt: skip

    def request(prompt: str, options: dict[str, Any], mode: str, longest: int) -> GenerationRequest:
        return build_request(
            model=model,
            prompt=prompt,
            sampling=build_sampling(**options),
            # Tiny models are too fast for drafts to pay: draft in full all the same.
            speculation=build_speculation(mode=mode, num_draft_tokens=longest, adaptive=False),
        )

    with EngineService(config) as service:
        jobs = [(text(rng), sampling(rng)) for _ in range(8)]
        alone = [Running(service, request(*job, "off", 1)).outcome() for job in jobs]
        together = []
        for job in jobs:
            mode, longest = rng.choice(MODES), rng.choice([1, 3, 8, 33, 64])
            together.append(Running(service, request(*job, mode, longest)))
            if rng.random() < 0.5:
                leaver = Running(service, request(text(rng), {"max_tokens": 200}, mode, longest))
                time.sleep(rng.random() * 0.02)
                service.cancel(leaver.request.request_id)
        assert [running.outcome() for running in together] == alone
        assert service.drain(30)
        assert service._engine is not None
        assert not service._engine.sequences
        builder = service._builder
        assert builder is not None
        drafters = builder._drafters
        assert drafters._model is not None
        assert not drafters._ngram._indexes
        assert not drafters._model._states
        assert not drafters._suffix._running
        assert not drafters._hybrid._given
