"""The LangChain adapter. Needs the extra ``langchain``."""

from __future__ import annotations

from importlib.util import find_spec

from ssd_integrations.errors import MissingExtraError

if find_spec("langchain_core") is None:
    raise MissingExtraError.for_extra("ChatSSD", "langchain")

from ssd_integrations.langchain.chat_model import ChatSSD

__all__ = ["ChatSSD"]
