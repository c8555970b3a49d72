"""The suites: how many prompts of which kind and language, and what a suite file must be."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from ssd_integrations.errors import InvalidRequestError
from ssd_workers.bench.suites import SUITES, Item, load_suite

BUSINESS = {
    "copilot-reply", "report-section", "translation", "summary", "extraction", "multi-turn",
}  # fmt: skip
GENERAL = {
    "multi-turn-conversation", "translation", "summarisation", "question-answering",
    "mathematical-reasoning", "retrieval-augmented-generation",
}  # fmt: skip
LANGUAGES = {"en", "ko", "es", "de"}

USER = {"role": "user", "content": "Hello."}
SYSTEM = {"role": "system", "content": "Be brief."}
ITEM = {"id": "a", "category": "c", "language": "en", "messages": [USER], "max_tokens": 8}


@pytest.mark.parametrize(("name", "categories", "least"), [
    ("business", BUSINESS, 10), ("general", GENERAL, 5),
])  # fmt: skip
def test_counts_of_the_suites(name: str, categories: set[str], least: int) -> None:
    items = load_suite(name)
    counts = Counter(item.category for item in items)
    assert set(counts) == categories
    assert min(counts.values()) >= least
    assert len({item.id for item in items}) == len(items)
    assert len({item.messages for item in items}) == len(items)
    for category in categories:
        found = {item.language for item in items if item.category == category}
        assert found >= LANGUAGES, category


def test_business_prompts_have_realistic_lengths() -> None:
    for item in load_suite("business"):
        text = item.user_turns[0]
        words = len(text.split())
        if item.category in ("copilot-reply", "summary"):
            # A Korean word carries what takes an article, a noun and a preposition elsewhere.
            assert 140 <= words <= 380, (item.id, words)
        elif item.category == "report-section":
            facts = [line for line in text.splitlines() if line.startswith("- ")]
            assert 8 <= len(facts) <= 15, item.id
        elif item.category == "multi-turn":
            assert len(item.user_turns) >= 3, item.id
        else:
            assert words >= 80, (item.id, words)


def test_no_prompt_asks_for_repetition() -> None:
    words = ("repeat", "wiederhole", "repite", "반복", "again and again", "verbatim")
    for name in ("business", "general"):
        for item in load_suite(name):
            for turn in item.messages:
                assert not any(word in turn.content.lower() for word in words), item.id


def test_similar_reports_are_twenty_and_always_the_same() -> None:
    items = load_suite("similar-reports")
    assert items == load_suite("similar-reports")
    assert [item.category for item in items] == ["first-half"] * 10 + ["second-half"] * 10
    prompts = [item.user_turns[0] for item in items]
    assert len(set(prompts)) == 20
    assert len({prompt.splitlines()[0] for prompt in prompts}) == 1


def test_a_limit_spreads_over_categories_and_keeps_the_order() -> None:
    everything = [item.id for item in load_suite("business")]
    items = load_suite("business", limit=13)
    assert len(items) == 13
    counts = Counter(item.category for item in items)
    assert set(counts) == BUSINESS
    assert sorted(counts.values()) == [2, 2, 2, 2, 2, 3]
    assert [item.id for item in items] == [i for i in everything if i in {x.id for x in items}]
    # A small selection has several languages too.
    assert {item.language for item in load_suite("business", limit=6)} >= LANGUAGES
    assert len(load_suite("business", limit=10_000)) == len(everything)


def test_a_file_is_a_suite(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    talk = {**ITEM, "id": "b", "messages": [SYSTEM, USER, USER]}
    lines = [json.dumps(ITEM), "", json.dumps(talk)]
    file.write_text("\n".join(lines), encoding="utf-8")
    one, two = load_suite(str(file))
    assert one.system is None
    assert two.system == "Be brief."
    assert two.user_turns == ("Hello.", "Hello.")


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("{", "line 1 of bad.jsonl: not JSON"),
        ("[" * 100_000, "line 1 of bad.jsonl: not JSON .too many levels"),
        (json.dumps({**ITEM, "max_tokens": 0}), "line 1 of bad.jsonl: max_tokens=0"),
        (json.dumps({**ITEM, "language": "English"}), "language='English'"),
        (json.dumps({**ITEM, "surprise": 1}), "surprise=1"),
        (json.dumps({**ITEM, "messages": []}), "messages=\\[\\]"),
        (json.dumps({**ITEM, "messages": [SYSTEM]}), "no turn of the user"),
        (json.dumps({**ITEM, "messages": [USER, SYSTEM]}), "can only be the first"),
        (json.dumps({k: v for k, v in ITEM.items() if k != "id"}), "id="),
        (json.dumps(ITEM) + "\n" + json.dumps(ITEM), "the id 'a' twice"),
        ("", "no prompts"),
    ],
)
def test_bad_suite_files_are_refused(line: str, fault: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(line + "\n", encoding="utf-8")
    with pytest.raises(InvalidRequestError, match=fault):
        load_suite(str(file))


def test_unknown_suites_and_limits_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="Did you mean 'business'") as caught:
        load_suite("busines")
    assert all(name in caught.value.remedy for name in SUITES)
    with pytest.raises(InvalidRequestError, match="limit=0"):
        load_suite("business", limit=0)
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidRequestError, match="cannot be read"):
        load_suite(str(binary))


def test_the_bounds_of_an_item() -> None:
    assert Item.model_validate(ITEM).user_turns == ("Hello.",)
