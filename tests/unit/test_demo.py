"""The demo's parts: its figures, its jobs over any chat model, its measurement."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

import pytest
import typer

from ssd_integrations import extras
from ssd_integrations.errors import EngineError
from ssd_integrations.protocol import build_speculation
from ssd_workers.bench.decoders import Answer, Decoder, EngineDecoder
from ssd_workers.bench.measure import Results, Sample, run
from ssd_workers.bench.suites import Item, Turn
from ssd_workers.bench.transformers_decoder import TransformersDecoder, TransformersModel
from ssd_workflows.demo import command, steps
from ssd_workflows.demo.compare import require_same_text, rows, samples_as_json
from ssd_workflows.demo.material import SALES, facts, misplaced_figures, section_prompt


def test_the_facts_are_computed_from_the_sales() -> None:
    prompt = section_prompt("Bicycles")
    assert "| Region | July | August | September | September against July |" in prompt
    row = "| North region | 41,200 euros | 43,900 euros | 47,300 euros | +14.8 percent |"
    assert row in prompt
    total = "| Both regions | 79,700 euros | 80,000 euros | 87,100 euros | +9.3 percent |"
    assert total in prompt


@pytest.mark.parametrize("section", list(SALES))
def test_a_section_of_its_own_facts_has_no_misplaced_figure(section: str) -> None:
    told = "\n".join(facts(section).values())
    assert misplaced_figures(section, told) == []


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("In the North region, sales were 47,300 euros.", []),
        ("In the North region, sales were 99 euros.", ["99 (North region)"]),
        ("In the South region, sales were 47,300 euros.", ["47,300 (South region)"]),
        ("The north grew 14.8 percent and the south 3.4 percent.", []),
        ("The south grew 14.8 percent.", ["14.8 (South region)"]),
        ("South: 39,800. North and South made 87,100.", []),
        ("South: 39,800. Overall 87,100.", []),
        ("In both regions 87,101.", ["87,101 (Both regions)"]),
        ("The North region sold for 47300 euros.", ["47300 (North region)"]),
    ],
)
def test_figures_are_bound_to_their_region(text: str, wrong: list[str]) -> None:
    assert misplaced_figures("Bicycles", text) == wrong


@pytest.mark.parametrize("missing", ["torch", "langchain_core", "llama_index", "celery"])
def test_without_its_packages_the_demo_names_the_extra(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        extras, "find_spec", lambda name: None if name == missing else find_spec(name)
    )
    with pytest.raises(typer.Exit) as ended:
        command.demo(as_json=True)
    assert ended.value.exit_code == 1
    shown = capsys.readouterr()
    error = json.loads(shown.out)["error"]
    assert error["code"] == "missing_extra"
    assert "ssd-integrations[all]" in error["remedy"]
    assert shown.err == ""


def test_the_jobs_run_over_any_chat_model() -> None:
    from langchain_core.language_models import FakeListChatModel

    pieces: list[str] = []
    reply = steps.support_reply(FakeListChatModel(responses=["You can change it."]), pieces.append)
    assert reply == "You can change it."
    assert "".join(pieces) == reply
    assert len(pieces) > 1

    told: list[tuple[str, int, bool]] = []
    writer = FakeListChatModel(responses=["The South region made 47,300 euros."])
    sections = steps.report_sections(writer, lambda *row: told.append(row), ["Bicycles"])
    assert [section.name for section in sections] == ["Bicycles"]
    assert sections[0].misplaced == ["47,300 (South region)"]
    assert told[-1] == ("Bicycles", 6, True)
    assert not any(done for _, _, done in told[:-1])


@pytest.fixture(scope="module")
def decoders(tiny_model: Path) -> Iterator[list[Decoder]]:
    """transformers and the engine, in float32, on one tiny model."""
    from ssd_integrations.backends import open_backend

    name = str(tiny_model)
    with closing(open_backend(model=name, dtype="float32")) as backend:
        yield [
            TransformersDecoder("library", TransformersModel(name)),
            EngineDecoder("plain", backend, name, build_speculation(mode="off")),
            EngineDecoder("fast", backend, name, build_speculation(mode="ngram")),
        ]


def _item(name: str, max_tokens: int) -> Item:
    prompt = Turn(role="user", content="Please restart the router, then restart it again.")
    return Item(id=name, category="c", language="en", messages=(prompt,), max_tokens=max_tokens)


def test_every_decoder_counts_and_writes_alike(decoders: list[Decoder]) -> None:
    told: list[tuple[int, int]] = []
    result = run(
        decoders,
        [_item("first", 24), _item("second", 12)],
        rounds=2,
        on_sample=lambda *row: told.append(row),
    )
    assert told[0] == (0, 12)
    assert told[-1] == (12, 12)
    assert [s.decoder for s in result.samples[:3]] == ["library", "plain", "fast"]
    assert require_same_text(result, "library", "plain") > 0
    assert require_same_text(result, "plain", "fast") > 0
    for answer in samples_as_json(result):
        assert answer["tokens"] == len(answer["token_ids"])
        assert 0 < answer["time_to_first_token_s"] <= answer["total_s"]
    table = {row.decoder: row for row in rows(result)}
    assert table["library"].speed_up == 1.0
    assert table["library"].acceptance_length == 1.0
    assert table["plain"].acceptance_length == 1.0


def _sample(decoder: str, ids: tuple[int, ...], seconds: float, number: int = 0) -> Sample:
    answer = Answer(0.5 * seconds, seconds, len(ids), 1, len(ids) - 1, ids, "x")
    return Sample(decoder, "t", "c", number, (answer,))


def test_a_changed_token_fails_the_comparison() -> None:
    result = Results(["a", "b"], [_sample("a", (1, 2, 3), 1.0), _sample("b", (1, 9, 3), 1.0)])
    with pytest.raises(EngineError, match="token 1"):
        require_same_text(result, "a", "b")
    shorter = Results(["a", "b"], [_sample("a", (1, 2, 3), 1.0), _sample("b", (1, 2), 1.0)])
    with pytest.raises(EngineError, match="the end"):
        require_same_text(shorter, "a", "b")


def test_rows_are_medians_and_ratios_to_the_first() -> None:
    samples = [_sample("a", (1, 2), s, i) for i, s in enumerate((1.0, 2.0, 8.0))]
    samples += [_sample("b", (1, 2), s, i) for i, s in enumerate((0.5, 0.4, 0.1))]
    slow, fast = rows(Results(["a", "b"], samples))
    assert slow.tokens_per_second == 1.0
    assert fast.tokens_per_second == 5.0
    assert fast.speed_up == 5.0


def test_a_failed_answer_fails_the_table() -> None:
    failed = Sample("b", "t", "c", 0, (), "no room")
    with pytest.raises(EngineError, match="b failed on 't': no room"):
        rows(Results(["a", "b"], [_sample("a", (1, 2), 1.0), failed]))
