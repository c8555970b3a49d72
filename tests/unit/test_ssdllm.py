"""SSDLLM: eight endpoints, requests, streams, metadata and serialisation."""

from __future__ import annotations

import asyncio
import copy
import json
import pickle
from collections.abc import AsyncGenerator, AsyncIterator, Generator
from typing import Any

import pytest
from llama_index.core.agent.workflow import AgentWorkflow
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.core.tools import FunctionTool
from pydantic import BaseModel

from ssd_integrations import SSDLLM
from ssd_integrations.backends.celery import CeleryBackend
from ssd_integrations.errors import InvalidRequestError, OverloadedError
from ssd_integrations.protocol import Event, GenerationRequest
from tests.unit.adapter_support import SECRET, cancel_once_sent, until_cancelled
from tests.unit.scripted_backend import INFO, STATS, ScriptedBackend

HI = [ChatMessage(role="user", content="Hi")]


def chat_text(response: Any) -> str:
    return str(response.message.content)


async def every_endpoint(llm: SSDLLM, **options: Any) -> list[Any]:
    """The last response of each of the eight endpoints."""
    return [
        llm.chat(HI, **options),
        llm.complete("Hi", **options),
        list(llm.stream_chat(HI, **options))[-1],
        list(llm.stream_complete("Hi", **options))[-1],
        await llm.achat(HI, **options),
        await llm.acomplete("Hi", **options),
        [r async for r in await llm.astream_chat(HI, **options)][-1],
        [r async for r in await llm.astream_complete("Hi", **options)][-1],
    ]


async def test_eight_endpoints_tell_the_same() -> None:
    backend = ScriptedBackend()
    for response in await every_endpoint(SSDLLM(backend=backend)):
        assert (getattr(response, "text", None) or chat_text(response)) == "Hello"
        assert response.raw["usage"] == {
            "prompt_tokens": 7,
            "completion_tokens": 3,
            "total_tokens": 10,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        assert response.raw["speculation"] == STATS.model_dump(mode="json")
        assert response.raw["finish_reason"] == "stop"
        json.dumps(response.raw)
    sent = [request.messages for request in backend.requests]
    assert len(sent) == 8
    assert all(m is not None and (m[0].role, m[0].content) == ("user", "Hi") for m in sent)


async def test_streams_are_cumulative_with_deltas() -> None:
    llm = SSDLLM(backend=ScriptedBackend())
    chat = llm.stream_chat(HI)
    assert isinstance(chat, Generator)
    steps = list(chat)
    assert [chat_text(step) for step in steps] == ["Hel", "Hello", "Hello"]
    assert [step.delta for step in steps] == ["Hel", "lo", ""]
    assert [step.raw is None for step in steps] == [True, True, False]
    completion = await llm.astream_complete("Hi")
    assert isinstance(completion, AsyncGenerator)
    texts = [(step.text, step.delta) async for step in completion]
    assert texts == [("Hel", "Hel"), ("Hello", "lo"), ("Hello", "")]


async def test_call_options_reach_every_endpoint_and_do_not_stay() -> None:
    backend = ScriptedBackend()
    llm = SSDLLM(temperature=0.1, stop=["A"], backend=backend)
    await every_endpoint(llm, temperature=0.9, stop=[], seed=4, timeout=3.0)
    for request in backend.requests:
        assert (request.sampling.temperature, request.sampling.stop) == (0.9, ())
        assert (request.sampling.seed, request.timeout_s) == (4, 3.0)
    llm.chat(HI)
    last = backend.requests[-1].sampling
    assert (last.temperature, last.stop, last.seed) == (0.1, ("A",), None)


# --- raw prompts ---


async def test_formatted_prompts_are_sent_as_they_are() -> None:
    backend = ScriptedBackend()
    llm = SSDLLM(backend=backend)
    llm.complete("<s>Hi", formatted=True)
    list(llm.stream_complete("<s>Hi", formatted=True))
    await llm.acomplete("<s>Hi", formatted=True)
    [r async for r in await llm.astream_complete("<s>Hi", formatted=True)]
    assert [(r.prompt, r.messages) for r in backend.requests] == [("<s>Hi", None)] * 4


def test_prompt_functions_of_the_user_are_honoured() -> None:
    backend = ScriptedBackend()
    llm = SSDLLM(
        backend=backend,
        completion_to_prompt=lambda prompt: f"Q: {prompt}\nA:",
        messages_to_prompt=lambda messages: "|".join(str(m.content) for m in messages),
    )
    llm.complete("Hi")
    llm.complete("Hi", formatted=True)
    llm.chat([*HI, *HI])
    assert [request.prompt for request in backend.requests] == ["Q: Hi\nA:", "Hi", "Hi|Hi"]


# --- cancellation and errors ---


def test_closing_a_stream_cancels() -> None:
    for endpoint in ("stream_chat", "stream_complete"):
        backend = ScriptedBackend()
        stream = getattr(SSDLLM(backend=backend), endpoint)(HI if "chat" in endpoint else "Hi")
        next(stream)
        stream.close()
        assert backend.cancelled == [backend.requests[0].request_id]


async def test_closing_an_async_stream_cancels() -> None:
    for endpoint in ("astream_chat", "astream_complete"):
        backend = ScriptedBackend()
        llm = SSDLLM(backend=backend)
        stream = await getattr(llm, endpoint)(HI if "chat" in endpoint else "Hi")
        await anext(stream)
        await stream.aclose()
        del stream
        await until_cancelled(backend)


async def test_cancelling_the_task_cancels_the_request() -> None:
    backend = ScriptedBackend(pieces=("x",) * 100_000)
    await cancel_once_sent(backend, SSDLLM(backend=backend).achat(HI))
    assert backend.cancelled == [backend.requests[0].request_id]


async def test_async_endpoints_leave_the_loop_free() -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    ticker = asyncio.create_task(tick())
    await SSDLLM(backend=ScriptedBackend(pieces=("x",) * 50)).acomplete("Hi")
    ticker.cancel()
    assert ticks >= 50


async def test_errors_come_through_every_endpoint() -> None:
    llm = SSDLLM(backend=ScriptedBackend(error=OverloadedError("Busy.")))
    for call in (
        lambda: llm.chat(HI),
        lambda: llm.complete("Hi"),
        lambda: list(llm.stream_chat(HI)),
        lambda: list(llm.stream_complete("Hi")),
    ):
        with pytest.raises(OverloadedError):
            call()
    with pytest.raises(OverloadedError):
        await llm.achat(HI)
    with pytest.raises(OverloadedError):
        await llm.acomplete("Hi")
    with pytest.raises(OverloadedError):
        [r async for r in await llm.astream_chat(HI)]
    with pytest.raises(OverloadedError):
        [r async for r in await llm.astream_complete("Hi")]


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"temperature": -1}, "temperature=-1"),
        ({"dtype": "int3"}, "dtype='int3'"),
        ({"context_window": 0}, "context_window=0"),
        ({"broker_url": SECRET, "draft_model": "x"}, "draft_model cannot be set here: the worker"),
    ],
)
def test_bad_parameters_are_named_at_construction(parameters: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SSDLLM(**parameters)
    assert named in str(caught.value)


def test_misspelt_names() -> None:
    with pytest.warns(UserWarning, match=r"'max_token'.*Did you mean 'max_tokens'") as seen:
        llm = SSDLLM(max_token=3, backend=ScriptedBackend())  # type: ignore[call-arg]
    assert seen[0].filename == __file__
    with pytest.raises(InvalidRequestError, match=r"'max_token'.*Did you mean 'max_tokens'"):
        llm.chat(HI, max_token=3)


# --- metadata, serialisation, framework ---


def test_metadata_is_offline_and_learns_the_context_window() -> None:
    llm = SSDLLM(model="m", max_tokens=99, broker_url="redis://nowhere.invalid:1/0")
    metadata = llm.metadata
    assert (metadata.model_name, metadata.num_output) == ("m", 99)
    assert (metadata.is_chat_model, metadata.is_function_calling_model) == (True, False)
    learning = SSDLLM(backend=ScriptedBackend())
    assert learning.metadata.context_window == 3900
    learning.chat(HI)
    assert learning.metadata.context_window == INFO.context_length
    assert SSDLLM(max_model_len=512).metadata.context_window == 512
    assert SSDLLM(max_model_len=512, context_window=256).metadata.context_window == 256


def test_secrets_stay_out() -> None:
    llm = SSDLLM(broker_url=SECRET)
    for text in (repr(llm), llm.to_json(), str(llm.to_dict()), str(llm.to_payload())):
        assert "hunter2" not in text


def test_serialisation_pickle_and_copy() -> None:
    llm = SSDLLM(model="m", temperature=0.4, stop=["x"], seed=0, logit_bias={3: 1.5})
    back = SSDLLM.from_dict(llm.to_dict())
    for other in (back, pickle.loads(pickle.dumps(llm)), copy.deepcopy(llm)):
        assert other.to_dict() == llm.to_dict()
    # LlamaIndex leaves out of a pickle what cannot be pickled; the model would be of no use.
    with_backend = SSDLLM(backend=CeleryBackend("redis://localhost:1/0"))
    assert isinstance(pickle.loads(pickle.dumps(with_backend)).backend, CeleryBackend)


def test_tokens_are_counted_once_per_call() -> None:
    counter = TokenCountingHandler(tokenizer=str.split)
    llm = SSDLLM(backend=ScriptedBackend(), callback_manager=CallbackManager([counter]))
    llm.complete("Hi")
    assert (counter.prompt_llm_token_count, counter.completion_llm_token_count) == (7, 3)
    list(llm.stream_chat(HI))
    assert (counter.prompt_llm_token_count, counter.completion_llm_token_count) == (14, 6)


def test_structured_prediction_through_the_prompt() -> None:
    class City(BaseModel):
        name: str

    from llama_index.core.prompts import PromptTemplate

    llm = SSDLLM(backend=ScriptedBackend(pieces=('{"name": ', '"Seoul"}')))
    assert llm.structured_predict(City, PromptTemplate("A city.")) == City(name="Seoul")


async def test_agents_describe_tools_in_the_prompt() -> None:
    def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    class TwoSteps(ScriptedBackend):
        async def agenerate(self, request: GenerationRequest) -> AsyncIterator[Event]:
            action = 'Thought: A tool.\nAction: add\nAction Input: {"a": 2, "b": 3}\n'
            self.pieces = ("Thought: Done.\nAnswer: It is 5.",) if self.requests else (action,)
            async for event in super().agenerate(request):
                yield event

    backend = TwoSteps()
    agent = AgentWorkflow.from_tools_or_functions([add], llm=SSDLLM(backend=backend))
    assert str(await agent.run("What is 2 + 3?")) == "It is 5."
    first, second = (request.messages for request in backend.requests)
    assert first is not None
    assert "Tool Name: add" in first[0].content
    assert second is not None
    assert second[-1].content == "Observation: 5"


def test_a_direct_call_with_tools_says_what_to_use() -> None:
    llm = SSDLLM(backend=ScriptedBackend())
    with pytest.raises(InvalidRequestError, match=r"takes none.*ReActAgent"):
        llm.chat_with_tools([FunctionTool.from_defaults(chat_text)], "What is 2 + 3?")


def test_system_prompt_and_roles_of_predict() -> None:
    from llama_index.core.prompts import PromptTemplate

    backend = ScriptedBackend()
    SSDLLM(backend=backend, system_prompt="Be brief.").predict(PromptTemplate("{x}"), x="Hi")
    messages = backend.requests[0].messages
    assert messages is not None
    assert [(m.role, m.content) for m in messages] == [("system", "Be brief."), ("user", "Hi")]
    assert SSDLLM().metadata.system_role == MessageRole.SYSTEM
