"""ChatSSD: answers, chunks, metadata, callbacks and token counts."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate

from ssd_integrations import ChatSSD
from ssd_integrations.errors import EngineError, InvalidRequestError
from ssd_integrations.protocol import Event, GenerationRequest
from tests.unit.adapter_support import merged
from tests.unit.scripted_backend import STATS, CountingBackend, ScriptedBackend


def test_invoke_and_stream_tell_the_same() -> None:
    llm = ChatSSD(backend=ScriptedBackend())
    answer = llm.invoke("Hi")
    chunks = list(llm.stream("Hi"))
    assert isinstance(answer, AIMessage)
    assert [chunk.content for chunk in chunks] == ["Hel", "lo", ""]
    whole = merged(chunks)
    assert whole.content == answer.content == "Hello"
    assert whole.usage_metadata == answer.usage_metadata
    assert whole.response_metadata == answer.response_metadata


async def test_async_tells_the_same_as_sync() -> None:
    llm = ChatSSD(backend=ScriptedBackend())
    answer = await llm.ainvoke("Hi")
    chunks = [chunk async for chunk in llm.astream("Hi")]
    sync = llm.invoke("Hi")
    for other in (answer, merged(chunks)):
        assert other.content == sync.content
        assert other.usage_metadata == sync.usage_metadata
        assert other.response_metadata == sync.response_metadata


def test_metadata_comes_once_on_the_last_chunk() -> None:
    chunks = list(ChatSSD(backend=ScriptedBackend()).stream("Hi"))
    *early, last = chunks
    for chunk in early:
        assert chunk.usage_metadata is None
        assert chunk.response_metadata == {}
        assert chunk.chunk_position is None
    assert last.chunk_position == "last"
    assert last.usage_metadata == {"input_tokens": 7, "output_tokens": 3, "total_tokens": 10}
    metadata = last.response_metadata
    assert metadata["model_name"] == "scripted"
    assert metadata["model_provider"] == "ssd"
    assert metadata["finish_reason"] == "stop"
    assert metadata["speculation"] == STATS.model_dump(mode="json")
    assert metadata["timing"]["tokens_per_second"] == 10.5


@pytest.mark.parametrize("reason", ["stop", "length", "cancelled"])
def test_finish_reason(reason: Any) -> None:
    answer = ChatSSD(backend=ScriptedBackend(finish_reason=reason)).invoke("Hi")
    assert answer.response_metadata["finish_reason"] == reason


def test_empty_answer() -> None:
    llm = ChatSSD(backend=ScriptedBackend(pieces=()))
    assert llm.invoke("Hi").content == ""
    assert merged(list(llm.stream("Hi"))).content == ""


def test_identical_calls_are_separate_requests() -> None:
    backend = ScriptedBackend()
    llm = ChatSSD(backend=backend)
    assert [merged(list(llm.stream("Hi"))).content for _ in range(3)] == ["Hello"] * 3
    assert len({request.request_id for request in backend.requests}) == 3


async def test_batch_and_chain() -> None:
    llm = ChatSSD(backend=ScriptedBackend())
    chain = ChatPromptTemplate.from_messages([("human", "{q}")]) | llm | StrOutputParser()
    assert chain.batch([{"q": "a"}, {"q": "b"}]) == ["Hello", "Hello"]
    assert await chain.abatch([{"q": "a"}, {"q": "b"}]) == ["Hello", "Hello"]
    assert [piece async for piece in chain.astream({"q": "a"})] == ["Hel", "lo", ""]


async def test_event_stream_carries_text_and_usage() -> None:
    events = await ChatSSD(backend=ScriptedBackend()).astream_events("Hi", version="v3")
    message = await events.output
    assert message.text == "Hello"
    assert message.usage_metadata["total_tokens"] == 10
    assert message.response_metadata["speculation"] == STATS.model_dump(mode="json")


def test_a_stream_without_an_end_is_an_error() -> None:
    class Broken(ScriptedBackend):
        def generate(self, request: GenerationRequest) -> Any:
            events: list[Event] = list(super().generate(request))
            yield from events[:-1]

    with pytest.raises(EngineError, match="ended before its answer"):
        ChatSSD(backend=Broken()).invoke("Hi")


class Tokens(BaseCallbackHandler):
    def __init__(self) -> None:
        self.tokens: list[str] = []

    def on_llm_new_token(self, token: Any, **kwargs: Any) -> None:
        self.tokens.append(token)


def test_callbacks_see_each_token_once() -> None:
    for streaming in (False, True):
        handler = Tokens()
        llm = ChatSSD(backend=ScriptedBackend(), callbacks=[handler])
        list(llm.stream("Hi", stream=streaming or None) if streaming else llm.stream("Hi"))
        assert handler.tokens == ["Hel", "lo", ""]


def test_no_messages() -> None:
    with pytest.raises(InvalidRequestError, match="at least one message"):
        ChatSSD(backend=ScriptedBackend()).invoke([])


def test_exact_token_counts_where_there_is_a_tokenizer() -> None:
    llm = ChatSSD(backend=CountingBackend())
    assert llm.get_num_tokens("Hello") == 5
    assert llm.get_num_tokens("") == 0
    assert llm.get_num_tokens_from_messages([HumanMessage("abc"), AIMessage("de")]) == 5


def test_no_download_where_there_is_none() -> None:
    llm = ChatSSD(backend=ScriptedBackend())
    with pytest.raises(InvalidRequestError, match="custom_get_token_ids"):
        llm.get_num_tokens("Hello")
    with pytest.raises(InvalidRequestError, match="custom_get_token_ids"):
        llm.get_token_ids("Hello")
    own = ChatSSD(backend=ScriptedBackend(), custom_get_token_ids=lambda text: [0] * len(text))
    assert own.get_num_tokens("Hello") == 5


def test_construction_is_light() -> None:
    code = (
        "import sys\nfrom ssd_integrations import ChatSSD\nChatSSD(model='demo', dtype='int8')\n"
        "heavy = {'torch', 'transformers', 'celery', 'redis', 'llama_index'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
