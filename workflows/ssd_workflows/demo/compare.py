"""The demo's table: what the benchmark measured, with rates over the whole call."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ssd_integrations.errors import EngineError
from ssd_workers.bench.measure import Results
from ssd_workers.bench.summary import same_texts, summarise


@dataclass(frozen=True)
class Row:
    """One line of the table: medians over prompts and rounds."""

    decoder: str
    time_to_first_token_s: float
    tokens_per_second: float
    acceptance_length: float | None
    speed_up: float


def rows(results: Results) -> list[Row]:
    """The table; the first decoder is the reference.

    Raises:
      EngineError: a decoder failed on a prompt.
    """
    results.require_answers()
    table: list[Row] = []
    for name, summary in summarise(results).items():
        speed = summary.end_to_end_tokens_per_second
        first = summary.time_to_first_token_s
        if speed is None or first is None:
            raise EngineError(f"{name} wrote nothing.")
        reference = table[0].tokens_per_second if table else speed
        table.append(Row(name, first, speed, summary.mean_acceptance_length, speed / reference))
    return table


def require_same_text(results: Results, one: str, other: str) -> int:
    """Check that two decoders wrote the same tokens for every prompt and in every round.

    Returns:
      The number of tokens compared.

    Raises:
      EngineError: names the prompt and the first token that differs.
    """
    texts = same_texts(results, [one, other])
    if texts.different:
        raise EngineError(
            f"{texts.first_difference}: speculation changed the text.",
            remedy="This is a defect: report it with the output of `ssd doctor`.",
        )
    return texts.tokens_compared


def samples_as_json(results: Results) -> list[dict[str, Any]]:
    """Every timed answer as plain values."""
    return [
        {"decoder": sample.decoder, "task": sample.item, "round": sample.round, **asdict(answer)}
        for sample in results.samples
        for answer in sample.answers
    ]
