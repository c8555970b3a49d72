"""LangChain's own integration suite for chat models, on a tiny model in process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_tests.integration_tests import ChatModelIntegrationTests

from ssd_integrations import ChatSSD
from tests.tiny import make_tiny_model


# The suite passes `max_retries` and `api_key`, which a local model does not have.
@pytest.mark.filterwarnings("ignore:ChatSSD has no parameter '(max_retries|api_key)'")
class TestChatSSDIntegration(ChatModelIntegrationTests):
    folder: Path

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _make_model(cls, tmp_path_factory: pytest.TempPathFactory) -> None:
        cls.folder = make_tiny_model(
            tmp_path_factory.mktemp("suite") / "tiny", max_position_embeddings=4096
        )

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatSSD

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": str(self.folder), "dtype": "float32", "max_tokens": 24}

    @property
    def standard_chat_model_params(self) -> dict[str, Any]:
        return {"temperature": 0, "timeout": 60, "stop": []}
