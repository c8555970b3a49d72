"""The `ssd` command against a real broker and a real worker."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import SSD, RunSSD, ssd_environment


@pytest.fixture(scope="module")
def broker_url(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`ssd up` with the tiny model: an embedded Valkey and a worker, stopped by an interrupt."""
    folder = tmp_path_factory.mktemp("valkey")
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*SSD, "up", "--json", "--model", str(tiny_model), "--data-dir", str(folder)],
            env=ssd_environment(),
            stdout=subprocess.PIPE,
            stderr=log,
        )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, (folder / "log").read_text()
    yield json.loads(line)["broker_url"]
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 0, (folder / "log").read_text()
    process.stdout.close()


def test_the_worker_writes_what_this_process_writes(
    run_ssd: RunSSD, tiny_model: Path, broker_url: str
) -> None:
    args = ["generate", "the router", "--model", str(tiny_model), "--max-tokens", "24", "--json"]
    args += ["--temperature", "0.8", "--seed", "7"]
    here = json.loads(run_ssd(*args).stdout)
    there = run_ssd(*args, env={"SSD_BROKER_URL": broker_url})
    assert there.returncode == 0, there.stderr
    answer = json.loads(there.stdout)
    for key in ("text", "finish_reason", "usage", "model"):
        assert answer[key] == here[key]


def test_the_stream_comes_through_a_broker(
    run_ssd: RunSSD, tiny_model: Path, broker_url: str
) -> None:
    lines = "hello\n"
    options = ["--model", str(tiny_model), "--max-tokens", "8", "--broker-url", broker_url]
    result = run_ssd("chat", *options, stdin=lines)
    assert result.returncode == 0, result.stderr
    assert "acceptance length" in result.stderr
    assert result.stdout.strip()


def test_doctor_names_the_server_and_what_the_worker_serves(
    run_ssd: RunSSD, tiny_model: Path, broker_url: str
) -> None:
    report = json.loads(run_ssd("doctor", "--json", "--broker-url", broker_url).stdout)
    checks = {check["name"]: check for check in report["checks"]}
    assert checks["broker"]["status"] == "ok"
    assert "valkey 9" in checks["broker"]["detail"]
    assert checks["workers"]["status"] == "ok"
    assert str(tiny_model) in checks["workers"]["detail"]
    assert "LlamaForCausalLM" in checks["workers"]["detail"]


def test_a_model_that_nobody_serves_is_an_error_by_its_deadline(
    run_ssd: RunSSD, broker_url: str
) -> None:
    options = ["--model", "nobody-serves-this", "--broker-url", broker_url, "--timeout", "2"]
    result = run_ssd("generate", "hi", "--json", *options)
    assert result.returncode == 1
    assert json.loads(result.stdout)["error"]["code"] == "worker_unavailable"
