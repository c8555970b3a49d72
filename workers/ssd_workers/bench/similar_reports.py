"""Twenty reports of one kind: the same template, another month, region and figures each.

What somebody does who writes reports in a batch: nothing is asked for twice, but the answers
resemble each other. A store of earlier outputs (suffix drafting) is cold in the first half and
warm in the second, which are the two categories.
"""

from __future__ import annotations

import random
from typing import Any

_SEED = 20260
_MONTHS = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)  # fmt: skip
_REGIONS = ("North", "South", "East", "West", "Coast")
_PRODUCTS = ("city bikes", "cargo bikes", "helmets", "repair services")
_CAUSES = (
    "a spring campaign in two newspapers", "a longer opening time on Saturdays",
    "rain on most weekends", "a new leasing contract with a hospital",
    "a delivery that came three weeks late", "road works in front of the largest shop",
)  # fmt: skip
_SYSTEM = "You write the monthly sales reports of a bicycle dealer with several shops."
_TASK = (
    "Write the report on this month for the regional manager, in three short paragraphs: sales "
    "against the month before, the products, then costs and outlook. Use only these facts and "
    "every figure of them.\n\n"
)


def similar_reports(count: int = 20) -> list[dict[str, Any]]:
    """The fields of ``count`` prompts, the same at every call."""
    source = random.Random(_SEED)
    items = []
    for number in range(count):
        month, region = number % len(_MONTHS), _REGIONS[number % len(_REGIONS)]
        prompt = _TASK + "\n".join(f"- {fact}" for fact in _facts(source, region, month))
        half = "first-half" if number < count // 2 else "second-half"
        items.append(
            {
                "id": f"report-{number + 1:02d}",
                "category": half,
                "language": "en",
                "messages": [
                    {"role": "system", "content": _SYSTEM},
                    {"role": "user", "content": prompt},
                ],
                "max_tokens": 220,
            }
        )
    return items


def _facts(source: random.Random, region: str, month: int) -> list[str]:
    before = source.randrange(180, 420) * 1000 + source.randrange(1000)
    now = round(before * source.uniform(0.88, 1.16))
    change = 100 * (now / before - 1)
    shares = sorted(source.sample(range(10, 40), len(_PRODUCTS)), reverse=True)
    total = sum(shares)
    lines = [
        f"Region: {region}. Month: {_MONTHS[month]} 2026.",
        f"Total sales: {now:,} euros; in {_MONTHS[month - 1]}: {before:,} euros; "
        f"change: {change:+.1f} percent.",
    ]
    for product, share in zip(_PRODUCTS, shares, strict=True):
        lines.append(f"Sales of {product}: {round(now * share / total):,} euros.")
    returns = source.randrange(8, 60)
    lines += [
        f"Reason named by the shops: {source.choice(_CAUSES)}.",
        f"Orders returned: {returns} of {returns * source.randrange(25, 60)}.",
        f"Costs of staff: {round(now * 0.19 / 100) * 100:,} euros; "
        f"rent and energy: {round(now * 0.07 / 100) * 100:,} euros.",
        f"Open repairs at the end of the month: {source.randrange(5, 48)}.",
        f"Target for {_MONTHS[(month + 1) % 12]}: {round(now * 1.03 / 1000) * 1000:,} euros.",
    ]
    return lines
