"""`ssd doctor`: every extra, the machine, the broker."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from ssd_integrations.cli.checks import Check, machine, packages
from tests.conftest import RunSSD
from tests.unit.missing_packages import environment_without


def test_doctor_reports_every_extra_and_the_machine(run_ssd: RunSSD) -> None:
    result = run_ssd("doctor", "--json")
    report = json.loads(result.stdout)
    assert (result.returncode == 0) == report["healthy"]
    checks = {check["name"]: check for check in report["checks"]}
    assert {"python", "extra [worker]", "device", "disk", "demo model", "broker"} <= set(checks)
    assert all(check["remedy"] for check in checks.values() if check["status"] != "ok")
    torch = pytest.importorskip("torch")
    assert torch.__version__ in checks["device"]["detail"]


def test_doctor_fails_for_a_broker_that_is_away(run_ssd: RunSSD) -> None:
    result = run_ssd("doctor", "--broker-url", "redis://:hunter2@127.0.0.1:1/0")
    assert result.returncode == 1
    assert "fail  broker" in result.stdout
    assert "hunter2" not in result.stdout + result.stderr


@pytest.mark.parametrize(("cached", "needed"), [(True, "2.6 GB"), (False, "9.0 GB")])
def test_doctor_wants_more_memory_for_the_first_conversion(
    cached: bool, needed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Check("demo model", "ok" if cached else "warn", "")
    monkeypatch.setattr(machine, "_demo_model", lambda: found)
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=2e9))
    (memory,) = (check for check in machine.checks() if check.name == "memory")
    assert memory.status == "warn"
    assert needed in memory.remedy


def test_doctor_says_what_it_does_with_a_broker(run_ssd: RunSSD) -> None:
    shown = run_ssd("doctor", "--help").stdout
    assert "Look at this Redis or Valkey server" in shown
    assert "Send the request" not in shown


def test_doctor_works_without_torch(run_ssd: RunSSD, tmp_path: Path) -> None:
    result = run_ssd("doctor", "--json", env=environment_without(tmp_path, "torch"))
    assert result.returncode == 0, result.stderr
    checks = {check["name"]: check for check in json.loads(result.stdout)["checks"]}
    assert checks["device"]["status"] == "warn"
    assert "ssd-integrations[worker]" in checks["extra [worker]"]["remedy"]
    assert checks["extra [celery]"]["status"] == "ok"


def test_doctor_fails_when_no_engine_is_within_reach(run_ssd: RunSSD, tmp_path: Path) -> None:
    bare = ("torch", "transformers", "celery", "redis", "kombu", "filelock", "psutil")
    result = run_ssd("doctor", env=environment_without(tmp_path, *bare))
    assert result.returncode == 1, result.stdout + result.stderr
    assert "fail  engine" in result.stdout
    assert "Traceback" not in result.stderr


def test_requirements_come_from_the_installed_metadata() -> None:
    assert set(packages.requirements("langchain")) == {"langchain-core"}
    assert {"torch", "transformers", "celery"} <= set(packages.requirements("worker"))
    assert packages.requirements("no-such-extra") == {}
