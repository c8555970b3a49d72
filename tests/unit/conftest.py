"""Models and engines for the unit tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ssd_workers.engine.service import EngineService


@pytest.fixture(scope="session")
def roomy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with room for an output long enough to be cancelled.

    Its random weights practically never take the end token.
    """
    from tests.tiny import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("model"), "llama", max_position_embeddings=4096)


@pytest.fixture(scope="session")
def tool_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a token for each marker of tool calls."""
    from tests.tools import make_tool_model

    return make_tool_model(tmp_path_factory.mktemp("models") / "tools")


@pytest.fixture(scope="module")
def service(roomy_model: Path) -> Iterator[EngineService]:
    """A service with four rows."""
    from ssd_workers.engine.config import EngineConfig
    from ssd_workers.engine.service import EngineService

    with EngineService(EngineConfig(model=str(roomy_model), max_num_seqs=4)) as started:
        yield started
