"""Random load on an engine in this process, and what must hold under it.

    python benchmarks/random_load.py --minutes 60 [--model PATH] [--draft-model PATH] [--seed 0]

Phases of 1 to 20 clients send random requests: lengths, sampling options, drafters, cancellations,
clients that leave, deadlines. When a phase is over, the engine is idle, and then

* nothing may be left of any request: no row, no cache, no drafter's state;
* a sample of the texts is decoded again without drafts, alone, and must be the same. Only where
  the best two tokens are within 1e-3 (float32) may they part;
* the memory that belongs to this process alone (USS) is read. Once the first quarter of the run is
  over, it must stay flat: the growth of a line through the samples (Theil-Sen, robust against
  single ones) may be ``--max-growth-mib`` at most, or the samples were too few to tell.

The C library gives each of several threads a heap of its own, and oneDNN keeps a kernel for each
shape that it has met. Both fill up over many minutes, by some 30 MiB, and then stay, which would
hide a leak; so on Linux this program starts itself anew with one heap and few kernels.

Without --model a small random model is built. Ends with a report and exit code 1 if there were
faults.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import gc
import json
import os
import random
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, field
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch

from benchmarks.gpu_models import QUICK, build_models
from benchmarks.load_clients import Client, Sample
from benchmarks.load_inspection import leftovers, limit_suffix_memory, parts_at_a_tie
from benchmarks.load_requests import CaseMaker
from ssd_integrations.backends import local
from ssd_integrations.backends.local import LocalBackend
from ssd_integrations.protocol import DeltaEvent, SpeculationMode
from ssd_workers.engine.service import EngineService

MAX_CLIENTS = 20
SUFFIX_TOKENS = 5_000
"""The suffix drafter's memory is made so small that it is full soon, and then has to forget."""
STUCK_S = 300.0
STEADY_MEMORY = {"MALLOC_ARENA_MAX": "1", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16"}
MIN_SAMPLES = 10
MIN_SPAN_S = 60.0


@dataclass
class Report:
    """What came of a run. ``memory`` holds (seconds, USS in MiB) at the end of each phase."""

    seed: int
    seconds: float = 0.0
    phases: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    texts_compared: int = 0
    texts_that_part_at_a_tie: int = 0
    memory: list[tuple[float, float]] = field(default_factory=list)
    growth_mib: float | None = None
    faults: list[str] = field(default_factory=list)


class Load:
    """One run.

    Parameters:
      backend: the engine; made for this run.
      has_draft: whether it has a draft model.
      seed: of everything that is random here.
      check_texts: how many texts of each phase are decoded again.
    """

    def __init__(
        self, backend: LocalBackend, *, has_draft: bool, seed: int, check_texts: int
    ) -> None:
        self._backend = backend
        self._rng = random.Random(seed)
        self._check_texts = check_texts
        self._info = backend.models()[0]
        service = local._engines.running(backend._config)
        assert service is not None
        self.service: EngineService = service
        limit_suffix_memory(service, SUFFIX_TOKENS)
        self._modes: list[SpeculationMode] = ["off", "ngram", "suffix", "hybrid", "auto"]
        if has_draft:
            self._modes.append("model")
        self.report = Report(seed)

    def run(self, seconds: float) -> Report:
        """Phases until ``seconds`` are over."""
        started = time.monotonic()
        report = self.report
        while (elapsed := time.monotonic() - started) < seconds:
            self._phase(min(self._rng.uniform(2.0, 8.0), seconds - elapsed))
            report.phases += 1
            report.memory.append((time.monotonic() - started, _uss_mib()))
            report.seconds = time.monotonic() - started
            if report.phases % 20 == 0:
                _say(report)
        measured = [m for m in report.memory if m[0] > seconds / 4]
        report.growth_mib = growth(measured)
        return report

    def _phase(self, seconds: float) -> None:
        count = self._rng.randint(1, MAX_CLIENTS)
        clients = [
            Client(
                self._backend,
                CaseMaker(self._info, self._modes, random.Random(self._rng.random())),
                time.monotonic() + seconds,
            )
            for _ in range(count)
        ]
        threads = [threading.Thread(target=client.run, daemon=True) for client in clients]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + seconds + STUCK_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                faulthandler.dump_traceback()
                raise TimeoutError(f"a client was stuck for {STUCK_S:g} s; see the traces above")
        outcomes = self.report.outcomes
        samples: list[Sample] = []
        for client in clients:
            for outcome, number in client.outcomes.items():
                outcomes[outcome] = outcomes.get(outcome, 0) + number
            self.report.tokens += client.tokens
            self.report.faults += client.faults
            samples += client.samples
        self._check_idle()
        for sample in self._rng.sample(samples, min(self._check_texts, len(samples))):
            self._check_text(sample)

    def _check_idle(self) -> None:
        deadline = time.monotonic() + STUCK_S
        # Requests that were left are cancelled at the engine's next step.
        while self.service._live and time.monotonic() < deadline:
            time.sleep(0.01)
        for what, count in leftovers(self.service).items():
            self.report.faults.append(f"phase {self.report.phases}: {count} {what} left when idle")

    def _check_text(self, sample: Sample) -> None:
        request = sample.request
        plain = request.model_copy(
            update={
                "request_id": f"plain-{self.report.texts_compared}",
                # Some kept a short deadline; without drafts it may be too short.
                "timeout_s": None,
                "queue_timeout_s": STUCK_S,
                "speculation": request.speculation.model_copy(update={"mode": "off"}),
            }
        )
        tokens: list[int] = []
        for event in self._backend.generate(plain):
            if isinstance(event, DeltaEvent):
                tokens += event.token_ids
        self.report.texts_compared += 1
        if tokens == sample.tokens:
            return
        gap = parts_at_a_tie(self.service, plain, tokens, sample.tokens)
        if gap is None:
            self.report.texts_that_part_at_a_tie += 1
        else:
            self.report.faults.append(f"{gap}; the request: {request.to_json()}")


def growth(memory: list[tuple[float, float]]) -> float | None:
    """MiB that a Theil-Sen line through (seconds, MiB) grows; None if there is too little."""
    if len(memory) < MIN_SAMPLES or memory[-1][0] - memory[0][0] < MIN_SPAN_S:
        return None
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(memory, 2) if b[0] > a[0]]
    return median(slopes) * (memory[-1][0] - memory[0][0])


def _uss_mib() -> float:
    gc.collect()
    # What was freed but not given back is no leak, and would only be noise.
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
    return float(psutil.Process().memory_full_info().uss) / 2**20


def _say(report: Report) -> None:
    requests = sum(report.outcomes.values())
    print(
        f"{report.seconds:6.0f} s  {requests} requests, {report.tokens} tokens, "
        f"{report.texts_compared} texts compared, {report.memory[-1][1]:.1f} MiB, "
        f"{len(report.faults)} faults",
        flush=True,
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Random load on an engine in this process.")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--model", help="default: a small random one is built")
    parser.add_argument("--draft-model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--attention", default="packed", choices=["packed", "sdpa"])
    parser.add_argument("--step", default="eager", choices=["eager", "static", "graphs", "compile"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check-texts", type=int, default=10, help="texts compared in each phase")
    parser.add_argument("--max-growth-mib", type=float, default=6.0)
    parser.add_argument("--json", type=Path, help="write the report to this file")
    return parser.parse_args()


def main() -> int:
    """Run the load; the exit code."""
    args = _arguments()
    if sys.platform == "linux" and not STEADY_MEMORY.keys() <= os.environ.keys():
        # Both are read when the process starts. What the user has set stays.
        environment = {**STEADY_MEMORY, **os.environ}
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
    with tempfile.TemporaryDirectory(prefix="ssd-load-") as folder:
        model, draft = args.model, args.draft_model
        if model is None:
            model, draft = map(str, build_models(Path(folder), QUICK, torch.float32, "cpu"))
        options: dict[str, Any] = {"draft_model": draft} if draft else {}
        backend = LocalBackend(
            model=model, dtype=args.dtype, device=args.device, attn_implementation=args.attention,
            decode_step=args.step, max_model_len=512, prefix_cache_mib=1, **options,
        )  # fmt: skip
        try:
            load = Load(
                backend, has_draft=draft is not None, seed=args.seed, check_texts=args.check_texts
            )
            report = load.run(args.minutes * 60)
        finally:
            backend.close()
    if report.growth_mib is not None and report.growth_mib > args.max_growth_mib:
        report.faults.append(
            f"memory grew by {report.growth_mib:.1f} MiB; {args.max_growth_mib:g} are allowed"
        )
    _say(report)
    for outcome, count in sorted(report.outcomes.items()):
        print(f"  {outcome}: {count}")
    grown = "too short to tell" if report.growth_mib is None else f"{report.growth_mib:+.1f} MiB"
    print(f"memory after the first quarter: {grown}; "
          f"{report.texts_that_part_at_a_tie} texts part at a tie")  # fmt: skip
    for fault in report.faults[:50]:
        print(f"FAULT {fault}")
    if args.json:
        args.json.write_text(json.dumps(asdict(report), indent=2) + "\n")
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
