"""The suffix store: real files, real damage, real processes."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import filelock
import pytest

from ssd_integrations.errors import EngineError, InvalidRequestError
from ssd_workers.engine.drafters import suffix_store
from ssd_workers.engine.drafters.suffix import SuffixDrafter
from ssd_workers.engine.drafters.suffix_store import SuffixStore, store_fingerprint
from tests.unit.test_suffix import View

VOCAB = 1000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "new" / "suffixes.bin"


def open_store(path: Path, fingerprint: str = "model-a", **options: int) -> SuffixStore:
    return SuffixStore(path, fingerprint, **{"vocab_size": VOCAB, **options})


def filled(path: Path, sequences: list[list[int]]) -> bytes:
    store = open_store(path)
    store.load()
    for sequence in sequences:
        store.append(sequence)
    return path.read_bytes()


def aside(path: Path) -> list[Path]:
    return sorted(path.parent.glob("*.set-aside-*"))


def test_what_was_appended_is_loaded_in_order(path: Path) -> None:
    assert open_store(path).load() == []
    sequences = [[1, 2, 3], [0, VOCAB - 1], list(range(VOCAB))]
    filled(path, sequences)
    assert open_store(path).load() == sequences
    filled(path, [[5, 6]])
    assert open_store(path).load() == [*sequences, [5, 6]]
    assert not aside(path)


@pytest.mark.skipif(os.name != "posix", reason="file modes")
def test_nobody_else_may_read_it(path: Path) -> None:
    path.parent.mkdir()
    path.touch(0o666)
    path.chmod(0o666)
    old = os.umask(0)
    try:
        filled(path, [[1, 2]])
        assert path.stat().st_mode & 0o777 == 0o600
        store = open_store(path, max_tokens=2)  # small: rewritten
        for _ in range(10):
            store.append([3, 4])
        assert path.stat().st_mode & 0o777 == 0o600
        assert Path(f"{path}.lock").stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(old)


def test_a_drafter_starts_warm(path: Path) -> None:
    today = SuffixDrafter(store=open_store(path))
    view = View([1, 2, 3, 4, 5], prompt_length=2)
    today.propose([view], [4])
    today.forget("r")
    today.close()
    tomorrow = SuffixDrafter(store=open_store(path))
    assert tomorrow.num_remembered == 1
    assert tomorrow.propose([View([9, 3])], [4]) == [[4, 5]]
    assert SuffixDrafter().propose([View([9, 3])], [4]) == [[]]


@pytest.mark.parametrize("lost", [1, 4, 11, 17])
def test_an_interrupted_write_costs_its_own_record_only(
    path: Path, lost: int, caplog: pytest.LogCaptureFixture
) -> None:
    whole = filled(path, [[1, 2, 3], [4, 5, 6, 7]])
    path.write_bytes(whole[:-lost])
    assert open_store(path).load() == [[1, 2, 3]]
    assert "not written to its end" in caplog.text
    assert not aside(path)
    # The next record takes its place.
    filled(path, [[8, 9]])
    caplog.clear()
    assert open_store(path).load() == [[1, 2, 3], [8, 9]]
    assert not caplog.records


def test_a_writer_that_died_meanwhile_is_noticed(path: Path) -> None:
    """The file got a torn record, and then a whole one of another process, behind our back."""
    store = open_store(path)
    store.append([1, 2, 3])
    with path.open("ab") as file:
        file.write(b"\x07\0\0\0\1\1")
    store.append([4, 5])
    filled(path, [[6, 7]])
    store.append([8, 9])
    assert open_store(path).load() == [[1, 2, 3], [4, 5], [6, 7], [8, 9]]


def damage_middle(data: bytes) -> bytes:
    at = len(data) - 10
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (damage_middle, "checksum"),
        (lambda data: b"Dear diary,\n" + data, "not a suffix store"),
        (lambda data: b"\0" * 10_000, "not a suffix store"),
        (lambda data: b"[1]\n" + data, "not a suffix store"),
        (lambda data: data.replace(b'"version": 1', b'"version": 2'), "version 2, not 1"),
        (lambda data: data + b"\0" * 16, "no ids of the vocabulary"),
    ],
)
def test_a_damaged_file_is_set_aside_and_never_trusted(
    path: Path, spoil: object, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert callable(spoil)
    spoiled = spoil(filled(path, [[1, 2, 3], [4, 5, 6, 7]]))
    path.write_bytes(spoiled)
    assert open_store(path).load() == []
    assert reason in caplog.text
    assert "suffixes.bin.set-aside-1" in caplog.text
    assert [file.read_bytes() for file in aside(path)] == [spoiled]
    filled(path, [[8, 9]])
    assert open_store(path).load() == [[8, 9]]
    # What was set aside is not overwritten by the next one.
    path.write_bytes(b"x")
    assert open_store(path).load() == []
    assert len(aside(path)) == 2


def test_another_models_file_is_set_aside(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    filled(path, [[1, 2, 3]])
    assert open_store(path, "model-b").load() == []
    assert "another model or tokenizer" in caplog.text
    assert len(aside(path)) == 1


def test_ids_beyond_the_vocabulary_are_not_trusted(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They would reach the target's embedding as drafts."""
    filled(path, [[1, 2, 999]])
    assert open_store(path, vocab_size=999).load() == []
    assert "no ids of the vocabulary" in caplog.text


def test_a_file_that_changed_hands_is_left_alone(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(path)
    store.append([1, 2])
    path.unlink()
    other = open_store(path, "model-b")
    other.append([3, 4])
    store.append([5, 6])
    store.append([7, 8])
    assert caplog.text.count("Nothing more is stored") == 1
    assert open_store(path, "model-b").load() == [[3, 4]]


def test_the_file_is_bounded_and_keeps_the_newest(path: Path) -> None:
    store = open_store(path, max_tokens=100)
    for index in range(500):
        store.append([index, index + 1, index + 2])
        assert path.stat().st_size < 2 * 4 * 100 + 200
    loaded = open_store(path, max_tokens=100).load()
    assert loaded == [[i, i + 1, i + 2] for i in range(500 - len(loaded), 500)]
    assert 30 <= len(loaded) <= 33
    store.append(list(range(300)))
    assert open_store(path, max_tokens=100).load()[-1] == list(range(200, 300))
    assert sorted(p.name for p in path.parent.iterdir()) == ["suffixes.bin", "suffixes.bin.lock"]


def test_append_does_not_wait_for_the_lock(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = open_store(path)
    store.load()
    with filelock.FileLock(f"{path}.lock"):
        store.append([1, 2])
        store.append([3, 4])
        assert not path.exists()
    store.append([5, 6])
    assert open_store(path).load() == [[1, 2], [3, 4], [5, 6]]


def test_flush_writes_what_was_held_back(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suffix_store, "_FLUSH_WAIT_S", 0.05)
    store = open_store(path)
    store.load()
    with filelock.FileLock(f"{path}.lock"):
        store.append([1, 2])
        store.flush()
        assert "1 outputs were not stored" in caplog.text
    store.flush()
    assert open_store(path).load() == [[1, 2]]


def test_a_lock_that_is_never_freed_is_an_error(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suffix_store, "_LOAD_WAIT_S", 0.05)
    path.parent.mkdir()
    with filelock.FileLock(f"{path}.lock"), pytest.raises(EngineError, match="was locked"):
        open_store(path).load()


def test_a_place_that_cannot_be_used_is_an_error_at_load_and_a_warning_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    store = open_store(tmp_path / "file" / "suffixes.bin")
    with pytest.raises(InvalidRequestError, match="cannot be used"):
        store.load()
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(InvalidRequestError, match="cannot be used"):
        open_store(folder).load()
    store.append([1, 2])
    store.append([1, 2])
    assert caplog.text.count("Nothing more is stored") == 1


WRITER = """
import sys
from ssd_workers.engine.drafters.suffix_store import SuffixStore
store = SuffixStore(sys.argv[1], "model-a", vocab_size=1000, max_tokens=int(sys.argv[3]))
store.load()
for index in range(100):
    store.append([int(sys.argv[2]), index] * 5)
store.flush()
"""


@pytest.mark.parametrize("max_tokens", [100_000, 500], ids=["appending", "rewriting"])
def test_processes_share_a_file(path: Path, max_tokens: int) -> None:
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), str(number), str(max_tokens)],
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(4)
    ]
    for writer in writers:
        _, errors = writer.communicate(timeout=120)
        assert writer.returncode == 0, errors
        assert not errors
    loaded = open_store(path, max_tokens=max_tokens).load()
    by_writer = [[s[1] for s in loaded if s[0] == number] for number in range(4)]
    if max_tokens > 10_000:
        assert by_writer == [list(range(100))] * 4
    else:
        assert len(loaded) == 50
        # Whatever is left of each is in order, and the very last record is among them.
        assert all(indices == sorted(indices) for indices in by_writer)
        assert loaded[-1][1] == 99
    assert not aside(path)


def test_the_fingerprint_knows_model_and_tokenizer() -> None:
    base = store_fingerprint("m", {"a": 0, "b": 1})
    assert base == store_fingerprint("m", {"b": 1, "a": 0})
    others = [
        store_fingerprint("n", {"a": 0, "b": 1}),
        store_fingerprint("m", {"a": 1, "b": 0}),
        store_fingerprint("m", {"a": 0}),
        store_fingerprint("m", {"a": 0, "b": 1, "\ud800": 2}),
    ]
    assert len({base, *others}) == 5


@pytest.mark.parametrize("options", [{"max_tokens": 0}, {"vocab_size": 0}])
def test_a_store_of_nothing_is_refused(path: Path, options: dict[str, int]) -> None:
    with pytest.raises(InvalidRequestError, match="would hold nothing"):
        open_store(path, **options)


def test_warnings_go_to_the_log(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path.parent.mkdir()
    path.write_bytes(b"?")
    open_store(path).load()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
