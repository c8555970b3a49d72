"""From timed answers to figures: rates, ratios, spreads, and whether the texts are the same.

Rates are totals, tokens over seconds, of each round; what is reported is the median over the
rounds. Ratios compare a round of one decoder with the same round of another, over the
conversations that both answered. Spreads are quartiles over single conversations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median, quantiles
from typing import Any

from ssd_workers.bench.decoders import Answer
from ssd_workers.bench.measure import Results, Sample
from ssd_workers.bench.modes import REFERENCES, Mode

_MAX_ERRORS = 5


@dataclass(frozen=True)
class ModeSummary:
    """The figures of one mode; None where there is nothing to compute them from.

    ``tokens_per_second`` is the rate while decoding: the tokens after the first piece of text over
    the time from it to the end. ``end_to_end_tokens_per_second`` is the rate of the whole call.
    ``time_to_first_token_s`` and ``end_to_end_s`` are medians over single answers.
    """

    tokens_per_second: float | None
    tokens_per_second_iqr: list[float] | None
    speedup: float | None
    speedup_iqr: list[float] | None
    speedup_over_ar: float | None
    mean_acceptance_length: float | None
    time_to_first_token_s: float | None
    time_to_first_token_s_iqr: list[float] | None
    end_to_end_s: float | None
    end_to_end_s_iqr: list[float] | None
    end_to_end_tokens_per_second: float | None
    cpu_seconds_per_1000_tokens: float | None
    gpu_seconds_per_1000_tokens: float | None
    tokens: int
    answers: int
    failures: int
    errors: list[str]
    categories: dict[str, dict[str, float | None]]
    concurrent: dict[str, float | int | None] | None


@dataclass(frozen=True)
class SameTexts:
    """Whether all modes of this project's engine wrote the same, token for token."""

    conversations_compared: int
    tokens_compared: int
    different: int
    first_difference: str | None


def reference_of(names: Sequence[str]) -> str | None:
    """The mode that speed-ups are ratios to."""
    return next((name for name in REFERENCES if name in names), None)


def summarise(results: Results, *, on_gpu: bool = False) -> dict[str, ModeSummary]:
    """The figures of every mode, in the order of the run."""
    by_mode = {name: results.of(name) for name in results.decoders}
    reference = by_mode.get(reference_of(results.decoders) or "", [])
    plain = by_mode.get("ar", [])
    return {
        name: _summary(name, samples, reference, plain, results, on_gpu)
        for name, samples in by_mode.items()
    }


def _summary(
    name: str,
    samples: list[Sample],
    reference: list[Sample],
    plain: list[Sample],
    results: Results,
    on_gpu: bool,
) -> ModeSummary:
    good = [sample for sample in samples if sample.error is None]
    answers = [answer for sample in good for answer in sample.answers]
    tokens = sum(answer.tokens for answer in answers)
    seconds = sum(answer.total_s for answer in answers)
    first = [answer.time_to_first_token_s for answer in answers]
    whole = [answer.total_s for answer in answers]
    failed = [sample for sample in samples if sample.error is not None]
    return ModeSummary(
        tokens_per_second=rate(good),
        tokens_per_second_iqr=_quartiles(_present(_decode_rate([s]) for s in good)),
        speedup=ratio(good, reference),
        speedup_iqr=_quartiles(_paired_ratios(good, reference)),
        speedup_over_ar=ratio(good, plain),
        mean_acceptance_length=_acceptance_length(answers),
        time_to_first_token_s=median(first) if first else None,
        time_to_first_token_s_iqr=_quartiles(first),
        end_to_end_s=median(whole) if whole else None,
        end_to_end_s_iqr=_quartiles(whole),
        end_to_end_tokens_per_second=rate(good, _end_to_end_rate),
        cpu_seconds_per_1000_tokens=_per_1000(sum(a.cpu_s for a in answers), tokens),
        # One request has the GPU to itself, so it costs the seconds that it takes.
        gpu_seconds_per_1000_tokens=_per_1000(seconds, tokens) if on_gpu else None,
        tokens=tokens,
        answers=len(answers),
        failures=len(failed),
        errors=list(dict.fromkeys(str(sample.error) for sample in failed))[:_MAX_ERRORS],
        categories=_categories(good, reference),
        concurrent=_concurrent(name, good, results),
    )


def rate(
    samples: Sequence[Sample], of: Callable[[Sequence[Sample]], float | None] | None = None
) -> float | None:
    """Tokens per second: totals of every round, the median over the rounds."""
    measure = of or _decode_rate
    per_round = _present(measure(group) for group in _rounds(samples).values())
    return median(per_round) if per_round else None


def ratio(samples: Sequence[Sample], others: Sequence[Sample]) -> float | None:
    """The rate of ``samples`` over that of ``others``, on what both answered; the median round."""
    mine, theirs = _answered(samples), _answered(others)
    found = []
    for number in sorted({key[0] for key in mine}):
        both = [key for key in mine if key[0] == number and key in theirs]
        one = _decode_rate([mine[key] for key in both])
        other = _decode_rate([theirs[key] for key in both])
        if one is not None and other is not None:
            found.append(one / other)
    return median(found) if found else None


def _paired_ratios(samples: Sequence[Sample], others: Sequence[Sample]) -> list[float]:
    mine, theirs = _answered(samples), _answered(others)
    found = []
    for key in mine:
        one = _decode_rate([mine[key]])
        other = _decode_rate([theirs[key]]) if key in theirs else None
        if one is not None and other is not None:
            found.append(one / other)
    return found


def _answered(samples: Sequence[Sample]) -> dict[tuple[int, str], Sample]:
    return {(s.round, s.item): s for s in samples if s.error is None}


def _rounds(samples: Sequence[Sample]) -> dict[int, list[Sample]]:
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.round, []).append(sample)
    return groups


def _decode_rate(samples: Sequence[Sample]) -> float | None:
    answers = [answer for sample in samples for answer in sample.answers]
    tokens = sum(answer.decode_tokens for answer in answers)
    # An answer of one piece has no decoding to be timed.
    seconds = sum(answer.decode_s for answer in answers if answer.decode_tokens)
    return tokens / seconds if tokens and seconds else None


def _end_to_end_rate(samples: Sequence[Sample]) -> float | None:
    seconds = sum(sample.total_s for sample in samples)
    return sum(sample.tokens for sample in samples) / seconds if seconds else None


def _acceptance_length(answers: Sequence[Answer]) -> float | None:
    steps = sum(answer.steps for answer in answers)
    return sum(a.decode_tokens for a in answers if a.steps) / steps if steps else None


def _categories(
    good: Sequence[Sample], reference: Sequence[Sample]
) -> dict[str, dict[str, float | None]]:
    table = {}
    for category in dict.fromkeys(sample.category for sample in good):
        mine = [sample for sample in good if sample.category == category]
        theirs = [sample for sample in reference if sample.category == category]
        table[category] = {
            "tokens_per_second": rate(mine),
            "speedup": ratio(mine, theirs),
            "mean_acceptance_length": _acceptance_length([a for s in mine for a in s.answers]),
        }
    return table


def _concurrent(
    name: str, alone: Sequence[Sample], results: Results
) -> dict[str, float | int | None] | None:
    """Throughput of the whole, prompts included, with several requests at once."""
    batches = [batch for batch in results.batches if batch.decoder == name]
    if not batches:
        return None
    per_round = []
    for number in sorted({batch.round for batch in batches}):
        mine = [batch for batch in batches if batch.round == number]
        tokens = sum(sample.tokens for batch in mine for sample in batch.samples)
        per_round.append(tokens / sum(batch.wall_s for batch in mine))
    samples = [sample for batch in batches for sample in batch.samples]
    first = [a.time_to_first_token_s for s in samples for a in s.answers]
    whole, one = median(per_round), rate(alone, _end_to_end_rate)
    return {
        "requests": batches[0].requests,
        "tokens_per_second": whole,
        "ratio_to_one_at_a_time": whole / one if one else None,
        "time_to_first_token_s": median(first) if first else None,
        "failures": sum(sample.error is not None for sample in samples),
    }


def same_texts(results: Results, names: Sequence[str]) -> SameTexts:
    """Compare every answer of the modes ``names``, alone and in batches, with the first one's."""
    samples = [*results.samples, *(s for batch in results.batches for s in batch.samples)]
    expected: dict[str, Sample] = {}
    compared = tokens = different = 0
    first_difference = None
    for sample in samples:
        if sample.decoder not in names or sample.error is not None:
            continue
        known = expected.setdefault(sample.item, sample)
        if known is sample:
            continue
        compared += 1
        tokens += sample.tokens
        if sample.texts != known.texts:
            different += 1
            first_difference = first_difference or _describe(sample, known)
    return SameTexts(compared, tokens, different, first_difference)


def _describe(sample: Sample, known: Sample) -> str:
    place = "in its text"
    for turn, (mine, theirs) in enumerate(zip(sample.texts, known.texts, strict=False), 1):
        if mine != theirs:
            pairs = zip(mine[0], theirs[0], strict=False)
            at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
            where = "the end" if at is None else f"token {at}"
            place = f"in answer {turn} at {where}"
            break
    return f"{sample.decoder} and {known.decoder} differ on {sample.item!r} {place}"


def factors(results: Results, modes: Sequence[Mode]) -> dict[str, Any]:
    """What quantisation gives and what speculation gives, apart.

    ``quantisation`` is our autoregressive decoding over the same in float32,
    ``engine_and_quantisation`` over transformers, ``speculation`` the best of our drafters over
    our autoregressive decoding. None where one of the two took no part.
    """
    plain = results.of("ar")
    drafters = [mode.name for mode in modes if mode.is_ours and mode.speculation != "off"]
    found = {name: ratio(results.of(name), plain) for name in drafters}
    known = {name: value for name, value in found.items() if value is not None}
    best = max(known, key=lambda name: known[name]) if known else None
    return {
        "quantisation": ratio(plain, results.of("ar-float32")),
        "engine_and_quantisation": ratio(plain, results.of("transformers")),
        "speculation": known[best] if best is not None else None,
        "best_drafter": best,
    }


def as_json(summaries: dict[str, ModeSummary]) -> dict[str, dict[str, Any]]:
    """The summaries as plain values."""
    return {name: asdict(summary) for name, summary in summaries.items()}


def _present(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _quartiles(values: Sequence[float]) -> list[float] | None:
    if not values:
        return None
    if len(values) == 1:
        return [values[0], values[0]]
    low, _, high = quantiles(values, n=4, method="inclusive")
    return [low, high]


def _per_1000(amount: float, tokens: int) -> float | None:
    return 1000 * amount / tokens if tokens else None
