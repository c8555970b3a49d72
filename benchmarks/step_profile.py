"""Where a decoding step's time goes: the int8 products alone against whole steps.

    python benchmarks/step_profile.py [--model demo] [--rounds 30] [--context 200] [--json]

Products and steps take turns, so that a slow spell of the machine hits both; medians are shown.
"Outside" is everything that is not a quantised product: norms, rotary embedding, attention,
quantising activations, Python.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from statistics import median

import torch

from ssd_integrations.protocol import SamplingParams
from ssd_workers.engine.int8 import Int8Linear, Int8Slice, PackedWeight
from ssd_workers.engine.loading import LoadedModel, load_model
from ssd_workers.engine.runner import RowBlock
from ssd_workers.engine.sampling import choose_tokens
from ssd_workers.models.store import resolve_model
from ssd_workers.progress import no_progress

ROWS = (1, 2, 4, 8, 16)


def packed_weights(model: LoadedModel) -> list[PackedWeight]:
    """Every int8 weight of the model once, in the order of the forward."""
    found: dict[int, PackedWeight] = {}
    for module in model.runner.model.modules():
        linear = module.fused.linear if isinstance(module, Int8Slice) else module
        if isinstance(linear, Int8Linear):
            found.setdefault(id(linear.weight_packed), linear.weight_packed)
    return list(found.values())


@torch.inference_mode()
def products(weights: list[PackedWeight], rows: int) -> Callable[[], None]:
    """All products of a step of ``rows`` rows, and nothing else."""
    sizes = {weight.in_features for weight in weights}
    inputs = {size: torch.randint(0, 256, (rows, size), dtype=torch.uint8) for size in sizes}

    def run() -> None:
        for weight in weights:
            weight.product(inputs[weight.in_features])

    return run


def step(model: LoadedModel, rows: int, context: int) -> Callable[[], None]:
    """A forward of ``rows`` rows after ``context`` positions, and the choice of tokens."""
    runner = model.runner
    cache = runner.new_cache(context + rows)
    runner.forward([RowBlock(cache, [1] * context, 0)])

    def run() -> None:
        cache.truncate(context)
        logits = runner.forward([RowBlock(cache, [1] * rows, rows)])
        choose_tokens(logits, [SamplingParams()] * rows, [0] * rows, list(range(rows)))

    return run


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--context", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    model = load_model(resolve_model(options.model), "int8", "cpu", no_progress)
    weights = packed_weights(model)
    runs: dict[tuple[str, int], Callable[[], None]] = {}
    for rows in ROWS:
        runs["products", rows] = products(weights, rows)
        runs["step", rows] = step(model, rows, options.context)
    seconds: dict[tuple[str, int], list[float]] = {key: [] for key in runs}
    for _ in range(options.rounds):
        for key, run in runs.items():
            started = time.perf_counter()
            run()
            seconds[key].append(time.perf_counter() - started)
    table = []
    for rows in ROWS:
        inside, whole = median(seconds["products", rows]), median(seconds["step", rows])
        table.append(
            {"rows": rows, "products_s": inside, "step_s": whole, "outside": 1 - inside / whole}
        )
    if options.json:
        print(json.dumps(table))
        return
    print(f"{len(weights)} products, {torch.get_num_threads()} threads, context {options.context}")
    print(f"{'rows':>5} {'products':>10} {'step':>10} {'outside':>8}")
    for line in table:
        print(
            f"{line['rows']:>5} {line['products_s'] * 1e3:>8.1f}ms {line['step_s'] * 1e3:>8.1f}ms "
            f"{line['outside']:>8.0%}"
        )


if __name__ == "__main__":
    main()
