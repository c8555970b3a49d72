"""A user's GGUF file: read, refused or converted, and found again."""

from __future__ import annotations

import struct
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ssd_integrations.errors import (
    DiskFullError,
    ModelLoadError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from ssd_workers.models.convert_child import end_token_ids
from ssd_workers.models.gguf import read_header
from ssd_workers.models.inventory import list_models
from ssd_workers.models.store import gguf_path, resolve_model
from tests.tiny import CHAT_TEMPLATE, make_tokenizer
from tests.unit.model_store_files import Log, make_tiny_gguf


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("SSD_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    make_tiny_gguf(tmp_path / "tiny.gguf")
    return tmp_path / "tiny.gguf"


def test_header_says_what_is_in_the_file(tiny: Path) -> None:
    header = read_header(tiny)
    assert header.architecture == "qwen2"
    assert header.scalars["tokenizer.chat_template"] == CHAT_TEMPLATE
    assert header.scalars["qwen2.block_count"] == 2
    assert header.tensors == 27
    assert header.data_end <= tiny.stat().st_size < header.data_end + 32
    # The file is float32 already, so its tensors are as large before as after.
    assert 0.9 * tiny.stat().st_size < header.float32_bytes < tiny.stat().st_size


def test_conversion_keeps_every_weight_and_finds_every_end_token(
    cache: Path, tmp_path: Path
) -> None:
    file = tmp_path / "tiny.gguf"
    original = make_tiny_gguf(file)
    # Files beside it that transformers would take for parts of the model.
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "tokenizer.json").write_text("{}")
    log = Log()
    source = resolve_model(str(file), progress=log)
    assert source.is_local
    assert log.stages == ["read tokenizer", "convert", "save", "verify"]
    for stage in log.stages:
        *_, (_, done, total, _) = (report for report in log.reports if report[0] == stage)
        assert done == total > 0
    counts = [done for stage, done, _, _ in log.reports if stage == "convert"]
    assert counts == sorted(counts)
    assert counts[-1] == 27

    converted = AutoModelForCausalLM.from_pretrained(source.path)
    assert converted.dtype == torch.float32
    weights = converted.state_dict()
    assert set(weights) == set(original.state_dict())
    for name, weight in original.state_dict().items():
        assert torch.equal(weights[name], weight), name
    assert converted.generation_config.eos_token_id == [2, 0]
    tokenizer = AutoTokenizer.from_pretrained(source.path)
    text = "Grüße 안녕 🙂 restart"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert not list(cache.glob("models/.tmp-*"))


def test_second_use_finds_the_first_ones_work(
    cache: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, log = resolve_model(str(tiny)), Log()
    monkeypatch.chdir(tiny.parent)
    assert resolve_model("tiny.gguf", progress=log).path == first.path
    assert log.reports == []
    [stored] = list_models()
    assert (stored.kind, stored.state, stored.source) == ("gguf", "complete", str(tiny))
    # The name in the list works too, even when the file is gone.
    assert gguf_path(stored.name) == tiny
    tiny.unlink()
    assert resolve_model(stored.name).fingerprint == first.fingerprint
    with pytest.raises(ModelNotFoundError, match="GGUF"):
        gguf_path(stored.name)


def test_new_contents_are_converted_afresh_and_replace_the_old(cache: Path, tiny: Path) -> None:
    first = resolve_model(str(tiny))
    make_tiny_gguf(tiny, seed=1)
    second = resolve_model(str(tiny))
    assert second.fingerprint != first.fingerprint
    assert [model.path for model in list_models()] == [Path(second.path)]


@pytest.mark.parametrize(
    ("contents", "error", "message"),
    [
        (b"", ModelNotFoundError, "not a GGUF file"),
        (b"PK\x03\x04 a zip file", ModelNotFoundError, "not a GGUF file"),
        (b"GGUF", ModelLoadError, "ends inside its header"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), ModelLoadError, "version 1"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), ModelLoadError, "1152921504606846976"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), ModelLoadError, "architecture"),
    ],
)
def test_damaged_files_are_named(
    cache: Path, tmp_path: Path, contents: bytes, error: type[Exception], message: str
) -> None:
    file = tmp_path / "bad.gguf"
    file.write_bytes(contents)
    with pytest.raises(error, match=message) as caught:
        resolve_model(str(file))
    assert "bad.gguf" in str(caught.value)
    assert list_models() == []


def test_a_file_that_was_cut_off_is_refused_before_conversion(cache: Path, tiny: Path) -> None:
    whole = tiny.read_bytes()
    tiny.write_bytes(whole[: len(whole) // 2])
    log = Log()
    with pytest.raises(ModelLoadError, match="its tensors need"):
        resolve_model(str(tiny), progress=log)
    assert log.reports == []


def test_unknown_architecture_and_split_files_are_refused(cache: Path, tmp_path: Path) -> None:
    strange = tmp_path / "strange.gguf"
    make_tiny_gguf(strange, arch="rwkv6")
    with pytest.raises(UnsupportedModelError, match="rwkv6"):
        resolve_model(str(strange))
    assert list_models() == []
    text = b"general.architecture"
    key = struct.pack("<Q", len(text)) + text + struct.pack("<IQ", 8, 5) + b"qwen2"
    count = struct.pack("<Q", 11) + b"split.count" + struct.pack("<IH", 2, 3)
    part = tmp_path / "part.gguf"
    part.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + key + count + b"\0" * 64)
    with pytest.raises(UnsupportedModelError, match="one of 3 parts"):
        resolve_model(str(part))


def test_too_little_space_is_noticed_before_the_work(
    cache: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1_000_000}))
    log = Log()
    with pytest.raises(DiskFullError, match=r"needs 67\.\d MB .* only 1\.0 MB is free"):
        resolve_model(str(tiny), progress=log)
    assert log.reports == []


def test_a_conversion_that_the_system_ends(cache: Path, tiny: Path) -> None:
    def kill_child(stage: str, done: float, total: float, unit: str) -> None:
        for child in psutil.Process().children():
            child.kill()

    with pytest.raises(ModelLoadError, match=r"most likely because memory ran out: .* 58\d kB"):
        resolve_model(str(tiny), progress=kill_child)
    assert list_models() == []
    assert not list(cache.glob("models/.tmp-*"))


def test_end_tokens_are_the_configured_ones_and_known_control_tokens() -> None:
    tokenizer = make_tokenizer()
    assert end_token_ids(tokenizer, 2) == [2, 0]
    assert end_token_ids(tokenizer, [1, 2]) == [1, 2, 0]
    # A word of the ordinary vocabulary ends nothing, whatever it spells.
    tokenizer.add_tokens(["</s>"])
    assert end_token_ids(tokenizer, 2) == [2, 0]
    tokenizer.add_tokens(["<|eot_id|>"], special_tokens=True)
    assert end_token_ids(tokenizer, None) == [2, 0, tokenizer.convert_tokens_to_ids("<|eot_id|>")]
