"""The JSON schemas of the official test suite: an answer satisfies its schema, or there is none.

The suite comes with the source distribution of jsonschema, which pip fetches.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ssd_integrations.errors import InvalidStructureError
from ssd_integrations.protocol import (
    Event,
    FailedEvent,
    FinishedEvent,
    SamplingParams,
    StructuredOutput,
)
from ssd_workers.engine.drafters.ngram import NgramDrafter
from ssd_workers.engine.grammar import GrammarState
from ssd_workers.engine.grammar_compiler import GrammarCompiler
from ssd_workers.engine.loading import LoadedModel
from tests.engine_support import Job, load_tiny, output_ids, run_to_end
from tests.json_schema import faults
from tests.tiny import make_tiny_model

pytestmark = pytest.mark.slow

SOURCE = "jsonschema-4.25.1"
REQUIREMENT = (
    "jsonschema==4.25.1 "
    "--hash=sha256:e4a9655ce0da0c0b67a085847e00a3a51449e1157f4f75e9fb5aa545e122eb85"
)
# What each seed adds to the tokens that close something: short answers, longer ones, endless ones.
BIASES = (6.0, 3.0, 2.0, 1.0, 0.5, 4.0)
ROOM = 200
ROWS = 32
# What `$schema` says in each draft; some of the suite's schemas leave it out.
DRAFTS = {
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft4": "http://json-schema.org/draft-04/schema#",
}
# What the suite calls invalid and the parser takes: docs/structured-output.md names it.
KNOWN = {
    "date.json": "-02-29",
    "date-time.json": ":60",
    "time.json": ":60",
    # White space in ECMA-262, but not in Unicode.
    "ecmascript-regex.json": "\ufeff",
}
ANNOTATIONS = "content.json"


@dataclass(frozen=True)
class Floor:
    """A little below what there is."""

    answered: int
    whole_answers: int


FLOORS = {"draft2020-12": Floor(200, 1150), "draft7": Floor(194, 1120)}
# How many valid texts can be written, and how many invalid ones cannot.
EXAMPLE_FLOORS = {
    "draft2020-12": (520, 400),
    "draft2019-09": (525, 400),
    "draft7": (460, 370),
    "draft6": (405, 335),
    "draft4": (370, 285),
}


@dataclass(frozen=True)
class Case:
    """A schema of the suite, and values of which the suite says whether they satisfy it."""

    file: str
    schema: dict[str, Any]
    examples: list[dict[str, Any]]


@pytest.fixture(scope="session")
def suite(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with a folder for each draft; fetched once, into pytest's cache."""
    cache = request.config.cache.mkdir("json-schema-suite")
    archive = cache / f"{SOURCE}.tar.gz"
    if not archive.is_file():
        wanted = cache / "requirements.txt"
        wanted.write_text(REQUIREMENT)
        command = [
            sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", "jsonschema",
            "--requirement", str(wanted), "--dest", str(cache),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path_factory.mktemp("json-schema-suite")
    with tarfile.open(archive) as packed:
        members = [m for m in packed if m.name.startswith(f"{SOURCE}/json/tests/")]
        packed.extractall(folder, members, filter="data")
    return folder / SOURCE / "json" / "tests"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_tiny(make_tiny_model(tmp_path_factory.mktemp("suite") / "tiny"))


@pytest.fixture(scope="module")
def compiler(target: LoadedModel) -> GrammarCompiler:
    return GrammarCompiler(target.tokenizer, target.vocab_size, target.eos_token_ids)


def cases(suite: Path, draft: str) -> list[Case]:
    """Every schema of ``draft`` that is an object, once in each file."""
    found: dict[str, Case] = {}
    for file in sorted((suite / draft).rglob("*.json")):
        for group in json.loads(file.read_text(encoding="utf-8")):
            schema = group["schema"]
            if isinstance(schema, dict):
                schema = {"$schema": DRAFTS[draft], **schema}
                case = Case(file.name, schema, [])
                found.setdefault(file.name + json.dumps(schema), case).examples.extend(
                    group["tests"]
                )
    return list(found.values())


def divide(compiler: GrammarCompiler, found: list[Case]) -> tuple[list[Case], Counter[str]]:
    """The schemas that can be kept, and why how many of the others cannot."""
    kept: list[Case] = []
    refused: Counter[str] = Counter()
    for case in found:
        try:
            compiler.start(StructuredOutput(json_schema=case.schema))
        except InvalidStructureError as error:
            keywords = re.search(r"Unimplemented keys: \[(.*?)\]", error.message)
            reason = re.sub(r"^json_schema=.*?(cannot be|no text)", r"\1", error.message)
            refused.update(keywords[1].split(", ") if keywords else [reason[:70]])
        else:
            kept.append(case)
    return kept, refused


def job(target: LoadedModel, case: Case, seed: int) -> Job:
    closing = {
        token: BIASES[seed]
        for token in range(len(target.tokenizer))
        if set(target.tokenizer.decode([token])) & set('"]}')
    }
    bias = {**closing, **dict.fromkeys(target.eos_token_ids, 2 * BIASES[seed])}
    sampling = SamplingParams(temperature=1.0, logit_bias=bias)
    structure = StructuredOutput(json_schema=case.schema)
    return Job([5 + seed, 9, 7], ROOM, sampling, seed=seed, structure=structure)


def check(target: LoadedModel, case: Case, event: Event) -> bool:
    """Whether the answer is whole; fails if it is and does not satisfy the schema."""
    if isinstance(event, FailedEvent):
        assert event.error.code == "incomplete_structure", (case, event.error)
        return False
    assert isinstance(event, FinishedEvent)
    text = target.tokenizer.decode(output_ids(event))
    wrong = faults(json.loads(text), case.schema)
    assert not wrong, (case, text, wrong)
    return True


def outcome(event: Event) -> list[int] | str:
    return output_ids(event) if isinstance(event, FinishedEvent) else event.error.code


@pytest.mark.parametrize("draft", FLOORS)
def test_whole_answers_satisfy_their_schema(
    draft: str, suite: Path, target: LoadedModel, compiler: GrammarCompiler
) -> None:
    found = cases(suite, draft)
    kept, refused = divide(compiler, found)
    whole: Counter[int] = Counter()
    for seed in range(len(BIASES)):
        jobs = [job(target, case, seed) for case in kept]
        events = run_to_end(target, jobs, max_num_seqs=ROWS)
        for index, event in enumerate(events):
            whole[index] += check(target, kept[index], event)
        if seed == 0:
            drafted = run_to_end(target, jobs, NgramDrafter(), max_num_seqs=ROWS)
            assert [outcome(event) for event in drafted] == [outcome(event) for event in events]
            assert (
                sum(
                    e.speculation.num_accepted_tokens
                    for e in drafted
                    if isinstance(e, FinishedEvent)
                )
                > 0
            )
    answered = sum(count > 0 for count in whole.values())
    print(f"{draft}: {len(found)} schemas, {len(kept)} kept, {answered} of them answered")
    print(f"  {whole.total()} of {len(kept) * len(BIASES)} answers are whole")
    for reason, count in refused.most_common():
        print(f"  refused {count:>3} {reason}")
    assert answered >= FLOORS[draft].answered
    assert FLOORS[draft].whole_answers <= whole.total() < len(kept) * len(BIASES)


@pytest.mark.parametrize("draft", DRAFTS)
def test_values_that_the_suite_calls_invalid_cannot_be_written(
    draft: str, suite: Path, target: LoadedModel, compiler: GrammarCompiler
) -> None:
    taken: Counter[tuple[bool, bool]] = Counter()
    for case in divide(compiler, cases(suite, draft))[0]:
        for example in case.examples:
            text = json.dumps(example["data"], ensure_ascii=False, separators=(",", ":"))
            if not example["valid"] and is_known(case, text):
                continue
            state = compiler.start(StructuredOutput(json_schema=case.schema))
            can_be_written = takes(state, target, text)
            assert example["valid"] or not can_be_written, (case.schema, text)
            taken[example["valid"], can_be_written] += 1
    # Of those that are not taken most have their properties in another order.
    print(f"{draft}: {taken[True, True]} valid texts taken, {taken[True, False]} not")
    print(f"  {taken[False, False]} invalid texts refused")
    valid, invalid = EXAMPLE_FLOORS[draft]
    assert taken[True, True] >= valid
    assert taken[False, False] >= invalid


def is_known(case: Case, text: str) -> bool:
    return case.file == ANNOTATIONS or (case.file in KNOWN and KNOWN[case.file] in text)


def takes(state: GrammarState, target: LoadedModel, text: str) -> bool:
    """Whether ``text`` is a whole answer."""
    for token in target.tokenizer.encode(text):
        allowed = state.allowed([])
        assert allowed is not None
        if not allowed[token]:
            return False
        state.advance([token], None)
    allowed = state.allowed([])
    assert allowed is not None
    return bool(allowed[list(target.eos_token_ids)].any())
