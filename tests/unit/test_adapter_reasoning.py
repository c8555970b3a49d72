"""What a model thinks before it answers, through both adapters."""

from __future__ import annotations

from llama_index.core.base.llms.types import TextBlock, ThinkingBlock
from llama_index.core.llms import ChatMessage

from ssd_integrations import SSDLLM, ChatSSD
from tests.unit.adapter_support import merged
from tests.unit.scripted_backend import ScriptedBackend

HELLO = [ChatMessage(role="user", content="Hi")]


def test_langchain_has_a_reasoning_block() -> None:
    llm = ChatSSD(backend=ScriptedBackend(thoughts=("Let me ", "think.")))
    answer = llm.invoke("Hi")
    assert answer.content == "Hello"
    assert answer.content_blocks == [
        {"type": "reasoning", "reasoning": "Let me think."},
        {"type": "text", "text": "Hello"},
    ]
    whole = merged(list(llm.stream("Hi")))
    assert whole.content == "Hello"
    assert whole.additional_kwargs == answer.additional_kwargs


def test_llama_index_has_a_thinking_block() -> None:
    llm = SSDLLM(backend=ScriptedBackend(thoughts=("Let me ", "think.")))
    blocks = llm.chat(HELLO).message.blocks
    assert blocks == [ThinkingBlock(content="Let me think."), TextBlock(text="Hello")]
    steps = list(llm.stream_chat(HELLO))
    assert steps[0].message.blocks[0] == ThinkingBlock(content="Let me ")
    assert steps[-1].message.content == "Hello"
    assert llm.complete("Hi").text == "Hello"


def test_without_reasoning_there_is_no_trace_of_it() -> None:
    backend = ScriptedBackend()
    assert ChatSSD(backend=backend).invoke("Hi").additional_kwargs == {}
    assert SSDLLM(backend=backend).chat(HELLO).message.blocks == [TextBlock(text="Hello")]
