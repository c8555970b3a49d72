"""ChatSSD: what reaches the request, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.runnables import ConfigurableField

from ssd_integrations import ChatSSD
from ssd_integrations.errors import InvalidRequestError
from tests.unit.adapter_support import SECRET
from tests.unit.scripted_backend import ScriptedBackend


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


def test_configurable_fields() -> None:
    backend = ScriptedBackend()
    llm = ChatSSD(backend=backend).configurable_fields(
        temperature=ConfigurableField(id="temperature")
    )
    llm.invoke("Hi", config={"configurable": {"temperature": 0.6}})
    assert backend.requests[0].sampling.temperature == 0.6
