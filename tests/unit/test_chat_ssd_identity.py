"""ChatSSD: identity, cache, serialisation and secrets."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.load import dumps, loads
from pydantic import SecretStr

from ssd_integrations import ChatSSD
from ssd_integrations.backends.celery import CeleryBackend
from tests.unit.adapter_support import SECRET
from tests.unit.scripted_backend import STATS, ScriptedBackend


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
        {"structured_output": {"regex": "a"}},
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
