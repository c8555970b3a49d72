"""The tree of errors: codes, remedies, the way over the wire and through a pickle."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from ssd_integrations import errors
from ssd_integrations.errors import MissingExtraError, SSDError, error_from_code
from ssd_integrations.protocol import ErrorInfo


def _all_kinds() -> list[type[SSDError]]:
    found, waiting = [], [SSDError]
    while waiting:
        kind = waiting.pop()
        found.append(kind)
        waiting += kind.__subclasses__()
    return found


KINDS = _all_kinds()


def test_codes_are_unique_and_remedies_are_sentences() -> None:
    assert len({kind.code for kind in KINDS}) == len(KINDS)
    for kind in KINDS:
        assert kind.default_remedy.endswith((".", ")")), kind
        assert kind.__module__ == errors.__name__


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.code)
def test_an_error_crosses_the_wire_as_its_own_class(kind: type[SSDError]) -> None:
    info = ErrorInfo.from_json(ErrorInfo.from_error(kind("It broke at 7.")).to_json())
    back = info.to_error()
    assert type(back) is kind
    assert (back.message, back.remedy) == ("It broke at 7.", kind.default_remedy)
    assert info.retryable is kind.retryable


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.code)
def test_an_error_survives_a_pickle(kind: type[SSDError]) -> None:
    back = pickle.loads(pickle.dumps(kind("m", remedy="r")))
    assert type(back) is kind
    assert (back.message, back.remedy, str(back)) == ("m", "r", "m r")


def test_a_newer_workers_code_keeps_its_name() -> None:
    error = error_from_code("quota_of_tomorrow", "No more.", "Wait.")
    assert type(error) is SSDError
    assert "quota_of_tomorrow" in str(error)
    assert error.remedy == "Wait."


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (errors.InvalidRequestError, ValueError),
        (errors.BrokerUnavailableError, ConnectionError),
        (errors.DeadlineExceededError, TimeoutError),
        (errors.MissingExtraError, ImportError),
    ],
)
def test_callers_may_catch_the_builtin(kind: type[SSDError], builtin: type[Exception]) -> None:
    with pytest.raises(builtin):
        raise kind("x")


def test_missing_extra_names_the_command() -> None:
    error = MissingExtraError.for_extra("ChatSSD", "langchain")
    assert "ssd-integrations[langchain]" in error.remedy


def test_the_documentation_lists_every_error() -> None:
    page = (Path(__file__).parents[2] / "docs" / "errors.md").read_text(encoding="utf-8")
    rows = set()
    for line in page.splitlines():
        cells = [cell.strip().strip("`") for cell in line.strip("|").split("|")]
        if len(cells) == 5 and cells[3] in ("yes", "no"):
            rows.add((cells[0], cells[1], cells[3] == "yes"))
    assert rows == {(kind.code, kind.__name__, kind.retryable) for kind in KINDS}
