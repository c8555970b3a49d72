"""The demo's comparison: which decoders, which prompts, and whether memory allows it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from ssd_integrations.protocol import build_speculation
from ssd_workers.bench.decoders import Decoder, EngineDecoder
from ssd_workers.bench.measure import Results, run
from ssd_workers.bench.suites import Item, Turn
from ssd_workers.bench.transformers_decoder import TransformersDecoder, TransformersModel
from ssd_workflows.demo.compare import require_same_text
from ssd_workflows.demo.screen import Screen, counted
from ssd_workflows.demo.steps import section_messages, section_names

TRANSFORMERS = "transformers, float32"
AUTOREGRESSIVE = "ours, autoregressive"
SPECULATIVE = "ours, speculative"

# What our engine needs beside transformers' float32 weights, and some room for both to work.
_ENGINE_BYTES = 2_300_000_000
_WORK_BYTES = 1_000_000_000


@dataclass(frozen=True)
class Measured:
    """A finished comparison, and under which conditions it was taken."""

    results: Results
    tokens_compared: int
    description: str
    skipped: str | None


def measure(screen: Screen, model: str, *, rounds: int, quick: bool) -> Measured:
    """Compare the decoders on the report's prompts, one call at a time.

    Raises:
      EngineError: speculation changed a text.
    """
    import torch

    from ssd_integrations.backends import open_backend
    from ssd_integrations.cli.progress import LoadingBar
    from ssd_workers.models.store import resolve_model

    screen.heading("The same report prompts, one call at a time, three ways of decoding")
    folder = Path(resolve_model(model).path)
    skipped = _too_little_memory(folder)
    names = section_names()[: 1 if quick else None]
    items = [_item(name, 48 if quick else 96) for name in names]
    with (
        LoadingBar() as bar,
        # One decoder must not find the prompt in memory that another one has just read.
        closing(open_backend(model=model, progress=bar, prefix_cache_mib=0)) as backend,
    ):
        (info,) = backend.models()
        decoders: list[Decoder] = [
            EngineDecoder(AUTOREGRESSIVE, backend, model, build_speculation(mode="off")),
            EngineDecoder(SPECULATIVE, backend, model, build_speculation(mode="ngram")),
        ]
        if skipped is None:
            library = TransformersModel(str(folder))
            decoders.insert(0, TransformersDecoder(TRANSFORMERS, library))
            bar("load model for transformers", 0, 1, "models")
            _ = library.model
            bar("load model for transformers", 1, 1, "models")
        bar.close()
        results = _with_bar(
            screen, lambda tell: run(decoders, items, rounds=rounds, on_sample=tell)
        )
    if results.interrupted:
        raise KeyboardInterrupt
    results.require_answers()
    return Measured(
        results=results,
        tokens_compared=require_same_text(results, AUTOREGRESSIVE, SPECULATIVE),
        description=(
            f"{counted(len(items), 'prompt')}, {counted(rounds, 'round')}, "
            f"at most {items[0].max_tokens} tokens each, greedy; ours in {info.dtype} on "
            f"{info.device}, {counted(torch.get_num_threads(), 'thread')}."
        ),
        skipped=skipped,
    )


def _item(section: str, max_tokens: int) -> Item:
    return Item(
        id=section.lower().replace(" ", "-"),
        category="report-section",
        language="en",
        messages=tuple(Turn.model_validate(message) for message in section_messages(section)),
        max_tokens=max_tokens,
    )


def _with_bar(screen: Screen, work: Callable[[Callable[[int, int], None]], Results]) -> Results:
    with screen.bars() as bars:
        task = bars.add_task("measuring", total=None, note="")

        def tell(done: int, total: int) -> None:
            bars.update(task, completed=done, total=total, note=f"{done} of {total} answers")

        return work(tell)


def _too_little_memory(folder: Path) -> str | None:
    """Why transformers cannot take part, or None if it can."""
    import psutil

    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    needed = weights + _ENGINE_BYTES + _WORK_BYTES
    available = psutil.virtual_memory().available
    if available >= needed:
        return None
    return (
        f"transformers was left out: its float32 weights beside our engine need "
        f"{needed / 1e9:.1f} GB of memory and {available / 1e9:.1f} GB are available."
    )
