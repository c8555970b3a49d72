"""Compiled code is kept for the files it was compiled from."""

from __future__ import annotations

from pathlib import Path

import pytest

from ssd_workers.engine import compiled
from ssd_workers.engine.compiled import SOURCES, drop_other_code


def write_sources(folder: Path, text: str) -> None:
    folder.mkdir(exist_ok=True)
    for name in SOURCES:
        (folder / f"{name}.py").write_text(text)


def test_code_of_other_sources_is_deleted_and_of_the_same_is_kept(tmp_path: Path) -> None:
    kept, sources = tmp_path / "kept", tmp_path / "sources"
    write_sources(sources, "a")
    drop_other_code(kept, sources)
    mine, foreign = kept / "kernels.gate-1.py311.nbi", kept / "other.loop-1.py311.nbi"
    for file in (mine, foreign):
        file.write_text("code")
    drop_other_code(kept, sources)
    assert mine.exists()
    # Same size, and the same date to numba, since the file the loop stands in is untouched.
    (sources / "vectors.py").write_text("b")
    drop_other_code(kept, sources)
    assert not mine.exists()
    assert foreign.exists()


def test_without_a_folder_to_write_to_nothing_is_kept_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(kept: Path, sources: Path) -> None:
        raise PermissionError(f"{kept} cannot be written")

    monkeypatch.setattr(compiled, "drop_other_code", refuse)
    assert compiled._can_keep_code() is False
    assert "cannot be written" in caplog.text
    assert "NUMBA_CACHE_DIR" in caplog.text
