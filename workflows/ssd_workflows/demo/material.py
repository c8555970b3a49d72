"""What the demo writes about: a help article, a customer's question and a quarter's sales.

Every figure of the report is computed here; the model only puts facts into sentences, and
:func:`misplaced_figures` finds any figure that it made up or told of the wrong region.
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
    "Spare parts": {
        "North region": (8_300, 7_900, 8_800),
        "South region": (6_900, 7_400, 8_200),
    },
}

SECTION_INSTRUCTIONS = """\
You write one section of a quarterly sales report for the management: plain prose in full \
sentences, one paragraph per region, no list and no heading. Report every figure with its month, \
exactly as given. Add no conclusion of your own."""

_BOTH = "Both regions"
_PLACE_OR_FIGURE = re.compile(
    r"(?P<both>both|together|combined|overall|north and south)|(?P<north>north)|(?P<south>south)"
    r"|(?P<figure>\d+(?:[.,]\d+)*)",
    re.IGNORECASE,
)


def facts(section: str) -> dict[str, str]:
    """The table's row for each region and for both; all but the sales themselves is computed."""
    rows = dict(SALES[section])
    july, august, september = (sum(month) for month in zip(*rows.values(), strict=True))
    rows[_BOTH] = (july, august, september)
    return {
        region: " | ".join(
            [region, *(f"{amount:,} euros" for amount in amounts), _change(amounts[0], amounts[-1])]
        )
        for region, amounts in rows.items()
    }


def section_prompt(section: str) -> str:
    """The user message that asks for one section."""
    head = " | ".join(["Region", *MONTHS, f"{MONTHS[-1]} against {MONTHS[0]}"])
    table = "\n".join(f"| {row} |" for row in (head, *facts(section).values()))
    return f"{section}, sales by region:\n{table}"


def misplaced_figures(section: str, text: str) -> list[str]:
    """The figures in ``text`` that are not facts of the region they are told of.

    A figure belongs to the region named last before it (to both of them where both are).
    """
    known = {region: _figures(row) for region, row in facts(section).items()}
    region = _BOTH
    wrong = []
    for word in _PLACE_OR_FIGURE.finditer(text):
        if word["north"] or word["south"]:
            region = "North region" if word["north"] else "South region"
        elif word["both"]:
            region = _BOTH
        elif word["figure"] not in known[region]:
            wrong.append(f"{word['figure']} ({region})")
    return wrong


def _change(first: int, last: int) -> str:
    return f"{(last - first) / first * 100:+.1f} percent"


def _figures(text: str) -> list[str]:
    return re.findall(r"\d+(?:[.,]\d+)*", text)
