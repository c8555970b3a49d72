"""Exactness and speed of speculation on a device, with models of its own; see gpu.sh.

    bash benchmarks/gpu.sh [--device cuda] [--quick] [--attention packed|sdpa]
                           [--step eager|static|graphs|compile] [--json FILE]

First every request is decoded without drafts, alone; then with both drafters, alone and in a batch
of eight. The tokens must be the same. Where they are not, the speculative text is fed through the
model token by token, and each of its tokens must be the best one there up to the rounding of the
precision (TIE). The plain text of steps of fixed shapes (--step) is checked that way too, by eager
steps. Then the modes take turns to be timed. Ends with a table, a line of JSON, and exit code 1 if
a text was not exact.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers

from benchmarks.gpu_models import FULL, QUICK, Size
from benchmarks.gpu_requests import BATCH, Answer, Bench
from ssd_integrations.protocol import SamplingParams, SpeculationMode
from ssd_workers.engine.config import AttnImplementation, DecodeStep
from ssd_workers.engine.fixed_runner import make_runner
from ssd_workers.engine.noise import gumbel_noise
from ssd_workers.engine.runner import ModelRunner, RowBlock

MODES: tuple[SpeculationMode, ...] = ("off", "ngram", "model")
GREEDY = SamplingParams()
SEEDED = SamplingParams(temperature=0.8)


def tie_tolerance(dtype: str, best: float) -> float:
    """How far below the best logit another may be and still be taken for it.

    bfloat16 has 8 significant bits and float16 has 11: a few units in the last place of the best
    logit, since every layer rounds. float32: 1e-3, as everywhere in this project.
    """
    units = {"bfloat16": 2.0**-5, "float16": 2.0**-8}
    return units[dtype] * max(abs(best), 1.0) if dtype in units else 1e-3


class Check(Bench):
    """Whether texts are exact, and how fast they are."""

    def __init__(self, args: argparse.Namespace, size: Size, folder: Path) -> None:
        super().__init__(args, size, folder)
        self.differences = 0
        self.near_ties = 0
        self.widest_tie = 0.0  # of what is allowed
        self.compared = 0
        self.faults: list[str] = []
        self.full_drafts: dict[str, float] = {}

    def run_each(self, mode: SpeculationMode, sampling: SamplingParams) -> list[Answer]:
        """Every prompt alone, with drafts of full length."""
        return [self.run([i], mode, sampling, adaptive=False)[0] for i in range(BATCH)]

    def check_exactness(self) -> None:
        """Compare every way to decode with the plain one; fills ``faults``."""
        for sampling in (GREEDY, SEEDED):
            plain = self.run_each("off", sampling)
            if self.step != "eager" and sampling is GREEDY:
                for i, answer in enumerate(plain):
                    if fault := self._replay(i, answer.tokens, sampling):
                        self.faults.append(f"plain {self.step} steps, prompt {i}: {fault}")
            for mode in MODES:
                batch = self.run(list(range(BATCH)), mode, sampling, adaptive=False)
                self._compare(f"{mode}, batch {BATCH}", sampling, plain, batch)
                if mode != "off":
                    alone = self.run_each(mode, sampling)
                    if sampling is GREEDY:
                        self.full_drafts[mode] = _acceptance([alone])
                    self._compare(f"{mode}, batch 1", sampling, plain, alone)

    def _compare(
        self, what: str, sampling: SamplingParams, plain: list[Answer], other: list[Answer]
    ) -> None:
        for i, (expected, got) in enumerate(zip(plain, other, strict=True)):
            self.compared += len(got.tokens)
            if got.tokens == expected.tokens:
                continue
            self.differences += 1
            if len(got.tokens) != len(expected.tokens):
                self.faults.append(f"{what}, prompt {i}: {len(got.tokens)} tokens")
                continue
            fault = self._replay(i, got.tokens, sampling)
            if fault:
                self.faults.append(f"{what}, T={sampling.temperature:g}, prompt {i}: {fault}")

    @torch.inference_mode()
    def _replay(self, index: int, tokens: list[int], sampling: SamplingParams) -> str | None:
        """Feed ``tokens`` one by one: the first that is not the best up to rounding, or None."""
        runner, prompt = self.target.runner, self.prompts[index].tolist()
        cache = runner.new_cache(len(prompt) + len(tokens))
        logits = runner.forward([RowBlock(cache, prompt, 1)])[0]
        for at, token in enumerate(tokens):
            scores = logits.float()
            tolerance = tie_tolerance(self.target.dtype, float(scores.max()))
            if sampling.temperature:
                noise = gumbel_noise(index, len(prompt) + at, len(scores), scores.device)
                scores = scores / sampling.temperature + noise
                tolerance /= sampling.temperature
            gap = float(scores.max() - scores[token])
            self.near_ties += gap > 0
            self.widest_tie = max(self.widest_tie, gap / tolerance)
            if gap > tolerance:
                return f"token {at} is {gap:.4f} below the best, {tolerance:.4f} is allowed"
            logits = runner.forward([RowBlock(cache, [token], 1)])[0]
        return None

    def rates(self) -> dict[str, dict[str, float]]:
        """Tokens per second after the first ones, by mode and batch; medians of the rounds."""
        measured: dict[str, list[float]] = {}
        accepted: dict[str, list[float]] = {}
        for _ in range(self.size.rounds):
            for mode in MODES:
                for batch in (1, BATCH):
                    groups = [[0], [1]] if batch == 1 else [list(range(BATCH))]
                    answers = [self.run(g, mode, GREEDY, adaptive=True) for g in groups]
                    key = f"{mode}, batch {batch}"
                    measured.setdefault(key, []).append(_rate(answers))
                    accepted.setdefault(key, []).append(_acceptance(answers))
        return {
            key: {
                "tokens_per_second": median(values),
                "speedup": median(values) / median(measured[f"off, {key.split(', ')[1]}"]),
                "mean_acceptance_length": median(accepted[key]),
            }
            for key, values in measured.items()
        }

    def forwards(self) -> dict[str, dict[str, float]]:
        """Milliseconds of a forward of one and of nine rows, by kind of step and context."""
        found = {}
        kinds: list[tuple[str, AttnImplementation, DecodeStep]] = [
            ("eager, packed", "packed", "eager"),
            ("eager, sdpa", "sdpa", "eager"),
            ("static", "packed", "static"),
        ]
        # A compilation for each of the shapes would take longer than all the rest.
        if self.target.device.type == "cuda":
            kinds.append(("graphs", "packed", "graphs"))
        for name, attention, step in kinds:
            runner = make_runner(self.target.runner.model, self.target.device, attention, step, 1)
            for context in self.size.contexts:
                seconds = {rows: _forward_seconds(runner, context, rows) for rows in (1, 9)}
                found[f"{name}, context {context}"] = {
                    "one_row_ms": 1e3 * seconds[1],
                    "nine_rows_ms": 1e3 * seconds[9],
                    "ratio": seconds[9] / seconds[1],
                }
        return found


def _rate(groups: list[list[Answer]]) -> float:
    tokens = sum(len(answer.tokens) - 1 for group in groups for answer in group)
    seconds = sum(max(a.last_at for a in g) - min(a.first_at for a in g) for g in groups)
    return tokens / max(seconds, 1e-9)


def _acceptance(groups: list[list[Answer]]) -> float:
    found = [answer.finished for group in groups for answer in group]
    return sum(f.speculation.mean_acceptance_length for f in found if f) / len(found)


def _forward_seconds(runner: ModelRunner, context: int, rows: int) -> float:
    cache = runner.new_cache(context + rows)
    for start in range(0, context, 256):
        runner.forward([RowBlock(cache, [1] * min(256, context - start), 0)])
    seconds = []
    for _ in range(12):
        runner.synchronize()
        started = time.perf_counter()
        runner.forward([RowBlock(cache, [1] * rows, rows)])
        runner.synchronize()
        seconds.append(time.perf_counter() - started)
        cache.truncate(context)
    return median(seconds[2:])


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def _table(title: str, rows: dict[str, dict[str, float]]) -> str:
    columns = list(next(iter(rows.values())))
    lines = [f"{title:32}" + "".join(f"{name:>24}" for name in columns)]
    for name, values in rows.items():
        lines.append(f"{name:32}" + "".join(f"{values[column]:24.2f}" for column in columns))
    return "\n".join(lines)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Exactness and speed of speculation on a device.")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, cpu... (default cuda)")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--attention", choices=["packed", "sdpa"], default="packed")
    parser.add_argument("--step", choices=["eager", "static", "graphs", "compile"], default="eager")
    parser.add_argument("--quick", action="store_true", help="a tiny model, for trying this out")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser.parse_args()


def main() -> int:
    """Run everything; the exit code."""
    args, started = _arguments(), time.monotonic()
    size = QUICK if args.quick else FULL
    with tempfile.TemporaryDirectory(prefix="ssd-gpu-") as folder:
        check = Check(args, size, Path(folder))
        try:
            built = time.monotonic() - started
            check.check_exactness()
            checked = time.monotonic() - started
            rates, forwards = check.rates(), check.forwards()
        finally:
            check.close()
    device = check.target.device
    parameters = check.target.runner.model.num_parameters()
    report: dict[str, Any] = {
        "device": _device_name(device),
        "dtype": check.target.dtype,
        "attention": check.attention,
        "decode_step": check.step,
        "parameters": parameters,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "exact": not check.faults,
        "tokens_compared": check.compared,
        "texts_that_part_at_a_tie": check.differences - len(check.faults),
        "near_ties_taken": check.near_ties,
        "widest_tie_of_allowed": check.widest_tie,
        "faults": check.faults,
        "acceptance_length_of_full_drafts": check.full_drafts,
        "modes": rates,
        "forwards": forwards,
        "seconds": {"build": built, "exactness": checked - built,
                    "total": time.monotonic() - started},
    }  # fmt: skip
    kind = (
        f"{report['dtype']}, attention {report['attention']}, {check.step} steps, "
        f"torch {report['torch']}"
    )
    print(f"{report['device']}, {parameters / 1e6:,.0f} M random weights, {kind}\n")
    print(_table("mode", rates), "\n")
    print(_table("forward", forwards), "\n")
    for mode, length in check.full_drafts.items():
        print(f"acceptance length of {mode} drafts of 8: {length:.2f}")
    verdict = "exact" if not check.faults else "NOT EXACT"
    print(f"{verdict}: {check.compared} tokens compared with plain decoding, "
          f"{report['texts_that_part_at_a_tie']} texts part at a tie")  # fmt: skip
    for fault in check.faults:
        print(f"  {fault}")
    print(json.dumps(report))
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    return 1 if check.faults else 0


if __name__ == "__main__":
    sys.exit(main())
