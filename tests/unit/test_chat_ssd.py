"""ChatSSD: requests, chunks, overrides, validation and serialisation."""

from __future__ import annotations

import asyncio
import copy
import pickle
import subprocess
import sys
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.load import dumps, loads
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import ConfigurableField
from pydantic import SecretStr

from ssd_integrations import ChatSSD
from ssd_integrations.backends.celery import CeleryBackend
from ssd_integrations.errors import EngineError, InvalidRequestError
from ssd_integrations.protocol import Event, GenerationRequest
from tests.unit.scripted_backend import STATS, CountingBackend, ScriptedBackend

SECRET = "redis://:hunter2@gpu-box:6379/0"


def merged(chunks: list[AIMessageChunk]) -> AIMessageChunk:
    first, *rest = chunks
    for chunk in rest:
        first += chunk
    return first


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


def test_constructor_parameters_reach_the_request() -> None:
    backend = ScriptedBackend()
    llm = ChatSSD(
        model="some/model",
        temperature=0.7,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        max_tokens=12,
        stop=["END"],
        seed=3,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=-0.4,
        logit_bias={5: -100, 7: 2.5},
        min_tokens=2,
        stop_token_ids=[8, 9],
        ignore_eos=True,
        logprobs=True,
        top_logprobs=4,
        speculation="hybrid",
        num_draft_tokens=5,
        adaptive=False,
        acceptance="rejection",
        timeout=9.0,
        queue="batch",
        queue_timeout=4.0,
        backend=backend,
    )
    llm.invoke("Hi")
    request = backend.requests[0]
    assert request.model == "some/model"
    assert request.sampling.model_dump() == {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "max_tokens": 12,
        "stop": ("END",),
        "seed": 3,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": -0.4,
        "logit_bias": {5: -100, 7: 2.5},
        "min_tokens": 2,
        "stop_token_ids": (8, 9),
        "ignore_eos": True,
        "logprobs": 4,
    }
    assert request.speculation.model_dump() == {
        "mode": "hybrid",
        "num_draft_tokens": 5,
        "adaptive": False,
        "acceptance": "rejection",
    }
    assert (request.timeout_s, request.queue, request.queue_timeout_s) == (9.0, "batch", 4.0)


def test_call_options_hold_for_one_call() -> None:
    backend = ScriptedBackend()
    llm = ChatSSD(temperature=0.1, seed=1, backend=backend)
    before = llm.model_dump()
    llm.invoke("Hi", temperature=0.9, top_k=5, max_tokens=3, seed=None, speculation="off")
    llm.bind(timeout=2.0, num_draft_tokens=2).invoke("Hi")
    llm.invoke("Hi")
    first, second, third = backend.requests
    assert (first.sampling.temperature, first.sampling.top_k, first.sampling.seed) == (0.9, 5, None)
    assert (first.sampling.max_tokens, first.speculation.mode) == (3, "off")
    assert (second.timeout_s, second.speculation.num_draft_tokens) == (2.0, 2)
    assert (third.sampling.temperature, third.sampling.seed, third.timeout_s) == (0.1, 1, None)
    assert llm.model_dump() == before


@pytest.mark.parametrize(
    ("constructor", "call", "expected"),
    [
        (["A"], None, ("A",)),
        (["A"], ["B", "C"], ("B", "C")),
        (["A"], [], ()),
        ("END", None, ("END",)),
        (None, "END", ("END",)),
        (None, None, ()),
    ],
)
def test_stop_of_the_call_wins(constructor: Any, call: Any, expected: tuple[str, ...]) -> None:
    backend = ScriptedBackend()
    llm = ChatSSD(stop=constructor, backend=backend)
    llm.invoke("Hi", stop=call)
    list(llm.stream("Hi", stop=call))
    assert [request.sampling.stop for request in backend.requests] == [expected, expected]


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


# --- cancellation ---


def test_break_cancels() -> None:
    backend = ScriptedBackend()
    for _ in ChatSSD(backend=backend).stream("Hi"):
        break
    assert backend.cancelled == [backend.requests[0].request_id]


def test_close_cancels_at_once() -> None:
    backend = ScriptedBackend()
    stream: Any = ChatSSD(backend=backend)._stream([HumanMessage("Hi")])
    next(stream)
    stream.close()
    assert backend.cancelled == [backend.requests[0].request_id]


def test_a_stream_read_to_its_end_is_not_cancelled() -> None:
    backend = ScriptedBackend()
    list(ChatSSD(backend=backend).stream("Hi"))
    assert backend.cancelled == []


async def test_aclose_cancels_before_it_returns() -> None:
    backend = ScriptedBackend()
    stream: Any = ChatSSD(backend=backend)._astream([HumanMessage("Hi")])
    await anext(stream)
    await stream.aclose()
    assert backend.cancelled == [backend.requests[0].request_id]


async def test_break_in_async_for_cancels() -> None:
    backend = ScriptedBackend()
    async for _ in ChatSSD(backend=backend).astream("Hi"):
        break
    async with asyncio.timeout(5):
        while not backend.cancelled:
            await asyncio.sleep(0)


async def test_cancelling_the_task_cancels_the_request() -> None:
    backend = ScriptedBackend(pieces=("x",) * 100_000)
    task = asyncio.create_task(ChatSSD(backend=backend).ainvoke("Hi"))
    while not backend.requests:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert backend.cancelled == [backend.requests[0].request_id]


async def test_closing_the_event_stream_cancels() -> None:
    backend = ScriptedBackend(pieces=("x",) * 100_000)
    events = await ChatSSD(backend=backend).astream_events("Hi", version="v3")
    async for _ in events:
        break
    await events.aclose()
    async with asyncio.timeout(5):
        while not backend.cancelled:
            await asyncio.sleep(0)


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


# --- callbacks ---


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


# --- validation ---


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"temperature": -1}, "temperature=-1"),
        ({"temperature": "hot"}, "temperature='hot'"),
        ({"top_p": 0}, "top_p=0"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"stop": [""]}, "stop.0=''"),
        ({"seed": -1}, "seed=-1"),
        ({"speculation": "magic"}, "speculation='magic'"),
        ({"num_draft_tokens": 65}, "num_draft_tokens=65"),
        ({"repetition_penalty": 0}, "repetition_penalty=0"),
        ({"presence_penalty": 2.5}, "presence_penalty=2.5"),
        ({"frequency_penalty": -3}, "frequency_penalty=-3"),
        ({"logit_bias": {3: 101}}, "logit_bias.3=101"),
        ({"logit_bias": {-3: 1}}, "logit_bias.-3"),
        ({"min_tokens": -1}, "min_tokens=-1"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens=9 is more than max_tokens=8"),
        ({"stop_token_ids": [-1]}, "stop_token_ids.0=-1"),
        ({"logprobs": 3}, "logprobs=3"),
        ({"top_logprobs": 3}, "without logprobs=True"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs=21"),
        ({"acceptance": "maybe"}, "acceptance='maybe'"),
        ({"adaptive": "perhaps"}, "adaptive='perhaps'"),
        ({"n": 0}, "n=0"),
        ({"n": 17}, "n=17"),
        ({"n": 2, "streaming": True}, "n=2 answers cannot be streamed"),
        ({"broker_url": SECRET, "suffix_store": "s"}, "suffix_store cannot be set here"),
        ({"timeout": 0}, "timeout_s=0"),
        ({"queue": "express"}, "queue='express'"),
        ({"queue_timeout": -2}, "queue_timeout_s=-2"),
        ({"model": ""}, "model=''"),
        ({"dtype": "int3"}, "dtype='int3'"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"speculation": "model"}, "needs a draft model"),
        ({"broker_url": "gpu-box"}, "not a Redis URL"),
        ({"broker_url": SECRET.replace("redis:", "amqp:")}, "not a Redis URL"),
        ({"broker_url": SECRET, "draft_model": "x"}, "draft_model cannot be set here: the worker"),
        ({"broker_url": SECRET, "dtype": "int8", "device": "cpu"}, "dtype, device cannot"),
        ({"backend": ScriptedBackend(), "num_threads": 2}, "num_threads cannot be set here"),
        ({"backend": ScriptedBackend(), "broker_url": SECRET}, "both given"),
    ],
)
def test_bad_parameters_are_named_at_construction(parameters: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ChatSSD(**parameters)
    assert named in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_a_misspelt_parameter_warns_where_it_was_written() -> None:
    with pytest.warns(UserWarning, match=r"'temprature'.*Did you mean 'temperature'") as seen:
        ChatSSD(temprature=0.5)  # type: ignore[call-arg]
    assert [warning.filename for warning in seen] == [__file__]


def test_a_misspelt_call_option_is_an_error() -> None:
    llm = ChatSSD(backend=ScriptedBackend())
    with pytest.raises(InvalidRequestError, match=r"'temprature'.*Did you mean 'temperature'"):
        llm.invoke("Hi", temprature=0.5)
    with pytest.raises(InvalidRequestError, match=r"'model'.*set at construction"):
        llm.invoke("Hi", model="other")


def test_a_bad_call_option_names_its_value() -> None:
    with pytest.raises(InvalidRequestError, match="temperature=-3"):
        ChatSSD(backend=ScriptedBackend()).invoke("Hi", temperature=-3)


def test_no_messages() -> None:
    with pytest.raises(InvalidRequestError, match="at least one message"):
        ChatSSD(backend=ScriptedBackend()).invoke([])


# --- identity, cache and serialisation ---


def test_secrets_stay_out_of_everything_printed() -> None:
    llm = ChatSSD(broker_url=SECRET)
    for text in (repr(llm), str(llm), dumps(llm), str(llm.model_dump()), str(llm.asdict())):
        assert "hunter2" not in text
    assert "hunter2" not in llm._get_llm_string()


def test_serialisation_round_trip() -> None:
    llm = ChatSSD(broker_url=SECRET, temperature=0.4, stop=["x"], seed=0, logit_bias={3: 1.5}, n=2)
    text = dumps(llm)
    back = loads(
        text,
        allowed_objects=[ChatSSD],
        valid_namespaces=["ssd_integrations"],
        secrets_map={"SSD_BROKER_URL": SECRET},
    )
    assert isinstance(back, ChatSSD)
    assert isinstance(back.broker_url, SecretStr)
    assert back.broker_url.get_secret_value() == SECRET
    assert back._identifying_params == llm._identifying_params


def test_pickle_and_copy() -> None:
    llm = ChatSSD(temperature=0.4)
    for other in (pickle.loads(pickle.dumps(llm)), copy.deepcopy(llm), llm.model_copy()):
        assert other._identifying_params == llm._identifying_params
    with_backend = ChatSSD(backend=CeleryBackend(SECRET, connect_timeout_s=1.5))
    for other in (pickle.loads(pickle.dumps(with_backend)), copy.deepcopy(with_backend)):
        assert isinstance(other.backend, CeleryBackend)
        assert other.backend is not with_backend.backend
        assert other.backend.__reduce__() == with_backend.backend.__reduce__()


@pytest.mark.parametrize(
    "change",
    [
        {"model": "other"},
        {"temperature": 0.5},
        {"top_p": 0.5},
        {"top_k": 7},
        {"min_p": 0.2},
        {"max_tokens": 4},
        {"stop": ["x"]},
        {"seed": 8},
        {"chat_template": "{{ messages }}"},
        {"dtype": "float32"},
        {"max_model_len": 64},
        {"suffix_store": "answers.ssd"},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
        {"logit_bias": {3: 1.0}},
        {"min_tokens": 2},
        {"stop_token_ids": [3]},
        {"ignore_eos": True},
        {"logprobs": True},
        {"speculation": "off"},
        {"num_draft_tokens": 3},
        {"adaptive": False},
        {"acceptance": "rejection"},
        {"n": 2},
    ],
)
def test_what_changes_the_output_changes_the_identity(change: dict[str, Any]) -> None:
    plain, changed = ChatSSD(), ChatSSD(**change)
    assert plain._identifying_params != changed._identifying_params
    assert plain._get_llm_string() != changed._get_llm_string()


def test_the_cache_notices_a_changed_parameter() -> None:
    backend = ScriptedBackend()
    llm = ChatSSD(backend=backend, cache=InMemoryCache())
    llm.invoke("Hi")
    hit = llm.invoke("Hi")
    assert len(backend.requests) == 1
    assert hit.response_metadata["speculation"] == STATS.model_dump(mode="json")
    llm.invoke("Hi", temperature=0.5)
    llm.temperature = 0.7
    llm.invoke("Hi")
    llm.model_copy(update={"temperature": 0.8}).invoke("Hi")
    assert [request.sampling.temperature for request in backend.requests] == [0, 0.5, 0.7, 0.8]


def test_tracing_parameters() -> None:
    llm = ChatSSD(model="m", temperature=0.5, max_tokens=5, stop=["x"])
    assert llm._get_ls_params() == {
        "ls_provider": "ssd",
        "ls_model_name": "m",
        "ls_model_type": "chat",
        "ls_temperature": 0.5,
        "ls_max_tokens": 5,
        "ls_stop": ["x"],
    }
    assert llm._get_ls_params(stop=["y"], temperature=0.1)["ls_stop"] == ["y"]
    assert "ls_stop" not in llm._get_ls_params(stop=[])


def test_configurable_fields() -> None:
    backend = ScriptedBackend()
    llm = ChatSSD(backend=backend).configurable_fields(
        temperature=ConfigurableField(id="temperature")
    )
    llm.invoke("Hi", config={"configurable": {"temperature": 0.6}})
    assert backend.requests[0].sampling.temperature == 0.6


# --- tokens ---


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
