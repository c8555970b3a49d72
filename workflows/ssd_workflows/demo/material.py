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
You write one section of a quarterly sales report for the management: one paragraph of plain \
prose in full sentences. Report the facts in the given order, with their exact names and figures. \
Add no fact, no heading and no conclusion of your own."""

_BOTH = "Both regions"
_PLACE_OR_FIGURE = re.compile(
    r"(?P<both>both|together|combined|overall|north and south)|(?P<north>north)|(?P<south>south)"
    r"|(?P<figure>\d+(?:[.,]\d+)*)",
    re.IGNORECASE,
)


def facts(section: str) -> dict[str, list[str]]:
    """The facts of one section by region, every figure computed from :data:`SALES`."""
    rows = SALES[section]
    found = {}
    for region, amounts in rows.items():
        months = ", ".join(
            f"{amount:,} euros in {month}" for month, amount in zip(MONTHS, amounts, strict=True)
        )
        change = _change(amounts[0], amounts[-1])
        found[region] = [f"{region}: {months}", f"{region}: September is {change} July"]
    total = sum(sum(amounts) for amounts in rows.values())
    found[_BOTH] = [f"{_BOTH}, third quarter: {total:,} euros"]
    return found


def section_prompt(section: str) -> str:
    """The user message that asks for one section."""
    listing = "\n".join(f"- {line}" for lines in facts(section).values() for line in lines)
    return f"Section: {section}\n\nSales facts:\n{listing}"


def misplaced_figures(section: str, text: str) -> list[str]:
    """The figures in ``text`` that are not facts of the region they are told of.

    A figure belongs to the region named last before it (to both of them where both are).
    """
    known = {region: _figures(" ".join(lines)) for region, lines in facts(section).items()}
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
    word = "above" if last >= first else "below"
    return f"{abs(last - first) / first * 100:.1f} percent {word}"


def _figures(text: str) -> list[str]:
    return re.findall(r"\d+(?:[.,]\d+)*", text)
