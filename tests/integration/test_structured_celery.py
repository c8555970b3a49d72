"""Structured output on a real worker behind a real broker: the same text, the same errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from ssd_integrations.backends.celery import CeleryBackend
from ssd_integrations.backends.local import LocalBackend
from ssd_integrations.errors import IncompleteStructureError, InvalidStructureError
from ssd_integrations.protocol import FinishedEvent, StructuredOutput, build_sampling
from tests.json_schema import conforms
from tests.structures import PERSON, PHONE, SCHEMAS
from tests.worker_support import request


@pytest.fixture(scope="module")
def local(long_model: Path) -> Iterator[LocalBackend]:
    backend = LocalBackend(model=str(long_model), dtype="float32", max_num_seqs=2, num_threads=1)
    yield backend
    backend.close()


@pytest.mark.parametrize("form", [PERSON, PHONE], ids=["schema", "regex"])
def test_same_text_as_in_process(
    shared_backend: CeleryBackend, local: LocalBackend, long_model: Path, form: StructuredOutput
) -> None:
    sampling = build_sampling(max_tokens=160, temperature=0.8, seed=3)
    ends = [
        list(backend.generate(request(long_model, sampling=sampling, structured_output=form)))[-1]
        for backend in (local, shared_backend)
    ]
    mine, theirs = ends
    assert isinstance(mine, FinishedEvent)
    assert isinstance(theirs, FinishedEvent)
    assert theirs.text == mine.text
    assert theirs.finish_reason == "stop"
    if form is PERSON:
        assert conforms(json.loads(theirs.text), SCHEMAS["person"])


def test_errors_arrive_as_their_classes(shared_backend: CeleryBackend, long_model: Path) -> None:
    with pytest.raises(IncompleteStructureError, match="json_schema"):
        list(shared_backend.generate(request(long_model, max_tokens=3, structured_output=PERSON)))
    endless = StructuredOutput(json_schema={"$ref": "#"})
    with pytest.raises(InvalidStructureError, match="no text satisfies it"):
        list(shared_backend.generate(request(long_model, structured_output=endless)))
