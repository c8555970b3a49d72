"""Requests for benchmarks/gpu_check.py, on an engine with models of its own."""

from __future__ import annotations

import argparse
import queue
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import torch

from benchmarks.gpu_models import Size, build_models
from ssd_integrations.protocol import (
    DeltaEvent,
    Event,
    FailedEvent,
    FinishedEvent,
    GenerationRequest,
    SamplingParams,
    SpeculationMode,
    SpeculationParams,
    is_terminal,
)
from ssd_workers.engine.config import AttnImplementation, DecodeStep, DType, build_engine_config
from ssd_workers.engine.loading import LoadedModel, load_model
from ssd_workers.engine.service import EngineService
from ssd_workers.models.store import resolve_model
from ssd_workers.progress import no_progress

BATCH = 8


@dataclass
class Answer:
    """What came of one request."""

    tokens: list[int] = field(default_factory=list)
    first_at: float = 0.0
    last_at: float = 0.0
    finished: FinishedEvent | None = None


class Bench:
    """One run: an engine for the requests, and the same target alone, in eager steps, for what is
    under it."""

    def __init__(self, args: argparse.Namespace, size: Size, folder: Path) -> None:
        self.size = size
        self.attention = cast(AttnImplementation, args.attention)
        self.step = cast(DecodeStep, args.step)
        dtype = args.dtype or ("float32" if args.device == "cpu" else "bfloat16")
        target, draft = build_models(folder, size, getattr(torch, dtype), args.device)
        self.name = str(target)
        self.target: LoadedModel = load_model(
            resolve_model(self.name), cast(DType, dtype), args.device, no_progress,
            attention=self.attention,
        )  # fmt: skip
        config = build_engine_config(
            model=self.name,
            draft_model=str(draft),
            dtype=dtype,
            device=args.device,
            max_num_seqs=BATCH,
            attn_implementation=self.attention,
            decode_step=self.step,
            prefix_cache_mib=0,  # every run reads its prompts
        )
        self.service = EngineService(config)
        self.service.start()
        generator = torch.Generator().manual_seed(1)
        # Ragged, and across a block of 64 keys.
        self.prompts = [
            torch.randint(1, size.vocab, (size.prompt_tokens - 7 * i,), generator=generator)
            for i in range(BATCH)
        ]

    def run(
        self, indexes: list[int], mode: SpeculationMode, sampling: SamplingParams, *, adaptive: bool
    ) -> list[Answer]:
        """Decode the prompts ``indexes`` together."""
        events: queue.SimpleQueue[tuple[float, Event]] = queue.SimpleQueue()
        answers: dict[str, Answer] = {}
        for i in indexes:
            request = GenerationRequest(
                model=self.name,
                prompt=" ".join(f"w{token}" for token in self.prompts[i].tolist()),
                sampling=sampling.model_copy(
                    update={"seed": i, "max_tokens": self.size.new_tokens}
                ),
                speculation=SpeculationParams(mode=mode, adaptive=adaptive),
            )
            answers[request.request_id] = Answer()
            self.service.submit(request, lambda event: events.put((time.perf_counter(), event)))
        left = len(indexes)
        while left:
            at, event = events.get()
            answer = answers[event.request_id]
            if isinstance(event, FailedEvent):
                raise event.error.to_error()
            if isinstance(event, DeltaEvent) and event.token_ids:
                answer.first_at = answer.first_at or at
                answer.last_at = at
                answer.tokens.extend(event.token_ids)
            if isinstance(event, FinishedEvent):
                answer.finished = event
            left -= is_terminal(event)
        return list(answers.values())

    def close(self) -> None:
        """Stop the engine."""
        self.service.close()
