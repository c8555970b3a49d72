"""Call options of both adapters on the real engine in this process, with a tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import BaseMessage, HumanMessage
from llama_index.core.base.llms.types import ChatMessage

from ssd_integrations import SSDLLM, ChatSSD
from ssd_integrations.backends.local import LocalBackend
from ssd_integrations.errors import ContextLengthError, InvalidRequestError

QUESTION = "How do I restart the router?"
MESSAGES: list[BaseMessage] = [HumanMessage(QUESTION)]


@pytest.fixture(scope="module")
def chat(tiny_model: Path) -> ChatSSD:
    return ChatSSD(model=str(tiny_model), dtype="float32", max_tokens=24)


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> SSDLLM:
    return SSDLLM(model=str(tiny_model), dtype="float32", max_tokens=24)


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.5},
        {"presence_penalty": 2.0, "frequency_penalty": 1.0},
        {"frequency_penalty": -2.0},
        {"logit_bias": {50: 8.0, 60: -100}},
    ],
)
def test_penalties_change_the_text_and_speculation_does_not(
    chat: ChatSSD, options: dict[str, Any]
) -> None:
    plain = chat.invoke(QUESTION, max_tokens=48).text
    texts = {
        chat.invoke(QUESTION, speculation=mode, max_tokens=48, **options).text
        for mode in ("off", "ngram", "suffix", "hybrid", "auto")
    }
    assert len(texts) == 1
    assert texts != {plain}
    assert chat.invoke(QUESTION, max_tokens=48).text == plain  # nothing of it stays


def test_the_end_of_the_text(chat: ChatSSD, llm: SSDLLM, tiny_model: Path) -> None:
    whole = chat.invoke(QUESTION, logprobs=True)
    backend = LocalBackend(model=str(tiny_model), dtype="float32")
    events = list(backend.generate(chat._request(MESSAGES, None, {})))
    ids = [token for event in events if event.type == "delta" for token in event.token_ids]
    stop = ids[3]
    place = ids.index(stop)
    for answer in (
        chat.invoke(QUESTION, stop_token_ids=[stop]),
        ChatSSD(**{**chat.model_dump(), "stop_token_ids": [stop]}).invoke(QUESTION),
    ):
        assert answer.usage_metadata is not None
        assert answer.usage_metadata["output_tokens"] == place + 1
        assert answer.response_metadata["finish_reason"] == "stop"
    later = chat.invoke(QUESTION, stop_token_ids=[stop], min_tokens=place + 3)
    assert later.usage_metadata is not None
    assert later.usage_metadata["output_tokens"] > place + 1
    raw = llm.complete(QUESTION, stop_token_ids=[stop]).raw
    assert raw["usage"]["completion_tokens"] == place + 1
    assert whole.text.startswith(chat.invoke(QUESTION, stop_token_ids=[stop]).text)


async def test_log_probabilities_are_complete_and_merge(chat: ChatSSD, llm: SSDLLM) -> None:
    asked: dict[str, Any] = {"logprobs": True, "top_logprobs": 3}
    answer = chat.invoke(QUESTION, **asked)
    content = answer.response_metadata["logprobs"]["content"]
    assert answer.usage_metadata is not None
    assert len(content) == answer.usage_metadata["output_tokens"]
    for token in content:
        best = [top["logprob"] for top in token["top_logprobs"]]
        assert len(best) == 3
        assert best == sorted(best, reverse=True)
        assert token["logprob"] == best[0]  # greedy
    first, *rest = chat.stream(QUESTION, **asked)
    for chunk in rest:
        first += chunk
    assert first.text == answer.text
    streamed = first.response_metadata["logprobs"]["content"]
    assert [t["token"] for t in streamed] == [t["token"] for t in content]
    values = [token["logprob"] for token in content]
    assert [t["logprob"] for t in streamed] == pytest.approx(values, abs=1e-4)
    messages = [ChatMessage(role="user", content=QUESTION)]
    for response in (
        llm.chat(messages, **asked),
        list(llm.stream_complete(QUESTION, **asked))[-1],
        await llm.acomplete(QUESTION, **asked),
    ):
        assert response.logprobs is not None
        assert [token[0].logprob for token in response.logprobs] == pytest.approx(values, abs=1e-4)
        assert {len(token) for token in response.logprobs} == {3}
    assert "logprobs" not in chat.invoke(QUESTION).response_metadata


async def test_n_answers_are_distinct_and_reproducible(chat: ChatSSD) -> None:
    sampled: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": 12}
    one = chat.invoke(QUESTION, **sampled).text
    texts = []
    for n in (4, 4, 2):
        result = chat.generate([MESSAGES], n=n, **sampled)
        texts.append([answer.text for answer in result.generations[0]])
    again = await chat.agenerate([MESSAGES], n=4, **sampled)
    assert texts[0] == texts[1] == [answer.text for answer in again.generations[0]]
    assert texts[2] == texts[0][:2]
    assert texts[0][0] == one
    assert len(set(texts[0])) == 4
    fresh = chat.generate([MESSAGES], n=4, temperature=1.0, max_tokens=12)
    assert len({answer.text for answer in fresh.generations[0]}) == 4


def test_n_answers_sum_their_usage(chat: ChatSSD) -> None:
    result = chat.generate([MESSAGES], n=4, temperature=1.0, seed=1, ignore_eos=True)
    usage = {"prompt_tokens": 0, "completion_tokens": 96, "total_tokens": 0}
    for answer in result.generations[0]:
        message: Any = answer.message  # type: ignore[union-attr]
        usage["prompt_tokens"] += message.usage_metadata["input_tokens"]
        usage["total_tokens"] += message.usage_metadata["total_tokens"]
        assert message.response_metadata["finish_reason"] == "length"
    assert result.llm_output == {"token_usage": usage}


def test_acceptance_by_rejection_is_greedy_at_temperature_0(chat: ChatSSD) -> None:
    assert chat.invoke(QUESTION, acceptance="rejection").text == chat.invoke(QUESTION).text
    sampled = chat.invoke(QUESTION, acceptance="rejection", temperature=0.8, seed=1)
    assert sampled.text
    assert chat.invoke(QUESTION, adaptive=False).text == chat.invoke(QUESTION).text


def test_a_token_that_the_model_does_not_have(chat: ChatSSD) -> None:
    with pytest.raises(InvalidRequestError, match="logit_bias names token 9999"):
        chat.invoke(QUESTION, logit_bias={9999: 1})
    with pytest.raises(InvalidRequestError, match="stop_token_ids names token 9999"):
        chat.invoke(QUESTION, stop_token_ids=[9999], n=3)


def test_n_answers_that_do_not_fit(chat: ChatSSD) -> None:
    with pytest.raises(ContextLengthError):
        chat.invoke("router " * 2000, n=3)


def test_a_suffix_store_is_written(tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "answers.ssd"
    options: dict[str, Any] = {"dtype": "float32", "suffix_store": str(file), "max_tokens": 8}
    assert ChatSSD(model=str(tiny_model), **options).invoke(QUESTION).text
    LocalBackend(model=str(tiny_model), dtype="float32", suffix_store=str(file)).close()
    assert file.exists()
