"""The figures as a picture."""

from __future__ import annotations

from pathlib import Path

from ssd_integrations.errors import InvalidRequestError
from ssd_integrations.extras import require_extra
from ssd_workers.bench.summary import ModeSummary

_OURS, _OTHERS = "#2f6f9f", "#9a9a9a"


def check_chart(path: Path) -> None:
    """See that a chart could be written to ``path``.

    Raises:
      MissingExtraError: matplotlib is not installed.
      InvalidRequestError: not the name of a PNG file.
    """
    require_extra("--chart", "bench", "matplotlib")
    if path.suffix.lower() != ".png":
        raise InvalidRequestError(
            f"--chart {path}: the chart is a PNG file.", remedy="Give a name that ends in .png."
        )


def write_chart(
    path: Path, summaries: dict[str, ModeSummary], ours: set[str], caption: str
) -> None:
    """Draw decoding rates with their quartiles and speed-ups as bars into a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = list(summaries)
    figure = Figure(figsize=(8, 1.6 + 0.45 * len(names)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    rates = [summary.tokens_per_second or 0.0 for summary in summaries.values()]
    colours = [_OURS if name in ours else _OTHERS for name in names]
    axes.barh(names, rates, color=colours, height=0.65)
    reach = max(rates, default=0.0)
    for row, summary in enumerate(summaries.values()):
        spread = summary.tokens_per_second_iqr
        if spread is not None:
            axes.plot(spread, [row, row], color="black", linewidth=1.2, solid_capstyle="butt")
            reach = max(reach, spread[1])
        end = max(rates[row], spread[1] if spread is not None else 0.0)
        axes.annotate(
            _label(summary), (end, row), xytext=(6, 0), textcoords="offset points", va="center"
        )
    axes.set_xlim(0, reach * 1.3 or 1.0)
    axes.invert_yaxis()
    axes.set_xlabel("tokens/s while decoding; line: quartiles over conversations")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(caption, loc="left", fontsize=9)
    figure.savefig(path, dpi=150, format="png")


def _label(summary: ModeSummary) -> str:
    if summary.tokens_per_second is None:
        return "no answers"
    label = f"{summary.tokens_per_second:.1f}"
    if summary.speedup is not None:
        label += f"  ({summary.speedup:.2f} x)"
    return label + (f"  {summary.failures} failed" if summary.failures else "")
