"""What a token costs as its context and its batch grow.

    python benchmarks/long_context.py [--model demo] [--contexts 200 1024 4096 8192 16384 32000]
        [--batches 1 2 4 8 16 32] [--rounds 5] [--png FILE] [--json FILE]

Every step decodes one token for each sequence of the batch, after so many tokens of context. Caches
are filled with random numbers, since what is in them does not change the time. Shapes take turns,
so that a slow spell of the machine hits all of them; medians are shown. A shape whose keys and
values need more than ``--memory-gib`` is left out, and said so.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch

from ssd_workers.engine.kv_cache import SequenceCache
from ssd_workers.engine.loading import LoadedModel, load_model
from ssd_workers.engine.runner import RowBlock
from ssd_workers.models.store import resolve_model
from ssd_workers.progress import no_progress

Shape = tuple[int, int]
"""Context and batch."""


def filled_cache(model: LoadedModel, length: int) -> SequenceCache:
    """A cache of ``length`` random positions."""
    runner = model.runner
    cache = runner.new_cache(length + 1)
    runner.forward([RowBlock(cache, [1], 1)])  # makes buffers of the right type and size
    for layer in range(runner.num_layers):
        for buffer in cache.read(layer, 0, length):
            buffer.normal_()
    cache.length = length
    return cache


def seconds(model: LoadedModel, caches: Sequence[SequenceCache], context: int) -> float:
    """One step of one token for each of ``caches``."""
    for cache in caches:
        cache.truncate(context)
    started = time.perf_counter()
    model.runner.forward([RowBlock(cache, [1], 1) for cache in caches])
    model.runner.synchronize()
    return time.perf_counter() - started


@torch.inference_mode()
def measure(
    model: LoadedModel, contexts: Sequence[int], batches: Sequence[int], rounds: int, memory: float
) -> tuple[dict[Shape, float], list[Shape]]:
    """Median seconds of a step of each shape, and the shapes left out for want of memory."""
    found: dict[Shape, float] = {}
    left_out = []
    for context in contexts:
        fit = [b for b in batches if model.runner.cache_bytes([context + 1] * b) <= memory]
        left_out += [(context, batch) for batch in batches if batch not in fit]
        caches = [filled_cache(model, context) for _ in range(max(fit, default=0))]
        times: dict[int, list[float]] = {batch: [] for batch in fit}
        for number in range(rounds + 1):
            for batch in fit:
                spent = seconds(model, caches[:batch], context)
                if number:  # the first round fetches code and pages
                    times[batch].append(spent)
        found.update({(context, batch): median(times[batch]) for batch in fit})
    return found, left_out


def draw(path: Path, found: dict[Shape, float], contexts: list[int], batches: list[int]) -> None:
    """Milliseconds for each token against context, a line for each batch."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for batch in batches:
        points = [(c, 1e3 * found[c, batch] / batch) for c in contexts if (c, batch) in found]
        axes.plot(*zip(*points, strict=True), marker="o", label=f"batch {batch}")
    axes.set_xscale("log", base=2)
    axes.set_xticks(contexts, [str(c) for c in contexts])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens of context")
    axes.set_ylabel("ms for each token")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150, format="png")


def main() -> None:
    """Measure, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="auto")
    contexts = [200, 1024, 4096, 8192, 16384, 32000]
    parser.add_argument("--contexts", type=int, nargs="+", default=contexts)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory-gib", type=float, default=8.0)
    parser.add_argument("--png", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    model = load_model(resolve_model(options.model), options.dtype, "cpu", no_progress)
    found, left_out = measure(
        model, options.contexts, options.batches, options.rounds, options.memory_gib * 2**30
    )
    print("ms of a step" + "".join(f"{f'batch {b}':>10}" for b in options.batches))
    for context in options.contexts:
        cells = [found.get((context, batch)) for batch in options.batches]
        texts = ["-" if cell is None else f"{1e3 * cell:.1f}" for cell in cells]
        print(f"{context:>12}" + "".join(f"{text:>10}" for text in texts))
    if left_out:
        print(f"left out, more than {options.memory_gib:g} GiB: {len(left_out)} shapes")
    if options.json:
        rows = [{"context": c, "batch": b, "seconds": s} for (c, b), s in found.items()]
        options.json.write_text(json.dumps(rows, indent=1))
    if options.png:
        draw(options.png, found, options.contexts, options.batches)


if __name__ == "__main__":
    main()
