"""Both adapters on the real engine in this process, with a tiny model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from langchain_core import exceptions as langchain_errors
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.chat_engine import SimpleChatEngine

from ssd_integrations import SSDLLM, ChatSSD
from ssd_integrations.backends.local import LocalBackend
from ssd_integrations.errors import ContextLengthError, ModelNotFoundError
from ssd_integrations.protocol import Event, GenerationRequest, is_terminal
from tests.tiny import make_tiny_model

QUESTION = "How do I restart the router?"
# A second or more of decoding, so that whoever leaves does so before the end. No drafts: one
# that has learnt the answer from an earlier call would be done in no time.
LONG: dict[str, Any] = {"max_tokens": 3900, "temperature": 1.0, "seed": 1, "speculation": "off"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("models") / "long"
    return str(make_tiny_model(path, max_position_embeddings=4096))


@pytest.fixture(scope="module")
def make_chat(model: str) -> Callable[..., ChatSSD]:
    """A ChatSSD on the tiny model; all of them share one engine."""

    def make(**options: Any) -> ChatSSD:
        return ChatSSD(model=model, dtype="float32", **{"max_tokens": 12, **options})

    return make


@pytest.fixture(scope="module")
def make_llm(model: str) -> Callable[..., SSDLLM]:
    def make(**options: Any) -> SSDLLM:
        return SSDLLM(model=model, dtype="float32", **{"max_tokens": 12, **options})

    return make


class Watched:
    """The real local backend, noting which requests ended and how they did."""

    def __init__(self, model: str) -> None:
        self.inner = LocalBackend(model=model, dtype="float32")
        self.started: list[str] = []
        self.ended: list[str] = []
        self.left: list[str] = []

    def generate(self, request: GenerationRequest) -> Any:
        self.started.append(request.request_id)
        try:
            for event in self.inner.generate(request):
                self._note(event)
                yield event
        finally:
            if request.request_id not in self.ended:
                self.left.append(request.request_id)

    async def agenerate(self, request: GenerationRequest) -> Any:
        self.started.append(request.request_id)
        stream: Any = self.inner.agenerate(request)
        try:
            async for event in stream:
                self._note(event)
                yield event
        finally:
            await stream.aclose()
            if request.request_id not in self.ended:
                self.left.append(request.request_id)

    def _note(self, event: Event) -> None:
        if is_terminal(event):
            self.ended.append(event.request_id)

    def cancel(self, request_id: str) -> bool:
        return self.inner.cancel(request_id)

    def models(self) -> Any:
        return self.inner.models()

    def close(self) -> None:
        return


async def engine_is_free(model: str) -> None:
    """Wait until no request lives on the engine of ``model``."""
    service = LocalBackend(model=model, dtype="float32")._service()
    async with asyncio.timeout(20):
        while service._live:
            await asyncio.sleep(0.01)


async def every_langchain_text(llm: ChatSSD, prompt: Any, **options: Any) -> list[str]:
    return [
        llm.invoke(prompt, **options).text,
        "".join(chunk.text for chunk in llm.stream(prompt, **options)),
        (await llm.ainvoke(prompt, **options)).text,
        "".join([chunk.text async for chunk in llm.astream(prompt, **options)]),
    ]


async def every_llama_index_text(llm: SSDLLM, prompt: str, **options: Any) -> list[str]:
    messages = [ChatMessage(role="user", content=prompt)]
    return [
        str(llm.chat(messages, **options).message.content),
        llm.complete(prompt, **options).text,
        "".join(step.delta or "" for step in llm.stream_chat(messages, **options)),
        "".join(step.delta or "" for step in llm.stream_complete(prompt, **options)),
        str((await llm.achat(messages, **options)).message.content),
        (await llm.acomplete(prompt, **options)).text,
        "".join([s.delta or "" async for s in await llm.astream_chat(messages, **options)]),
        "".join([s.delta or "" async for s in await llm.astream_complete(prompt, **options)]),
    ]


async def test_every_way_of_asking_gives_the_same_text(
    make_chat: Callable[..., ChatSSD], make_llm: Callable[..., SSDLLM]
) -> None:
    texts = await every_langchain_text(make_chat(), QUESTION)
    texts += await every_llama_index_text(make_llm(), QUESTION)
    assert texts[0]
    assert set(texts) == {texts[0]}


@pytest.mark.parametrize("speculation", ["off", "ngram", "suffix", "hybrid", "auto"])
async def test_speculation_does_not_change_the_text(
    make_chat: Callable[..., ChatSSD], speculation: str
) -> None:
    llm = make_chat(max_tokens=48, temperature=0.8, seed=11)
    answer = llm.invoke(QUESTION, speculation=speculation)
    assert answer.text == llm.invoke(QUESTION, speculation="off").text
    expected = "hybrid" if speculation == "auto" else speculation
    assert answer.response_metadata["speculation"]["method"] == expected


def test_seed(make_chat: Callable[..., ChatSSD]) -> None:
    llm = make_chat(temperature=1.0, seed=3)
    assert llm.invoke(QUESTION).text == llm.invoke(QUESTION).text
    texts = {llm.invoke(QUESTION, seed=seed).text for seed in range(5)}
    assert len(texts) > 1


async def test_stop_ends_the_text_and_is_not_part_of_it(
    make_chat: Callable[..., ChatSSD], make_llm: Callable[..., SSDLLM]
) -> None:
    whole = make_chat().invoke(QUESTION).text
    stop = whole[3:6]  # several tokens or a part of one, as it falls
    expected = whole[: whole.index(stop)]
    texts = await every_langchain_text(make_chat(), QUESTION, stop=[stop])
    texts += await every_langchain_text(make_chat(stop=[stop]), QUESTION)
    texts += await every_llama_index_text(make_llm(), QUESTION, stop=[stop])
    assert set(texts) == {expected}
    answer = make_chat(stop=[stop]).invoke(QUESTION)
    assert answer.response_metadata["finish_reason"] == "stop"
    assert answer.response_metadata["stop_sequence"] == stop
    assert make_chat(stop=[stop]).invoke(QUESTION, stop=[]).text == whole


def test_usage_is_the_same_streamed_or_not(
    make_chat: Callable[..., ChatSSD], make_llm: Callable[..., SSDLLM]
) -> None:
    llm = make_chat(max_tokens=5)
    usage = llm.invoke(QUESTION).usage_metadata
    assert usage is not None
    assert 0 < usage["output_tokens"] <= 5
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert list(llm.stream(QUESTION))[-1].usage_metadata == usage
    assert llm.get_num_tokens_from_messages([HumanMessage(QUESTION)]) == usage["input_tokens"]
    raw = make_llm(max_tokens=5).complete(QUESTION).raw
    assert raw["usage"]["prompt_tokens"] == usage["input_tokens"]
    assert raw["usage"]["completion_tokens"] == usage["output_tokens"]


def test_call_options_do_not_stay(make_chat: Callable[..., ChatSSD]) -> None:
    llm = make_chat()
    before = llm.invoke(QUESTION).text
    short = llm.invoke(QUESTION, max_tokens=2).usage_metadata
    assert short is not None
    assert short["output_tokens"] == 2
    assert llm.invoke(QUESTION).text == before


def test_formatted_prompts_skip_the_chat_template(make_llm: Callable[..., SSDLLM]) -> None:
    llm = make_llm()
    raw = llm.complete(QUESTION, formatted=True).raw["usage"]["prompt_tokens"]
    assert raw < llm.complete(QUESTION).raw["usage"]["prompt_tokens"]


# --- frameworks around it ---


async def test_chain_and_batches(make_chat: Callable[..., ChatSSD]) -> None:
    prompt = ChatPromptTemplate.from_messages([("system", "Be brief."), ("human", "{question}")])
    chain = prompt | make_chat() | StrOutputParser()
    questions = [{"question": f"{QUESTION} {index}"} for index in range(4)]
    one_by_one = [chain.invoke(question) for question in questions]
    assert chain.batch(questions) == one_by_one  # type: ignore[arg-type]
    assert await chain.abatch(questions) == one_by_one  # type: ignore[arg-type]
    assert "".join([part async for part in chain.astream(questions[0])]) == one_by_one[0]


def test_threads_share_one_engine(make_chat: Callable[..., ChatSSD]) -> None:
    expected = make_chat().invoke(QUESTION).text
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda _: make_chat().invoke(QUESTION).text, range(8)))
    assert texts == [expected] * 8


def test_repeated_roles_and_a_conversation(make_chat: Callable[..., ChatSSD]) -> None:
    messages: list[BaseMessage] = [
        SystemMessage("Be brief."),
        SystemMessage("Be kind."),
        HumanMessage("Hi"),
        HumanMessage([{"type": "text", "text": QUESTION}]),
        AIMessage("Hold the button."),
        AIMessage("Wait."),
    ]
    assert make_chat().invoke(messages).usage_metadata is not None


def test_llama_index_chat_engine(make_llm: Callable[..., SSDLLM]) -> None:
    engine = SimpleChatEngine.from_defaults(llm=make_llm(), system_prompt="Be brief.")
    first = str(engine.chat(QUESTION))
    second = "".join(engine.stream_chat("And then?").response_gen)
    assert first
    assert [m.role.value for m in engine.chat_history] == ["user", "assistant"] * 2
    assert engine.chat_history[-1].content == second


def test_llama_index_query_engine(make_llm: Callable[..., SSDLLM]) -> None:
    from llama_index.core import Document, SummaryIndex

    index = SummaryIndex.from_documents([Document(text="Hold the button for ten seconds.")])
    query_engine = index.as_query_engine(llm=make_llm(), response_mode="compact")
    assert str(query_engine.query(QUESTION))


# --- cancellation ---


async def test_leaving_a_stream_frees_the_engine(model: str) -> None:
    watched = Watched(model)
    chat = ChatSSD(model=model, backend=watched, **LONG)
    llm = SSDLLM(model=model, backend=watched, **LONG)
    for stream in (
        chat.stream(QUESTION),
        llm.stream_chat([ChatMessage(content=QUESTION)]),
        llm.stream_complete(QUESTION),
    ):
        next(stream)
        stream.close()  # type: ignore[union-attr]
    await engine_is_free(model)
    assert watched.left == watched.started
    assert watched.ended == []


async def test_leaving_an_async_stream_frees_the_engine(model: str) -> None:
    watched = Watched(model)
    chat = ChatSSD(model=model, backend=watched, **LONG)
    llm = SSDLLM(model=model, backend=watched, **LONG)
    async for _ in chat.astream(QUESTION):
        break
    async for _ in await llm.astream_complete(QUESTION):
        break
    await engine_is_free(model)
    async with asyncio.timeout(5):
        while len(watched.left) < 2:
            await asyncio.sleep(0.01)
    assert watched.ended == []


@pytest.mark.parametrize(("adapter", "n"), [("langchain", 1), ("langchain", 3), ("llama_index", 1)])
async def test_cancelling_a_task_frees_the_engine(model: str, adapter: str, n: int) -> None:
    watched = Watched(model)
    chat = ChatSSD(model=model, backend=watched, n=n, **LONG)
    llm = SSDLLM(model=model, backend=watched, **LONG)
    call = chat.ainvoke(QUESTION) if adapter == "langchain" else llm.acomplete(QUESTION)
    task = asyncio.ensure_future(call)
    while len(watched.started) < n:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await engine_is_free(model)
    assert sorted(watched.left) == sorted(watched.started)


# --- errors ---


def test_a_prompt_that_does_not_fit(make_chat: Callable[..., ChatSSD]) -> None:
    with pytest.raises(ContextLengthError) as caught:
        make_chat().invoke("router " * 9000)
    assert isinstance(caught.value, langchain_errors.ContextOverflowError)


def test_an_unknown_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        ChatSSD(model=str(tmp_path / "nothing")).invoke(QUESTION)
    assert isinstance(caught.value, langchain_errors.ModelNotFoundError)
    with pytest.raises(ModelNotFoundError):
        SSDLLM(model=str(tmp_path / "nothing")).complete(QUESTION)
