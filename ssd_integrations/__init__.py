"""ssd-integrations: exact speculative decoding behind LangChain and LlamaIndex.

Importing this package loads neither torch nor a framework; the two adapters come on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ssd_integrations.langchain import ChatSSD
    from ssd_integrations.llama_index import SSDLLM

__version__ = "0.1.0"
__all__ = ["SSDLLM", "ChatSSD", "__version__"]

_LAZY = {"ChatSSD": "ssd_integrations.langchain", "SSDLLM": "ssd_integrations.llama_index"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
