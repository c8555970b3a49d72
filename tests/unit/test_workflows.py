"""Workflows by entry point: found, run, and harmless when broken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ssd_integrations.cli.lazy import BUILTIN_COMMANDS
from ssd_integrations.workflows import RESERVED_NAMES, discover
from tests.conftest import RunSSD

MODULE = """\
import typer

from ssd_integrations.workflows import Workflow

app = typer.Typer()

@app.command()
def first(times: int = 1) -> None:
    print("first " * times)

@app.command()
def second() -> None:
    print("second")

def single(name: str, loud: bool = False) -> None:
    print(f"hello {name}" + "!" * loud)

class Other:
    name, summary, app = "other", "Not of our class.", staticmethod(single)

apps = Workflow("acme-apps", "Several commands.", "acme_flows:app")
function = Workflow("acme-one", "One function.", single)
other = Other()
renamed = Workflow("something-else", "Wrong name.", single)
nothing = object()
"""
ENTRY_POINTS = """\
[ssd_integrations.workflows]
acme-apps = acme_flows:apps
acme-one = acme_flows:function
other = acme_flows:other
missing = acme_flows:no_such_thing
raises = acme_raises:workflow
renamed = acme_flows:renamed
nothing = acme_flows:nothing
Bad Name = acme_flows:function
"""


@pytest.fixture
def acme(tmp_path: Path) -> Path:
    """A folder for PYTHONPATH that holds an installed distribution with workflows."""
    info = tmp_path / "acme_flows-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-flows\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    (tmp_path / "acme_flows.py").write_text(MODULE)
    (tmp_path / "acme_raises.py").write_text("raise RuntimeError('no licence file')\n")
    return tmp_path


def test_the_demo_is_discovered_without_its_app() -> None:
    (demo,) = discover(only="demo")
    assert demo.error is None
    assert demo.workflow is not None
    assert isinstance(demo.workflow.app, str)


def test_listing_holds_the_good_and_explains_the_broken(run_ssd: RunSSD, acme: Path) -> None:
    result = run_ssd("workflows", "--json", env={"PYTHONPATH": str(acme)})
    assert result.returncode == 0, result.stderr
    rows = {row["name"]: row for row in json.loads(result.stdout)}
    assert {name for name, row in rows.items() if row["error"] is None} == {
        "demo",
        "acme-apps",
        "acme-one",
        "other",
    }
    assert rows["acme-one"]["package"] == "acme-flows 1.2"
    assert "no_such_thing" in rows["missing"]["error"]
    assert "no licence file" in rows["raises"]["error"]
    assert "something-else" in rows["renamed"]["error"]
    assert "name, summary and app" in rows["nothing"]["error"]
    assert "lower-case" in rows["Bad Name"]["error"]


def test_workflows_run_as_commands(run_ssd: RunSSD, acme: Path) -> None:
    env = {"PYTHONPATH": str(acme)}
    assert run_ssd("acme-apps", "first", "--times", "2", env=env).stdout == "first first \n"
    assert run_ssd("acme-one", "you", "--loud", env=env).stdout == "hello you!\n"
    assert run_ssd("other", "me", env=env).stdout == "hello me\n"


def test_a_broken_workflow_shows_in_the_help_and_fails_alone(run_ssd: RunSSD, acme: Path) -> None:
    env = {"PYTHONPATH": str(acme)}
    shown = run_ssd("--help", env=env)
    assert shown.returncode == 0
    assert "Broken: RuntimeError: no licence file" in shown.stdout
    result = run_ssd("raises", env=env)
    assert result.returncode == 1
    assert "acme-flows 1.2" in result.stderr
    assert "Traceback" not in result.stderr
    assert run_ssd("acme-one", "x", env=env).returncode == 0


def test_a_workflow_cannot_take_a_name_that_is_taken(run_ssd: RunSSD, tmp_path: Path) -> None:
    info = tmp_path / "thief-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: thief\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[ssd_integrations.workflows]\ndoctor = a_thief:w\ndemo = a_thief:w\n"
    )
    (tmp_path / "a_thief.py").write_text(
        "from ssd_integrations.workflows import Workflow\nw = Workflow('demo', 's', print)\n"
    )
    env = {"PYTHONPATH": str(tmp_path)}
    assert "Check this machine" in run_ssd("doctor", "--help", env=env).stdout
    rows = json.loads(run_ssd("workflows", "--json", env=env).stdout)
    found = {(row["name"], row["entry_point"]): row["error"] for row in rows}
    assert found["demo", "ssd_workflows.demo:workflow"] is None
    assert "already has this name" in found["demo", "a_thief:w"]
    assert "built-in" in found["doctor", "a_thief:w"]


def test_every_built_in_command_is_reserved() -> None:
    assert set(BUILTIN_COMMANDS) | {"help"} == RESERVED_NAMES
