"""Business texts from which facts are to be extracted, each with the schema of the answer.

A dozen templates take turns; names, articles, amounts, dates and addresses are drawn from a seed,
so the cases are the same at every call, and no two are alike.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any

from benchmarks.extraction_schemas import SCHEMAS

NUM_CASES = 200
_SEED = 20261

_TASK = (
    "Extract the facts from this text into one JSON object with these fields: {fields}. Dates are "
    "written YYYY-MM-DD, times HH:MM, amounts of money with two decimals and without a sign. Use "
    "null where the text does not say. Answer with the JSON alone.\n\n{text}"
)
_PEOPLE = (
    "Harriet Cole", "Idris Bello", "Marta Nowak", "Tom Ellery", "Aisha Rahman", "Joon Park",
    "Lena Fischer", "Owen Pryce", "Carla Ruiz", "Emre Demir", "Nora Lindqvist", "Paul Achterberg",
)  # fmt: skip
_COMPANIES = (
    "Northfield Surveyors", "Calder Foods", "Hollin Dental", "Marsh & Tallis", "Bright Harbour",
    "Quarry Lane Studio", "Ostermann Gardens", "Vale Logistics",
)  # fmt: skip
_STREETS = (
    "Quarry Road",
    "Harbour Street",
    "Mill Lane",
    "Station Road",
    "Orchard Close",
    "Bridge Street",
)
_CITIES = (
    ("S9 2LT", "Sheffield"), ("LS2 7EY", "Leeds"), ("SA1 3RD", "Swansea"), ("NR1 4AB", "Norwich"),
    ("BS1 5TR", "Bristol"), ("YO1 6GH", "York"),
)  # fmt: skip
_STRASSEN = ("Am Deich", "Gartenstraße", "Lindenallee", "Hafenweg")
_STAEDTE = (("26721", "Emden"), ("90402", "Nürnberg"), ("50667", "Köln"), ("04109", "Leipzig"))
_CALLES = ("calle Navas", "calle Mayor", "avenida de la Paz", "calle del Olmo")
_CIUDADES = (("23001", "Jaén"), ("47001", "Valladolid"), ("50003", "Zaragoza"))
_ARTICLES = (
    "A4 recycled paper", "black toner cartridge", "desk lamp", "label printer", "office chair",
    "whiteboard marker set", "archive box", "coffee filter pack", "cable drum", "first-aid kit",
)  # fmt: skip
_SUBJECTS = (
    "yearly inspection of the lift", "handover of the new office", "budget review",
    "training on the label printer", "interview for the warehouse post", "planning of the fair",
)  # fmt: skip
_ROOMS = ("Room Pegnitz", "the small meeting room", "Hall 3", "the canteen", "the site office")
_MESES = (
    "enero", "febrero", "marzo", "abril", "mayo", "junio", "julio", "agosto", "septiembre",
    "octubre", "noviembre", "diciembre",
)  # fmt: skip
_MONATE = (
    "Januar", "Februar", "März", "April", "Mai", "Juni", "Juli", "August", "September", "Oktober",
    "November", "Dezember",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One text with its question, and the JSON schema of the answer."""

    name: str
    prompt: str
    schema: dict[str, Any]


class _Facts:
    """Draws what the templates are filled with."""

    def __init__(self, source: random.Random) -> None:
        self._source = source
        self.people = source.sample(_PEOPLE, 3)
        self.company, self.other_company = source.sample(_COMPANIES, 2)
        self.articles = source.sample(_ARTICLES, 3)
        self.subject = source.choice(_SUBJECTS)
        self.room = source.choice(_ROOMS)
        self.quantities = [source.randrange(2, 40) for _ in self.articles]
        self.day = date(2026, 1, 5) + timedelta(days=source.randrange(340))
        self.later = self.day + timedelta(days=source.randrange(7, 40))
        self.hour = source.randrange(8, 17)
        self.minute = source.choice((0, 15, 30, 45))
        self.number = source.randrange(100_000, 999_999)

    def street(self, streets: tuple[str, ...] = _STREETS) -> str:
        return self._source.choice(streets)

    def house(self) -> int:
        return self._source.randrange(1, 180)

    def city(self, cities: tuple[tuple[str, str], ...] = _CITIES) -> tuple[str, str]:
        return self._source.choice(cities)

    def address(self) -> str:
        postcode, city = self.city()
        return f"{self.house()} {self.street()}, {city} {postcode}"

    def cents(self) -> int:
        return self._source.randrange(150, 90_000)

    def phone(self) -> str:
        return f"0{self._source.randrange(1000, 9999)} {self._source.randrange(100_000, 999_999)}"


def cases(count: int = NUM_CASES) -> list[Case]:
    """The first ``count`` cases."""
    made = []
    for number in range(count):
        schema, template = _TEMPLATES[number % len(_TEMPLATES)]
        text = template(_Facts(random.Random(_SEED + number)))
        fields = ", ".join(SCHEMAS[schema]["properties"])
        made.append(
            Case(
                f"{number + 1:03d}-{template.__name__.strip('_')}",
                _TASK.format(fields=fields, text=text),
                SCHEMAS[schema],
            )
        )
    return made


def _english(day: date) -> str:
    return f"{day.day} {day:%B} {day.year}"


def _money(cents: int, point: str = ".") -> str:
    return f"{cents // 100}{point}{cents % 100:02d}"


def _order_mail(f: _Facts) -> str:
    (a, b, c), (x, y, z) = f.articles, f.quantities
    return (
        f"Hello,\n\ncould you send us {x} of the {a} and {y} of the {b}? We also ran out of the "
        f"{c}; {z} should last until the end of the year. We need all of it by {_english(f.day)}, "
        f"as the new colleagues start then. Please have it brought to {f.address()}.\n\n"
        f"Thanks a lot\n{f.people[0]}, {f.company}"
    )


def _order_call(f: _Facts) -> str:
    return (
        f"Note of a call. {f.people[0]} rang, a private customer, and orders {f.quantities[0]} "
        f"times {f.articles[0]} and once more {f.quantities[1]} times {f.articles[1]}. There is "
        f"no hurry. The parcel goes to {f.address()}. Taken down by {f.people[1]}."
    )


def _order_spanish(f: _Facts) -> str:
    postcode, city = f.city(_CIUDADES)
    return (
        f"Buenos días, soy {f.people[0]}, de la empresa {f.company}. Para el {f.day.day} de "
        f"{_MESES[f.day.month - 1]} de {f.day.year} necesitamos {f.quantities[0]} unidades de "
        f"«{f.articles[0]}» y {f.quantities[1]} de «{f.articles[1]}». La entrega es en la "
        f"{f.street(_CALLES)}, {f.house()}, {postcode} {city}. Un saludo."
    )


def _invoice_letter(f: _Facts) -> str:
    first, second = f.cents(), f.cents()
    x, y = f.quantities[0] % 9 + 1, f.quantities[1] % 5 + 1
    return (
        f"{f.company}\nInvoice {f.day.year}-{f.number} of {_english(f.day)}\n\nDear {f.people[0]}, "
        f"for your order we charge {x} x {f.articles[0]} at £{_money(first)} each and {y} x "
        f"{f.articles[1]} at £{_money(second)} each, together £{_money(x * first + y * second)}. "
        f"Please pay by {_english(f.later)}.\n\nKind regards\n{f.people[1]}"
    )


def _invoice_paid(f: _Facts) -> str:
    price, count = f.cents(), f.quantities[0] % 12 + 1
    return (
        f"Receipt no. R{f.number}, {_english(f.day)}. Sold by {f.company} to {f.other_company}: "
        f"{f.articles[2]}, {count} pieces, {_money(price)} US dollars a piece. The sum of "
        f"{_money(count * price)} dollars was paid by card on the same day; nothing is due."
    )


def _invoice_german(f: _Facts) -> str:
    first, second = f.cents(), f.cents()
    x, y = f.quantities[0] % 6 + 1, f.quantities[1] % 6 + 1
    month, later = _MONATE[f.day.month - 1], _MONATE[f.later.month - 1]
    return (
        f"{f.company}\nRechnung Nr. {f.number} vom {f.day.day}. {month} {f.day.year}\n\nWir "
        f"berechnen {x} Stück „{f.articles[0]}“ zu je {_money(first, ',')} Euro und {y} Stück "
        f"„{f.articles[1]}“ zu je {_money(second, ',')} Euro, zusammen "
        f"{_money(x * first + y * second, ',')} Euro. Zahlbar bis zum {f.later.day}. {later} "
        f"{f.later.year}. {f.people[0]}"
    )


def _appointment_invitation(f: _Facts) -> str:
    return (
        f"Dear colleagues,\n\nthe {f.subject} does not take place online after all, but on "
        f"{_english(f.day)} from {f.hour}:{f.minute:02d} to {f.hour + 2}:{f.minute:02d} in "
        f"{f.room}. {f.people[0]} and {f.people[1]} should be there; {f.people[2]} cannot "
        "come.\n\nPlease bring the list of open points with you."
    )


def _appointment_note(f: _Facts) -> str:
    return (
        f"{f.people[0]} from {f.company} called about the {f.subject}. We agreed on "
        f"{_english(f.later)}, {f.hour}:{f.minute:02d}; how long it takes is open. It will be at "
        f"their place, {f.address()}."
    )


def _appointment_korean(f: _Facts) -> str:
    return (
        f"안녕하세요. {f.day.year}년 {f.day.month}월 {f.day.day}일 {f.hour}시 {f.minute:02d}분에 "
        f"{f.company} 회의실에서 '{f.subject}' 회의를 합니다. 참석자는 {f.people[0]} 님과 "
        f"{f.people[1]} 님입니다. 회의는 {f.hour + 1}시 {f.minute:02d}분에 끝납니다."
    )


def _address_letter(f: _Facts) -> str:
    return (
        f"To customer services. My name is {f.people[0]}, my customer number is K{f.number}. From "
        f"{_english(f.day)} I live at {f.address()}. Please send nothing to the old address, "
        f"{f.address()}, after that day. You can reach me on {f.phone()}."
    )


def _address_german(f: _Facts) -> str:
    (code, town), (other_code, other_town) = f.city(_STAEDTE), f.city(_STAEDTE)
    return (
        f"Guten Tag, hier ist {f.people[0]}, Kundennummer {f.number}. Ich ziehe um: bisher "
        f"{f.street(_STRASSEN)} {f.house()}, {code} {town}, ab dem {f.day.day}. "
        f"{_MONATE[f.day.month - 1]} {f.day.year} dann {f.street(_STRASSEN)} {f.house()}, "
        f"{other_code} {other_town}. Eine Telefonnummer habe ich dort noch nicht."
    )


def _complaint_mail(f: _Facts) -> str:
    return (
        f"Good morning, on {_english(f.day)} the {f.articles[0]} from order B{f.number} arrived, "
        f"but the housing is cracked on one side, surely from the transport. It cost "
        f"{_money(f.cents())} euros. I do not want another one, just the money back.\n\n"
        f"{f.people[0]}"
    )


_TEMPLATES: tuple[tuple[str, Callable[[_Facts], str]], ...] = (
    ("order", _order_mail),
    ("invoice", _invoice_letter),
    ("appointment", _appointment_invitation),
    ("change_of_address", _address_letter),
    ("complaint", _complaint_mail),
    ("order", _order_call),
    ("invoice", _invoice_paid),
    ("appointment", _appointment_note),
    ("order", _order_spanish),
    ("invoice", _invoice_german),
    ("appointment", _appointment_korean),
    ("change_of_address", _address_german),
)
