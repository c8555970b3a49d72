"""The report of a run: one JSON object, and the same as tables."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ssd_integrations.cli.render import clean_for_terminal
from ssd_workers.bench.measure import Results
from ssd_workers.bench.modes import Mode
from ssd_workers.bench.summary import (
    ModeSummary,
    as_json,
    factors,
    reference_of,
    same_texts,
    summarise,
)

_MOST_CATEGORIES = 8
_WIDE = 105


def build_report(
    results: Results,
    modes: list[Mode],
    conditions: dict[str, Any],
    quality: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Everything that is known about a run, as plain values."""
    summaries = summarise(results, on_gpu=str(conditions.get("device", "cpu")) != "cpu")
    exact = [mode.name for mode in modes if mode.is_ours and not mode.float32]
    texts = same_texts(results, exact)
    return {
        "modes": as_json(summaries),
        "reference": reference_of(results.decoders),
        "factors": factors(results, modes),
        "identical_texts": {
            "modes": exact,
            "conversations_compared": texts.conversations_compared,
            "tokens_compared": texts.tokens_compared,
            "different": texts.different,
            "first_difference": texts.first_difference,
        },
        "quality": quality,
        "interrupted": results.interrupted,
        "conditions": conditions,
    }


def failures(report: dict[str, Any]) -> int:
    """How many conversations failed, over all modes."""
    total = 0
    for summary in report["modes"].values():
        total += summary["failures"]
        total += summary["concurrent"]["failures"] if summary["concurrent"] else 0
    return total


def show_report(report: dict[str, Any], console: Console) -> None:
    """Print the tables."""
    modes = {name: ModeSummary(**fields) for name, fields in report["modes"].items()}
    console.print(_main_table(modes, console.width))
    _notes(report, console)
    categories = list(dict.fromkeys(name for m in modes.values() for name in m.categories))
    if 1 < len(categories) <= _MOST_CATEGORIES:
        console.print()
        console.print(_category_table(modes, categories, report["reference"]))
    if any(summary.concurrent for summary in modes.values()):
        console.print()
        console.print(_concurrent_table(modes))
    console.print()
    for line in [*_factor_lines(report["factors"]), *_quality_lines(report["quality"])]:
        console.print(line)
    console.print(clean_for_terminal(_texts_line(report["identical_texts"])))
    for name, summary in modes.items():
        for error in summary.errors:
            console.print(clean_for_terminal(f"{name} failed: {error}"))
    console.print(Text(_conditions_line(report["conditions"]), style="dim"))


def _table(first: str, *columns: str, title: str | None = None) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", title=title, title_justify="left")
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _main_table(modes: dict[str, ModeSummary], width: int) -> Table:
    """The figures of every mode; where there is little room, without those in the middle."""
    wide = width >= _WIDE
    middle = ["first token", "end to end", "CPU s/1000"] if wide else []
    table = _table("mode", "tokens/s", "quartiles", "speed-up", "length", *middle, "failed")
    for name, m in modes.items():
        spread = m.tokens_per_second_iqr
        cells = [
            _number(m.time_to_first_token_s, "{:.2f} s"),
            _number(m.end_to_end_s, "{:.2f} s"),
            _number(m.cpu_seconds_per_1000_tokens, "{:.0f}"),
        ]
        table.add_row(
            name,
            _number(m.tokens_per_second, "{:.2f}"),
            "-" if spread is None else f"{spread[0]:.2f}-{spread[1]:.2f}",
            _number(m.speedup, "{:.2f} x"),
            _number(m.mean_acceptance_length, "{:.2f}"),
            *(cells if wide else []),
            str(m.failures),
        )
    return table


def _notes(report: dict[str, Any], console: Console) -> None:
    reference = report["reference"]
    against = f"speed-up: over {reference}" if reference else "no speed-up: neither transformers"
    against += "" if reference else " nor ar took part"
    text = (
        f"tokens/s: while decoding, totals, median of the rounds; {against}; "
        "length: tokens for each pass of the model."
    )
    console.print(Text(text, style="dim"))
    if report["interrupted"]:
        console.print("Interrupted: these are the answers up to then.")


def _category_table(
    modes: dict[str, ModeSummary], categories: list[str], reference: str | None
) -> Table:
    what = f"speed-up over {reference}" if reference else "tokens/s"
    field = "speedup" if reference else "tokens_per_second"
    table = _table(what, *categories)
    for name, summary in modes.items():
        cells = [summary.categories.get(category, {}).get(field) for category in categories]
        table.add_row(name, *(_number(cell, "{:.2f}") for cell in cells))
    return table


def _concurrent_table(modes: dict[str, ModeSummary]) -> Table:
    table = _table(
        "several at once", "requests", "tokens/s", "over one at a time", "first token", "failed"
    )
    for name, summary in modes.items():
        if summary.concurrent is not None:
            table.add_row(
                name,
                str(summary.concurrent["requests"]),
                _number(summary.concurrent["tokens_per_second"], "{:.2f}"),
                _number(summary.concurrent["ratio_to_one_at_a_time"], "{:.2f} x"),
                _number(summary.concurrent["time_to_first_token_s"], "{:.2f} s"),
                str(summary.concurrent["failures"]),
            )
    return table


def _factor_lines(found: dict[str, Any]) -> list[str]:
    lines = []
    if found["quantisation"] is not None:
        lines.append(f"Quantisation: {found['quantisation']:.2f} x (ar over ar-float32).")
    if found["engine_and_quantisation"] is not None:
        lines.append(
            f"Engine and quantisation: {found['engine_and_quantisation']:.2f} x "
            "(ar over transformers)."
        )
    if found["speculation"] is not None:
        lines.append(
            f"Speculation: {found['speculation']:.2f} x ({found['best_drafter']} over ar)."
        )
    return lines


def _quality_lines(quality: dict[str, Any] | None) -> list[str]:
    if quality is None:
        return []
    return [
        f"Quality: perplexity {quality['perplexity']:.3f} in {quality['dtype']} and "
        f"{quality['perplexity_float32']:.3f} in float32; the same first choice at "
        f"{100 * quality['greedy_agreement']:.1f} % of {quality['positions']} positions."
    ]


def _texts_line(texts: dict[str, Any]) -> str:
    if not texts["conversations_compared"]:
        return "Texts: nothing to compare."
    what = (
        f"{texts['conversations_compared']} conversations ({texts['tokens_compared']} tokens) of "
        f"{', '.join(texts['modes'])} compared"
    )
    if not texts["different"]:
        return f"Texts: {what}, all identical."
    return f"Texts: {what}, {texts['different']} differ. First: {texts['first_difference']}."


def _conditions_line(conditions: dict[str, Any]) -> str:
    machine = conditions["machine"]
    return clean_for_terminal(
        f"{conditions['model']} in {conditions.get('dtype', '-')} on "
        f"{conditions.get('device', 'cpu')}; {machine['processor']}, {machine['cores']} cores, "
        f"{conditions['threads']} threads; suite {conditions['suite']}, {conditions['prompts']} "
        f"prompts, {conditions['rounds']} round(s); load before the run {conditions['load']}."
    )


def _number(value: float | int | None, form: str) -> str:
    return "-" if value is None else form.format(value)
