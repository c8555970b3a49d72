"""`ssd bench`: decoders against each other on the same prompts."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from ssd_integrations.cli import options as opt
from ssd_integrations.cli.bench_output import answers_bar, check_output, deliver, exit_code
from ssd_integrations.cli.failures import report_failures, usage_errors
from ssd_integrations.cli.progress import LoadingBar
from ssd_integrations.errors import InvalidRequestError
from ssd_integrations.extras import require_extra

if TYPE_CHECKING:
    from ssd_workers.bench.setup import Options
    from ssd_workers.bench.suites import Item

_BENCH = "Measurement"
_DEFAULT_MODES = "transformers,ar,ngram,auto"

Modes = Annotated[
    str,
    typer.Option(
        help="Comma-separated: transformers, transformers-prompt-lookup, transformers-assisted, "
        "llama-cpp, llama-cpp-lookup, ar-float32, ar, ngram, suffix, model, hybrid, auto.",
        rich_help_panel=_BENCH,
    ),
]
Suite = Annotated[
    str,
    typer.Option(
        help="business, general, similar-reports, or a JSON lines file.", rich_help_panel=_BENCH
    ),
]
Limit = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="So many prompts, spread over the categories.",
        show_default="all",
        rich_help_panel=_BENCH,
    ),
]
Rounds = Annotated[
    int, typer.Option(min=1, max=1000, help="Rounds over the suite.", rich_help_panel=_BENCH)
]
Concurrency = Annotated[
    int,
    typer.Option(
        min=1,
        max=1024,
        help="Also answer so many requests at once, in this engine's modes.",
        rich_help_panel=_BENCH,
    ),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Longest answer.",
        show_default="the prompt's own",
        rich_help_panel=_BENCH,
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--num-threads", min=1, max=1024, help="CPU threads, for every mode.",
        show_default="every core", rich_help_panel=_BENCH,
    ),
]  # fmt: skip
Quality = Annotated[
    bool,
    typer.Option(
        "--quality",
        help="Also compare perplexity and first choices with float32 on held-out text.",
        rich_help_panel=_BENCH,
    ),
]
JSONFile = Annotated[
    Path | None,
    typer.Option("--json", help="Write the report as JSON; `-` is standard output."),
]
Chart = Annotated[Path | None, typer.Option(help="Write a bar chart as PNG.")]


def bench(
    modes: Modes = _DEFAULT_MODES,
    suite: Suite = "business",
    limit: Limit = None,
    rounds: Rounds = 1,
    concurrency: Concurrency = 1,
    max_tokens: MaxTokens = None,
    quality: Quality = False,
    model: opt.Model = "demo",
    draft_model: opt.DraftModel = None,
    dtype: opt.DTypeOption = None,
    device: opt.Device = None,
    decode_step: opt.DecodeStep = None,
    num_draft_tokens: opt.NumDraftTokens = None,
    num_threads: Threads = None,
    json_file: JSONFile = None,
    chart: Chart = None,
) -> None:
    """Measure ways of decoding against each other on the same prompts.

    The modes take turns on every prompt, in one process, greedily. Exits with 1 when an answer
    failed, or when this engine's modes differ in a token where they must not.

    \b
    Examples:
      ssd bench --limit 6
      ssd bench --modes transformers,ar,ngram --suite general --rounds 3 --json result.json
      ssd bench --modes ar,suffix --suite similar-reports --chart speed.png
      ssd bench --modes ar,auto --concurrency 8
      ssd bench --modes ar --suite my-prompts.jsonl --model ./my-model --quality --dtype int8
    """
    with report_failures():
        require_extra("`ssd bench`", "worker", "torch", "transformers", "psutil")
        with usage_errors():
            options, items = _checked(
                modes=modes, suite=suite, limit=limit, concurrency=concurrency, model=model,
                draft_model=draft_model, dtype=dtype, device=device, decode_step=decode_step,
                quality=quality, num_draft_tokens=num_draft_tokens, num_threads=num_threads,
                json_file=json_file, chart=chart,
            )  # fmt: skip
        what = {"suite": suite, "limit": limit, "rounds": rounds, "max_tokens": max_tokens}
        with _ended_by(signal.SIGTERM):
            report = _measure(options, items, what, want_quality=quality)
        deliver(report, options.modes, json_file, chart)
        code = exit_code(report)
    if code:
        raise typer.Exit(code)


@contextmanager
def _ended_by(number: signal.Signals) -> Iterator[None]:
    """Let a signal end the measurement early as Ctrl-C does, which no background job is sent."""
    before = signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def _checked(
    *,
    modes: str,
    suite: str,
    limit: int | None,
    concurrency: int,
    json_file: Path | None,
    chart: Path | None,
    quality: bool,
    **engine: Any,
) -> tuple[Options, list[Item]]:
    """Everything that can be refused before a model is touched."""
    from ssd_workers.bench.chart import check_chart
    from ssd_workers.bench.modes import parse_modes
    from ssd_workers.bench.setup import Options
    from ssd_workers.bench.suites import load_suite

    chosen = parse_modes(modes, draft_model=engine["draft_model"])
    options = Options(modes=tuple(chosen), requests=concurrency, **engine)
    options.check()
    if quality and options.dtype == "float32":
        raise InvalidRequestError(
            "--quality compares a dtype with float32, and --dtype is float32.",
            remedy="Leave one of them out.",
        )
    items = load_suite(suite, limit)
    if chart is not None:
        check_chart(chart)
        check_output("--chart", chart)
    if json_file is not None:
        check_output("--json", json_file)
    return options, items


def _measure(
    options: Options, items: list[Item], what: dict[str, Any], *, want_quality: bool
) -> dict[str, Any]:
    from ssd_workers.bench import conditions
    from ssd_workers.bench.measure import run
    from ssd_workers.bench.report import build_report
    from ssd_workers.bench.setup import open_bench

    facts: dict[str, Any] = {
        "command": conditions.command_line(),
        "started": conditions.now(),
        "load": conditions.load(),
        "machine": conditions.machine(),
        "versions": conditions.software(),
        "concurrency": options.requests,
        "num_draft_tokens": options.num_draft_tokens,
        "prompts": len(items),
        **what,
    }
    found_quality = _quality(options) if want_quality else None
    with LoadingBar(delay_s=0.5) as loading, open_bench(options, loading) as loaded:
        loading.close()
        concurrent = options.concurrent()
        with answers_bar() as tell:
            results = run(
                loaded.decoders,
                items,
                rounds=what["rounds"],
                max_tokens=what["max_tokens"],
                concurrent=[d for d in loaded.decoders if d.name in concurrent],
                requests=options.requests,
                on_sample=tell,
            )
        facts |= loaded.facts
    facts["ended"] = conditions.now()
    return build_report(results, list(options.modes), facts, found_quality)


def _quality(options: Options) -> dict[str, Any]:
    from ssd_workers.bench.quality import compare_quality
    from ssd_workers.engine.config import DType

    dtype = cast(DType, options.dtype or "auto")
    with LoadingBar(delay_s=0.5) as bar:
        return compare_quality(options.model, dtype, options.device or "auto", progress=bar)
