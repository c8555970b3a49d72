"""`ssd models`, run as a user does: output for people and for machines, questions, exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from ssd_workers.models.cache import Manifest, write_manifest
from tests.unit.model_store_files import make_tiny_gguf

Models = Callable[..., "CompletedProcess[str]"]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def models(cache: Path, run_ssd: Models) -> Models:
    """Run `ssd models ARGS` with a cache of its own."""

    def run(*args: str, stdin: str = "") -> CompletedProcess[str]:
        return run_ssd("models", *args, stdin=stdin, env={"SSD_CACHE_DIR": str(cache)})

    return run


def store_demo(cache: Path, gguf: bytes, sha256: str) -> None:
    entry = cache / "models" / "demo"
    (entry / "float32").mkdir(parents=True)
    (entry / "model.gguf").write_bytes(gguf)
    (entry / "float32" / "model.safetensors").write_bytes(bytes(2_500_000))
    write_manifest(
        entry,
        Manifest(
            name="demo",
            kind="demo",
            source="a model",
            root="float32",
            fingerprint="0123456789abcdef",
            gguf_sha256=sha256,
            gguf_bytes=len(gguf),
            files={"model.gguf": len(gguf), "float32/model.safetensors": 2_500_000},
        ),
    )


def test_a_gguf_file_from_pull_to_rm(models: Models, tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    make_tiny_gguf(file)
    pulled = models("pull", str(file), "--json")
    assert pulled.returncode == 0, pulled.stderr
    ready = json.loads(pulled.stdout)
    assert ready["name"] == str(file)
    assert (Path(ready["path"]) / "config.json").is_file()
    assert "convert" in pulled.stderr
    assert "Converting and de-quantizing" not in pulled.stderr

    quick = models("pull", str(file))
    assert quick.stdout == f"{file} is ready in {ready['path']}\n"
    assert quick.stderr == ""

    [row] = json.loads(models("list", "--json", "--verify").stdout)
    assert (row["kind"], row["state"], row["source"]) == ("gguf", "complete", str(file))
    assert row["path"] == ready["path"]
    # The file and the name in the list both mean the model.
    for name in (str(file), row["name"]):
        assert models("path", name).stdout == ready["path"] + "\n"
        assert json.loads(models("path", name, "--gguf", "--json").stdout)["path"] == str(file)

    removed = models("rm", str(file), "--yes", "--json")
    assert json.loads(removed.stdout) == {"name": row["name"], "freed_bytes": row["size_bytes"]}
    assert not Path(ready["path"]).exists()
    assert file.is_file()


def test_the_table_and_the_empty_list(models: Models, cache: Path) -> None:
    empty = models("list")
    assert (empty.returncode, empty.stdout) == (0, "")
    assert "ssd models pull demo" in empty.stderr
    assert json.loads(models("list", "--json").stdout) == []
    store_demo(cache, b"GGUF", "0" * 64)
    (cache / "models" / "gguf-half").mkdir()
    titles, demo, half = models("list").stdout.splitlines()
    assert titles.split() == ["NAME", "KIND", "SIZE", "INT8", "STATE", "PATH"]
    assert demo.split() == [
        "demo",
        "demo",
        "2.5",
        "MB",
        "-",
        "complete",
        str(cache / "models/demo/float32"),
    ]
    assert half.split()[:2] == ["gguf-half", "unknown"]
    assert "partial" in half


def test_verify_finds_changed_bytes(models: Models, cache: Path) -> None:
    store_demo(cache, b"GGUF", "0" * 64)
    assert json.loads(models("list", "--json").stdout)[0]["state"] == "complete"
    assert json.loads(models("list", "--json", "--verify").stdout)[0]["state"] == "damaged"


def test_removing_asks_first(models: Models, cache: Path) -> None:
    store_demo(cache, b"GGUF", "0" * 64)
    for args in (("rm", "demo"), ("rm", "demo", "--json")):
        asked = models(*args, stdin="y\n")
        assert asked.returncode == 2
        assert "--yes" in asked.stderr + asked.stdout
    assert (cache / "models" / "demo").is_dir()
    removed = models("rm", "demo", "-y")
    assert removed.stdout == "Removed demo: 2.5 MB\n"
    assert not (cache / "models" / "demo").exists()


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("pull", "no-such.gguf"), 1, ["'no-such.gguf'", "hub id"]),
        (("pull", "demo", "--from-dir", "/no/such"), 1, ["'/no/such'"]),
        (("pull", "org/x", "--from-dir", "/tmp"), 2, ["--from-dir", "'org/x'"]),
        (("path", "demo"), 1, ["'demo'", "ssd models list"]),
        (("rm", "../cache", "--yes"), 1, ["'../cache'"]),
    ],
)
def test_errors_are_plain_for_people_and_machines(
    models: Models, args: tuple[str, ...], code: int, words: list[str]
) -> None:
    plain = models(*args)
    assert plain.returncode == code
    assert plain.stderr.startswith("Error: ")
    assert "Traceback" not in plain.stderr
    assert plain.stdout == ""
    machine = models(*args, "--json")
    assert machine.returncode == code
    error = json.loads(machine.stdout)["error"]
    for word in words:
        assert word in plain.stderr
        assert word in error["message"] + error["remedy"]


def test_a_partial_model_has_no_path(models: Models, cache: Path) -> None:
    (cache / "models" / "demo" / "wheels").mkdir(parents=True)
    found = models("path", "demo")
    assert found.returncode == 1
    assert "only partly there" in found.stderr
    assert "ssd models pull demo" in found.stderr


@pytest.mark.parametrize("command", ["pull", "list", "path", "rm"])
def test_help_has_examples(models: Models, command: str) -> None:
    shown = models(command, "--help")
    assert shown.returncode == 0
    assert f"ssd models {command}" in shown.stdout
