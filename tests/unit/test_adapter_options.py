"""Log-probabilities, several answers and call options in both adapters, on a scripted backend."""

from __future__ import annotations

import json
from typing import Any

import pytest
from langchain_core import exceptions as langchain_errors
from langchain_core.caches import InMemoryCache
from langchain_core.messages import BaseMessage, HumanMessage
from langchain_core.runnables import RunnableLambda

from ssd_integrations import SSDLLM, ChatSSD
from ssd_integrations.errors import InvalidRequestError, OverloadedError
from ssd_integrations.protocol import SamplingParams, SpeculationParams
from tests.unit.adapter_support import merged
from tests.unit.scripted_backend import ScriptedBackend
from tests.unit.test_ssdllm import HI, every_endpoint

CALL: dict[str, Any] = {
    "repetition_penalty": 1.3,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "logit_bias": {"5": -1},  # a key as it is in JSON
    "min_tokens": 1,
    "stop_token_ids": [4],
    "ignore_eos": True,
    "logprobs": True,
    "speculation": "suffix",
    "adaptive": False,
    "acceptance": "rejection",
}


def entry(token: str, num_top: int) -> dict[str, Any]:
    def plain(text: str, rank: int) -> dict[str, Any]:
        return {"token": text, "logprob": -0.5 * (rank + 1), "bytes": list(text.encode())}

    top = [token, *(f"<{90 + i}>" for i in range(num_top))][:num_top]
    return {**plain(token, 0), "top_logprobs": [plain(t, rank) for rank, t in enumerate(top)]}


async def test_call_options_hold_for_one_call_in_every_endpoint() -> None:
    backend = ScriptedBackend()
    chat, llm = ChatSSD(backend=backend), SSDLLM(backend=backend)
    before = chat.model_dump(), llm.model_dump()
    chat.invoke("Hi", **CALL)
    list(chat.stream("Hi", **CALL))
    await chat.ainvoke("Hi", **CALL)
    [chunk async for chunk in chat.astream("Hi", **CALL)]
    await every_endpoint(llm, **CALL)
    assert len(backend.requests) == 12
    for request in backend.requests:
        assert request.sampling == SamplingParams(
            repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.25,
            logit_bias={5: -1.0}, min_tokens=1, stop_token_ids=(4,), ignore_eos=True, logprobs=0,
        )  # fmt: skip
        assert request.speculation == SpeculationParams(
            mode="suffix", adaptive=False, acceptance="rejection"
        )
    backend.requests.clear()
    chat.invoke("Hi")
    llm.chat(HI)
    assert [r.sampling for r in backend.requests] == [SamplingParams()] * 2
    assert [r.speculation for r in backend.requests] == [SpeculationParams()] * 2
    assert (chat.model_dump(), llm.model_dump()) == before


@pytest.mark.parametrize(
    ("constructor", "call", "expected"),
    [
        ({}, {}, None),
        ({"logprobs": True}, {}, 0),
        ({"logprobs": True, "top_logprobs": 3}, {}, 3),
        ({"logprobs": True, "top_logprobs": 3}, {"logprobs": False}, None),
        ({"logprobs": True, "top_logprobs": 3}, {"logprobs": None}, None),
        ({"logprobs": True}, {"top_logprobs": 2}, 2),
        ({}, {"logprobs": True, "top_logprobs": 5}, 5),
        ({"logprobs": False}, {}, None),
    ],
)
def test_the_two_logprob_parameters_are_one_number(
    constructor: dict[str, Any], call: dict[str, Any], expected: int | None
) -> None:
    backend = ScriptedBackend()
    ChatSSD(backend=backend, **constructor).invoke("Hi", **call)
    SSDLLM(backend=backend, **constructor).complete("Hi", **call)
    assert [request.sampling.logprobs for request in backend.requests] == [expected] * 2


@pytest.mark.parametrize(
    ("call", "named"),
    [
        ({"logprobs": 2}, "logprobs=2"),
        ({"logprobs": False, "top_logprobs": 2}, "top_logprobs=2 is given without"),
        ({"logprobs": True, "top_logprobs": True}, "top_logprobs=True"),
        ({"n": 0}, "n=0"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"acceptance": "never"}, "acceptance='never'"),
    ],
)
def test_wrong_call_options_are_named(call: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ChatSSD(backend=ScriptedBackend()).invoke("Hi", **call)
    assert named in str(caught.value)
    assert isinstance(caught.value, langchain_errors.ModelInvalidRequestError)


# --- log-probabilities ---


async def test_log_probabilities_streamed_and_not() -> None:
    chat = ChatSSD(backend=ScriptedBackend(("Hel", "", "l\N{REPLACEMENT CHARACTER}")))
    asked: dict[str, Any] = {"logprobs": True, "top_logprobs": 2}
    answer = chat.invoke("Hi", **asked)
    content = answer.response_metadata["logprobs"]["content"]
    assert content[:2] == [entry("Hel", 2), entry("", 2)]
    assert content[2]["bytes"] is None
    chunks = list(chat.stream("Hi", **asked))
    # The token without text has its chunk too: its log-probability must not be lost.
    parts = [c.response_metadata.get("logprobs", {}).get("content") for c in chunks]
    assert parts == [content[:1], content[1:2], content[2:], None]
    streamed = [chunk async for chunk in chat.astream("Hi", **asked)]
    for whole in (merged(chunks), merged(streamed), await chat.ainvoke("Hi", **asked)):
        assert whole.response_metadata == answer.response_metadata
    json.dumps(answer.response_metadata)
    assert "logprobs" not in chat.invoke("Hi").response_metadata


async def test_llama_index_log_probabilities() -> None:
    llm = SSDLLM(backend=ScriptedBackend(), logprobs=True, top_logprobs=2)
    for response in await every_endpoint(llm):
        found = [[(p.token, p.logprob) for p in token] for token in response.logprobs]
        assert found == [[(t, -0.5), ("<90>", -1.0)] for t in ("Hel", "", "lo")]
        assert response.logprobs[0][0].bytes == list(b"Hel")
    steps = list(llm.stream_chat(HI))
    assert [len(step.logprobs or ()) for step in steps] == [1, 2, 3, 3]
    assert llm.chat(HI, logprobs=False).logprobs is None


# --- several answers ---


async def test_n_answers_with_everything_of_their_own() -> None:
    backend = ScriptedBackend()
    chat = ChatSSD(backend=backend, temperature=0.8, seed=5)
    question: list[BaseMessage] = [HumanMessage("Hi")]
    for result in (
        chat.generate([question], n=3),
        await chat.agenerate([question], n=3),
        ChatSSD(backend=backend, temperature=0.8, seed=5, n=3).generate([question]),
    ):
        (answers,) = result.generations
        assert [answer.text for answer in answers] == ["Hello"] * 3
        for answer in answers:
            message: Any = answer.message  # type: ignore[union-attr]
            assert message.response_metadata["finish_reason"] == "stop"
            assert message.response_metadata["speculation"]["mean_acceptance_length"] == 2.5
            assert message.usage_metadata["total_tokens"] == 10
        assert len({answer.message.id for answer in answers}) == 3  # type: ignore[union-attr]
        usage = {"prompt_tokens": 21, "completion_tokens": 9, "total_tokens": 30}
        assert result.llm_output == {"token_usage": usage}
    assert len(backend.requests) == 9
    seeds = [request.sampling.seed for request in backend.requests]
    assert len(set(seeds[:3])) == 3
    assert sorted(map(str, seeds)) == sorted(map(str, seeds[:3] * 3))
    assert chat.invoke("Hi", n=2).text == "Hello"


def test_usage_of_several_prompts_with_several_answers() -> None:
    result = ChatSSD(backend=ScriptedBackend(), n=2).generate([[HumanMessage("a")]] * 3)
    assert result.llm_output is not None
    assert result.llm_output["token_usage"]["total_tokens"] == 60
    assert not ChatSSD(backend=ScriptedBackend()).generate([[HumanMessage("a")]]).llm_output


async def test_n_answers_cannot_be_streamed() -> None:
    chat = ChatSSD(backend=ScriptedBackend(), n=2)
    with pytest.raises(InvalidRequestError, match="n=2 answers cannot be streamed") as caught:
        list(chat.stream("Hi"))
    assert isinstance(caught.value, langchain_errors.ModelInvalidRequestError)
    with pytest.raises(InvalidRequestError, match="n=2"):
        [chunk async for chunk in chat.astream("Hi")]
    assert [chunk.text for chunk in chat.stream("Hi", n=1)] == ["Hel", "lo", ""]
    with pytest.raises(InvalidRequestError, match="n=3"):
        ChatSSD(backend=ScriptedBackend(), streaming=True).invoke("Hi", n=3)


async def test_n_answers_inside_a_chain_that_is_watched() -> None:
    """A watcher would like tokens; an invoke inside is answered whole all the same."""
    chat = ChatSSD(backend=ScriptedBackend())
    step: RunnableLambda[str, str] = RunnableLambda(
        lambda question: chat.invoke(question, n=2).text
    )
    events = [event async for event in step.astream_events("Hi", version="v2")]
    assert events[-1]["data"]["output"] == "Hello"


def test_the_cache_tells_counts_apart() -> None:
    backend = ScriptedBackend()
    chat = ChatSSD(backend=backend, cache=InMemoryCache())
    question: list[BaseMessage] = [HumanMessage("Hi")]
    for n, requests in ((1, 1), (3, 4), (3, 4), (1, 4), (2, 6)):
        assert len(chat.generate([question], n=n).generations[0]) == n
        assert len(backend.requests) == requests


async def test_a_failure_of_one_is_a_failure_of_all() -> None:
    chat = ChatSSD(backend=ScriptedBackend(error=OverloadedError("Busy.")), n=3)
    with pytest.raises(langchain_errors.ModelRateLimitError):
        chat.invoke("Hi")
    with pytest.raises(langchain_errors.ModelRateLimitError):
        await chat.ainvoke("Hi")


def test_device_options_are_checked_and_shared_by_their_content() -> None:
    quantization = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    one = ChatSSD(quantization=quantization, dtype="bfloat16", attn_implementation="sdpa")
    other = ChatSSD(
        quantization=dict(reversed(quantization.items())),
        dtype="bfloat16",
        attn_implementation="sdpa",
    )
    assert one._backend_options() == other._backend_options()
    assert isinstance(hash(one._backend_options()), int)
    with pytest.raises(InvalidRequestError, match="attn_implementation"):
        ChatSSD(attn_implementation="magic")
    with pytest.raises(InvalidRequestError, match="int8"):
        SSDLLM(dtype="int8", device_map="auto")
    with pytest.raises(InvalidRequestError, match="device_map=auto"):
        SSDLLM(decode_step="static", device_map="auto")
    assert ChatSSD(decode_step="graphs")._backend_options() != ChatSSD()._backend_options()
    with pytest.raises(InvalidRequestError, match="device_map cannot be set here"):
        ChatSSD(broker_url="redis://localhost:6379/0", device_map="auto")
