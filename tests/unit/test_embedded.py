"""The embedded Valkey where it cannot run: plain errors, early; and who may read its files."""

from __future__ import annotations

import json
import shutil
import socket
import stat
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from ssd_integrations.errors import BrokerUnavailableError, DiskFullError
from ssd_workers.embedded import EmbeddedValkey
from tests.conftest import RunSSD
from tests.worker_support import client


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "broker"
    with pytest.raises(BrokerUnavailableError, match=r"cannot keep its data in .*file/broker"):
        EmbeddedValkey(data_dir=folder).start()


def test_a_full_disk_is_told_before_the_server_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    server = EmbeddedValkey(data_dir=tmp_path / "broker")
    with pytest.raises(DiskFullError, match="1 kB is free"):
        server.start()
    assert server.pid is None
    monkeypatch.undo()
    with server:  # and the folder is not left locked
        assert server.pid is not None


def test_a_port_whose_owner_says_nothing_is_refused_quickly(tmp_path: Path) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        port = silent.getsockname()[1]
        started = time.monotonic()
        with pytest.raises(BrokerUnavailableError, match=f"port {port} did not start"):
            EmbeddedValkey(port=port, data_dir=tmp_path / "broker").start()
        assert time.monotonic() - started < 5


def test_only_its_user_reads_the_requests_on_disk(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "broker"
    with EmbeddedValkey(data_dir=folder) as server, client(server.url) as redis:
        redis.set("ssd:prompt", "private")
    paths = [folder, *folder.rglob("*")]
    assert any(path.suffix == ".aof" for path in paths)
    for path in paths:
        others = stat.S_IMODE(path.stat().st_mode) & 0o077
        assert not others or path.name == "lock", f"{path} is open to others: {others:o}"


def test_ssd_up_tells_of_an_unknown_model_before_it_starts_anything(
    run_ssd: RunSSD, tmp_path: Path
) -> None:
    data = tmp_path / "broker"
    result = run_ssd("up", "--json", "--model", "/no/such/model", "--data-dir", str(data))
    assert result.returncode == 1
    assert json.loads(result.stdout)["error"]["code"] == "model_not_found"
    assert not data.exists()
