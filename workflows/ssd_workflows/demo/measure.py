"""The demo's comparison: which decoders, which prompts, and whether memory allows it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from ssd_workflows.demo.compare import (
    Comparison,
    Decoder,
    EngineDecoder,
    Task,
    TransformersDecoder,
    compare,
)
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

    comparison: Comparison
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
    tasks = [Task(name, section_messages(name), 48 if quick else 96) for name in names]
    with LoadingBar() as bar, closing(open_backend(model=model, progress=bar)) as backend:
        (info,) = backend.models()
        decoders: list[Decoder] = [
            EngineDecoder(AUTOREGRESSIVE, backend, model, "off"),
            EngineDecoder(SPECULATIVE, backend, model, "ngram"),
        ]
        if skipped is None:
            bar("load transformers' model", 0, 1, "models")
            decoders.insert(0, TransformersDecoder(TRANSFORMERS, str(folder)))
        bar.close()
        comparison = _with_bar(screen, lambda tell: compare(decoders, tasks, rounds, tell))
    return Measured(
        comparison=comparison,
        tokens_compared=comparison.require_same_text(AUTOREGRESSIVE, SPECULATIVE),
        description=(
            f"{counted(len(tasks), 'prompt')}, {counted(rounds, 'round')}, "
            f"at most {tasks[0].max_tokens} tokens each, greedy; ours in {info.dtype} on "
            f"{info.device}, {counted(torch.get_num_threads(), 'thread')}."
        ),
        skipped=skipped,
    )


def _with_bar(
    screen: Screen, work: Callable[[Callable[[int, int], None]], Comparison]
) -> Comparison:
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
