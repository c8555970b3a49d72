"""What the demo writes about: a help article, a customer's question and a quarter's sales.

Every figure of the report is computed here; the model only puts facts into sentences, and
:func:`foreign_figures` finds any figure that it made up.
"""

from __future__ import annotations

import re

HELP_ARTICLE = """\
Changing the delivery address of an order

You can change the address as long as the order shows the status "Received" or "Packing".
Open Account > Orders, choose the order and select Change address. The new address must be in
the same country. Once the status is "Handed to carrier" we can no longer change it; the carrier
may offer a pick-up point, which you choose with the link in the carrier's message. If a parcel
comes back to us, we refund the goods within 5 working days of its arrival; the shipping fee is
not refunded. An order of several parcels has one address for all of them."""

CUSTOMER_MESSAGE = """\
Hi, I moved last week and my order still goes to my old flat. It says "Packing" right now. \
Can I still change the address, and what happens if it has already left?"""

SUPPORT_INSTRUCTIONS = """\
You answer for the support team of an online shop. Use only the help article. \
Be friendly and brief: at most five sentences.

Help article:
{article}"""

COMPLETION_PROMPT = "In one short sentence: why do companies send reports every month?"

MONTHS = ("July", "August", "September")
SALES: dict[str, dict[str, tuple[int, int, int]]] = {
    "Bicycles": {
        "North region": (41_200, 43_900, 47_300),
        "South region": (38_500, 36_100, 39_800),
    },
    "Accessories": {
        "North region": (12_400, 12_900, 14_100),
        "South region": (11_700, 13_200, 13_600),
    },
    "Repairs": {
        "North region": (8_300, 7_900, 8_800),
        "South region": (6_900, 7_400, 8_200),
    },
}

SECTION_INSTRUCTIONS = """\
You write one section of a quarterly sales report. Turn the facts into plain prose for the \
management: full sentences, no list, no table, no heading. Keep the order of the facts and copy \
names and figures exactly. Use every fact once, add nothing, draw no conclusions."""


def facts(section: str) -> list[str]:
    """The facts of one section, every figure computed from :data:`SALES`."""
    rows = SALES[section]
    lines = []
    for region, amounts in rows.items():
        months = ", ".join(
            f"{month} {amount:,} euros" for month, amount in zip(MONTHS, amounts, strict=True)
        )
        change = _change(amounts[0], amounts[-1])
        lines.append(
            f"{section} sales in the {region}: {months}; from {MONTHS[0]} to {MONTHS[-1]} {change}"
        )
    total = sum(sum(amounts) for amounts in rows.values())
    lines.append(f"{section} sales in both regions in the third quarter: {total:,} euros")
    return lines


def section_prompt(section: str) -> str:
    """The user message that asks for one section."""
    listing = "\n".join(f"- {line}" for line in facts(section))
    return f"Section: {section}\n\nFacts:\n{listing}"


def foreign_figures(section: str, text: str) -> list[str]:
    """The figures in ``text`` that are not among the facts of ``section``."""
    known = set(_figures(" ".join(facts(section))))
    return [figure for figure in _figures(text) if figure not in known]


def _change(first: int, last: int) -> str:
    word = "up" if last >= first else "down"
    return f"{word} {abs(last - first) / first * 100:.1f} percent"


def _figures(text: str) -> list[str]:
    return re.findall(r"\d+(?:[.,]\d+)*", text)
