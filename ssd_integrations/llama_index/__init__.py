"""The LlamaIndex adapter. Needs the extra ``llamaindex``."""

from __future__ import annotations

from importlib.util import find_spec

from ssd_integrations.errors import MissingExtraError

if find_spec("llama_index") is None or find_spec("llama_index.core") is None:
    raise MissingExtraError.for_extra("SSDLLM", "llamaindex")

from ssd_integrations.llama_index.llm import SSDLLM

__all__ = ["SSDLLM"]
