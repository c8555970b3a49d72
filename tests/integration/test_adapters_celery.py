"""Both adapters over a real worker process behind a real Valkey: the same as in process."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from langchain_core import exceptions as langchain_errors
from langchain_core.messages import BaseMessage, HumanMessage
from llama_index.core.base.llms.types import ChatMessage

from ssd_integrations import SSDLLM, ChatSSD
from ssd_integrations.backends.celery import CeleryBackend
from ssd_integrations.errors import (
    BrokerUnavailableError,
    ContextLengthError,
    InvalidRequestError,
    WorkerUnavailableError,
)
from ssd_integrations.protocol import Event, FinishedEvent, GenerationRequest
from ssd_workers.embedded import EmbeddedValkey
from tests.conftest import SSD, ssd_environment
from tests.tiny import make_tiny_model

QUESTION = "How do I restart the router?"
MESSAGES = [ChatMessage(role="user", content=QUESTION)]
# A second or more of decoding, so that whoever leaves does so before the end. No drafts: one
# that has learnt the answer from an earlier call would be done in no time.
LONG: dict[str, Any] = {"max_tokens": 3900, "temperature": 1.0, "seed": 1, "speculation": "off"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("models") / "long"
    return str(make_tiny_model(path, max_position_embeddings=4096))


@pytest.fixture(scope="module")
def broker_url(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Valkey with one worker for the tiny model."""
    log = tmp_path_factory.mktemp("worker") / "worker.log"
    with EmbeddedValkey() as valkey, log.open("w") as output:
        command = [*SSD, "worker", "--model", model, "--dtype", "float32"]
        worker = subprocess.Popen(
            command,
            env=ssd_environment(SSD_BROKER_URL=valkey.url),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            backend = CeleryBackend(valkey.url)
            deadline = time.monotonic() + 90
            while not backend.workers():
                assert worker.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.2)
            yield valkey.url
        finally:
            worker.terminate()
            worker.wait(timeout=60)


class Noted(CeleryBackend):
    """A CeleryBackend that remembers the ids of its requests."""

    def __init__(self, broker_url: str) -> None:
        super().__init__(broker_url)
        self.ids: list[str] = []

    def generate(self, request: GenerationRequest) -> Iterator[Event]:
        self.ids.append(request.request_id)
        return super().generate(request)

    def agenerate(self, request: GenerationRequest) -> AsyncIterator[Event]:
        self.ids.append(request.request_id)
        return super().agenerate(request)

    def finish_reason(self, request_id: str) -> str:
        last = list(self.collect(request_id))[-1]
        assert isinstance(last, FinishedEvent)
        return last.finish_reason


async def every_text(chat: ChatSSD, llm: SSDLLM, **options: Any) -> list[str]:
    return [
        chat.invoke(QUESTION, **options).text,
        "".join(chunk.text for chunk in chat.stream(QUESTION, **options)),
        (await chat.ainvoke(QUESTION, **options)).text,
        "".join([chunk.text async for chunk in chat.astream(QUESTION, **options)]),
        str(llm.chat(MESSAGES, **options).message.content),
        "".join(step.delta or "" for step in llm.stream_complete(QUESTION, **options)),
        (await llm.acomplete(QUESTION, **options)).text,
        "".join([s.delta or "" async for s in await llm.astream_chat(MESSAGES, **options)]),
    ]


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.8, "seed": 7}, {"speculation": "off"}, {"stop": ["e"]}],
)
async def test_the_same_text_as_in_process(
    model: str, broker_url: str, options: dict[str, Any]
) -> None:
    local = ChatSSD(model=model, dtype="float32", max_tokens=24).invoke(QUESTION, **options)
    chat = ChatSSD(model=model, broker_url=broker_url, max_tokens=24)
    llm = SSDLLM(model=model, broker_url=broker_url, max_tokens=24)
    assert set(await every_text(chat, llm, **options)) == {local.text}
    remote = list(chat.stream(QUESTION, **options))[-1]
    assert remote.usage_metadata == local.usage_metadata
    for key in ("finish_reason", "stop_sequence", "model_provider"):
        assert remote.response_metadata[key] == local.response_metadata[key]
    # The worker's drafter has learnt from the calls above; its counts differ.
    methods = [answer.response_metadata["speculation"]["method"] for answer in (remote, local)]
    assert methods[0] == methods[1]
    assert local.usage_metadata is not None
    raw = llm.complete(QUESTION, **options).raw
    assert raw["usage"]["total_tokens"] == local.usage_metadata["total_tokens"]


async def test_log_probabilities_and_several_answers_travel(model: str, broker_url: str) -> None:
    options: dict[str, Any] = {
        "temperature": 0.8, "seed": 3, "max_tokens": 8, "repetition_penalty": 1.2,
        "logit_bias": {60: -100}, "logprobs": True, "top_logprobs": 2,
    }  # fmt: skip
    question: list[BaseMessage] = [HumanMessage(QUESTION)]
    local = ChatSSD(model=model, dtype="float32", **options).generate([question], n=3)
    chat = ChatSSD(model=model, broker_url=broker_url, **options)
    tokens = [content_of(answer) for answer in local.generations[0]]
    assert all(tokens)
    for remote in (chat.generate([question], n=3), await chat.agenerate([question], n=3)):
        assert remote.llm_output == local.llm_output
        assert [content_of(answer) for answer in remote.generations[0]] == tokens
    response = SSDLLM(model=model, broker_url=broker_url, **options).chat(MESSAGES)
    assert [token[0].token for token in response.logprobs or ()] == tokens[0]


def content_of(answer: Any) -> list[str]:
    return [token["token"] for token in answer.message.response_metadata["logprobs"]["content"]]


def test_batches(model: str, broker_url: str) -> None:
    chat = ChatSSD(model=model, broker_url=broker_url, max_tokens=8)
    expected = chat.invoke(QUESTION).text
    assert [answer.text for answer in chat.batch([QUESTION] * 6)] == [expected] * 6


async def test_leaving_cancels_on_the_worker(model: str, broker_url: str) -> None:
    backend = Noted(broker_url)
    chat = ChatSSD(model=model, backend=backend, **LONG)
    llm = SSDLLM(model=model, backend=backend, **LONG)
    for _ in chat.stream(QUESTION):
        break
    for _ in llm.stream_chat(MESSAGES):
        break
    async for _ in chat.astream(QUESTION):
        break
    for step in range(8):  # at different points of the exchange with the broker
        call = llm.acomplete(QUESTION) if step % 2 else chat.ainvoke(QUESTION)
        task = asyncio.ensure_future(call)
        await asyncio.sleep(0.1 + 0.02 * step)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    reasons = [await asyncio.to_thread(backend.finish_reason, name) for name in backend.ids]
    assert reasons == ["cancelled"] * 11


async def test_errors_of_the_worker_are_typed(model: str, broker_url: str) -> None:
    chat = ChatSSD(model=model, broker_url=broker_url)
    with pytest.raises(ContextLengthError) as caught:
        chat.invoke("router " * 9000)
    assert isinstance(caught.value, langchain_errors.ContextOverflowError)
    with pytest.raises(ContextLengthError):
        await SSDLLM(model=model, broker_url=broker_url).acomplete("router " * 9000)


def test_no_worker_for_the_model(broker_url: str) -> None:
    chat = ChatSSD(model="nobody/serves-this", broker_url=broker_url, queue_timeout=0.5)
    with pytest.raises(WorkerUnavailableError) as caught:
        chat.invoke(QUESTION)
    assert isinstance(caught.value, langchain_errors.ModelConnectionError)


async def test_no_broker() -> None:
    nowhere = "redis://127.0.0.1:1/0"
    with pytest.raises(BrokerUnavailableError) as caught:
        ChatSSD(broker_url=nowhere).invoke(QUESTION)
    assert isinstance(caught.value, langchain_errors.ModelConnectionError)
    with pytest.raises(BrokerUnavailableError):
        await SSDLLM(broker_url=nowhere).achat(MESSAGES)


def test_tokens_cannot_be_counted_from_afar(model: str, broker_url: str) -> None:
    with pytest.raises(InvalidRequestError, match="tokenizer is on the worker"):
        ChatSSD(model=model, broker_url=broker_url).get_num_tokens("Hello")
