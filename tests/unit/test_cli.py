"""The `ssd` command as a whole: help, version, quick starts."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import textwrap

import pytest

from tests.conftest import RunSSD, ssd_environment

HEAVY = ("torch", "transformers", "celery", "redis", "langchain_core", "llama_index")


def test_help_names_every_command_and_has_examples(run_ssd: RunSSD) -> None:
    result = run_ssd("--help")
    assert result.returncode == 0, result.stderr
    for name in ("generate", "chat", "models", "worker", "up", "doctor", "workflows", "demo"):
        assert f" {name} " in result.stdout
    assert 'ssd generate "Say hello"' in result.stdout


@pytest.mark.parametrize(
    "command", ["generate", "chat", "worker", "up", "doctor", "workflows", "demo"]
)
def test_every_command_has_examples(run_ssd: RunSSD, command: str) -> None:
    result = run_ssd(command, "--help")
    assert result.returncode == 0, result.stderr
    assert "Examples:" in result.stdout
    assert f"ssd {command}" in result.stdout


def test_help_imports_nothing_heavy() -> None:
    script = textwrap.dedent(
        f"""
        import sys
        from ssd_integrations.cli import main
        sys.argv = ["ssd", "--help"]
        try:
            main()
        except SystemExit as end:
            assert not end.code, end.code
        loaded = [name for name in {HEAVY!r} if name in sys.modules]
        assert not loaded, loaded
        """
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


def test_help_takes_under_half_a_second(run_ssd: RunSSD) -> None:
    run_ssd("--help")
    # Processor time, not wall time: the machine may be busy with other tests.
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run_ssd("--help")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(times) < 0.5, times


def test_version(run_ssd: RunSSD) -> None:
    from ssd_integrations import __version__

    assert run_ssd("--version").stdout == f"ssd-integrations {__version__}\n"


def test_a_mistyped_command_is_corrected(run_ssd: RunSSD) -> None:
    result = run_ssd("genrate", "x")
    assert result.returncode == 2
    assert "'generate'" in result.stderr


def test_environment_of_the_tests_is_clean() -> None:
    os.environ["SSD_BROKER_URL"] = "redis://nowhere"
    try:
        assert "SSD_BROKER_URL" not in ssd_environment()
    finally:
        del os.environ["SSD_BROKER_URL"]
