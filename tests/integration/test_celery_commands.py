"""`ssd worker` and `ssd up` as a user runs them: ready lines, clean ends, plain failures."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ssd_integrations.backends.celery import CeleryBackend
from ssd_integrations.errors import BrokerUnavailableError
from ssd_workers.embedded import EmbeddedValkey
from tests.conftest import SSD, RunSSD, ssd_environment
from tests.worker_support import START_TIMEOUT_S, children_of, client, is_alive, request, wait_until

Up = Callable[..., "subprocess.Popen[str]"]


def descendants(pid: int) -> list[int]:
    found = []
    for child in children_of(pid):
        found += [child, *descendants(child)]
    return found


@pytest.fixture
def start_up(tmp_path: Path, long_model: Path) -> Up:
    def start(*arguments: str) -> subprocess.Popen[str]:
        command = [*SSD, "up", "--model", str(long_model), "--dtype", "float32", "--json"]
        command += ["--num-threads", "1", "--data-dir", str(tmp_path / "data")]
        command += ["--suffix-store", str(tmp_path / "answers.ssd"), *arguments]
        return subprocess.Popen(
            command,
            env=ssd_environment(),
            stdout=subprocess.PIPE,
            stderr=(tmp_path / "up.log").open("w"),
            text=True,
            # Its own group, so that SIGINT can go to all of it as a terminal's Ctrl-C does.
            start_new_session=True,
        )

    return start


def test_up_serves_and_ctrl_c_leaves_nothing_behind(
    start_up: Up, long_model: Path, tmp_path: Path
) -> None:
    up = start_up()
    assert up.stdout is not None
    ready = json.loads(up.stdout.readline())
    assert ready["model"] == str(long_model)
    backend = CeleryBackend(ready["broker_url"])
    stream = backend.generate(request(long_model, 600))
    next(stream)
    processes = descendants(up.pid)
    assert ready["pid"] in processes
    assert len(processes) == 2
    os.killpg(up.pid, signal.SIGINT)
    # The running request may finish: draining is part of a clean stop.
    last = list(stream)[-1]
    assert last.type == "finished"
    assert up.wait(30) == 0
    assert not any(is_alive(pid) for pid in processes)
    assert (tmp_path / "answers.ssd").exists()
    with pytest.raises(BrokerUnavailableError):
        backend.models()
    backend.close()


def test_up_killed_outright_leaves_nothing_behind(start_up: Up) -> None:
    up = start_up("--grace-s", "1")
    assert up.stdout is not None
    assert json.loads(up.stdout.readline())["pid"]
    processes = descendants(up.pid)
    assert len(processes) == 2
    up.kill()
    up.wait()
    wait_until(lambda: not any(is_alive(pid) for pid in processes), 15, "children end")


def test_up_interrupted_while_loading(start_up: Up) -> None:
    up = start_up()
    wait_until(lambda: len(descendants(up.pid)) == 2, START_TIMEOUT_S, "the worker is started")
    processes = descendants(up.pid)
    os.killpg(up.pid, signal.SIGINT)
    assert up.wait(30) == 0
    assert not any(is_alive(pid) for pid in processes)


def test_two_servers_never_share_a_folder(broker: EmbeddedValkey, tmp_path: Path) -> None:
    with pytest.raises(BrokerUnavailableError, match="Another embedded Valkey"):
        EmbeddedValkey(data_dir=tmp_path / "broker").start()
    broker.stop()
    with EmbeddedValkey(data_dir=tmp_path / "broker") as again:
        assert again.pid is not None


def test_up_on_a_taken_port_says_so(
    run_ssd: RunSSD, broker: EmbeddedValkey, tmp_path: Path
) -> None:
    port = broker.url.rsplit(":", 1)[1].split("/")[0]
    done = run_ssd("up", "--port", port, "--data-dir", str(tmp_path / "other"))
    assert done.returncode == 1
    assert f"port {port} did not start" in done.stderr
    assert "--port" in done.stderr


def test_a_model_that_cannot_be_loaded_ends_the_worker(
    run_ssd: RunSSD, broker: EmbeddedValkey, tmp_path: Path
) -> None:
    done = run_ssd("worker", "--model", str(tmp_path / "nothing"), "--broker-url", broker.url)
    assert done.returncode == 78
    assert "cannot load its model" in done.stderr
    assert str(tmp_path / "nothing") in done.stderr
    assert "Traceback" not in done.stderr


def test_worker_refuses_bad_options_before_it_starts(run_ssd: RunSSD) -> None:
    done = run_ssd("worker", "--broker-url", "amqp://host")
    assert done.returncode == 2
    assert "amqp://host" in done.stderr
    done = run_ssd("worker", "--max-num-seqs", "0")
    assert done.returncode == 2
    assert "max_num_seqs=0" in done.stderr


def test_worker_without_a_broker_says_so(run_ssd: RunSSD) -> None:
    started = time.monotonic()
    done = run_ssd("worker", env={"SSD_BROKER_URL": "redis://:s3cret@127.0.0.1:1/0"})
    assert time.monotonic() - started < 20
    assert done.returncode == 1
    assert "127.0.0.1:1" in done.stderr
    assert "s3cret" not in done.stderr


#: The rights that docs/workers.md asks for.
RIGHTS = (
    "~ssd:* &ssd:/0.celery.pidbox &ssd:cancel +@read +@write +@pubsub +@transaction "
    "+@scripting +@connection +@blocking +time +info"
)


def test_a_password_appears_in_no_argument_and_no_log(
    broker: EmbeddedValkey, long_model: Path, tmp_path: Path
) -> None:
    with client(broker.url) as redis:
        redis.execute_command("ACL", "SETUSER", "app", "on", ">s3cret", *RIGHTS.split())
        redis.execute_command("ACL", "SETUSER", "default", "resetchannels", "resetkeys")
        secret_url = broker.url.replace("redis://", "redis://app:s3cret@")
        log = tmp_path / "worker.log"
        with log.open("w") as output:
            worker = subprocess.Popen(
                [*SSD, "worker", "--model", str(long_model), "--dtype", "float32"],
                env=ssd_environment(SSD_BROKER_URL=secret_url),
                stdout=output,
                stderr=output,
            )
        backend = CeleryBackend(secret_url)
        try:
            wait_until(backend.workers, START_TIMEOUT_S, "the worker is ready")
            assert list(backend.generate(request(long_model)))[-1].type == "finished"
            for pid in [worker.pid, *descendants(worker.pid)]:
                assert b"s3cret" not in Path(f"/proc/{pid}/cmdline").read_bytes()
        finally:
            worker.terminate()
            worker.wait(30)
            backend.close()
    assert "s3cret" not in log.read_text()
    with pytest.raises(BrokerUnavailableError) as caught:
        CeleryBackend("redis://:s3cret@127.0.0.1:1").models()
    assert "s3cret" not in str(caught.value)
