"""Errors of a call are ours and LangChain's at once."""

from __future__ import annotations

import pickle

import pytest
from langchain_core import exceptions as framework

from ssd_integrations import ChatSSD, errors
from ssd_integrations.langchain.errors import to_framework_error
from tests.unit.scripted_backend import ScriptedBackend

CASES = [
    (errors.EngineError, framework.ModelAPIError),
    (errors.InvalidRequestError, framework.ModelInvalidRequestError),
    (errors.MalformedMessageError, framework.ModelInvalidRequestError),
    (errors.ChatTemplateError, framework.ModelInvalidRequestError),
    (errors.ContextLengthError, framework.ContextOverflowError),
    (errors.ModelNotFoundError, framework.ModelNotFoundError),
    (errors.DownloadError, framework.ModelConnectionError),
    (errors.BrokerUnavailableError, framework.ModelConnectionError),
    (errors.WorkerUnavailableError, framework.ModelConnectionError),
    (errors.DeadlineExceededError, framework.ModelTimeoutError),
    (errors.OverloadedError, framework.ModelRateLimitError),
    (errors.UnsupportedModelError, framework.ModelError),
    (errors.MissingExtraError, framework.ModelError),
    (errors.RequestCancelledError, framework.ModelError),
]


@pytest.mark.parametrize(("ours", "theirs"), CASES)
async def test_caught_under_either_name(
    ours: type[errors.SSDError], theirs: type[Exception]
) -> None:
    llm = ChatSSD(backend=ScriptedBackend(error=ours("It went wrong.", remedy="Mend it.")))
    with pytest.raises(ours) as caught:
        llm.invoke("Hi")
    assert isinstance(caught.value, theirs)
    assert str(caught.value) == "It went wrong. Mend it."
    with pytest.raises(theirs):
        list(llm.stream("Hi"))
    with pytest.raises(theirs):
        await llm.ainvoke("Hi")
    with pytest.raises(theirs):
        [chunk async for chunk in llm.astream("Hi")]


@pytest.mark.parametrize(("ours", "theirs"), CASES)
def test_both_agree_on_whether_to_retry(
    ours: type[errors.SSDError], theirs: type[framework.ModelError]
) -> None:
    assert ours.retryable == theirs.is_retryable


def test_builtin_ancestry_is_kept() -> None:
    assert isinstance(to_framework_error(errors.DeadlineExceededError("x")), TimeoutError)
    assert isinstance(to_framework_error(errors.BrokerUnavailableError("x")), ConnectionError)
    assert isinstance(to_framework_error(errors.InvalidRequestError("x")), ValueError)


def test_pickles() -> None:
    error = to_framework_error(errors.OverloadedError("Too many.", remedy="Wait."))
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is type(error)
    assert (back.message, back.remedy) == ("Too many.", "Wait.")


def test_the_wire_still_gives_the_plain_class() -> None:
    to_framework_error(errors.OverloadedError("x"))
    assert type(errors.error_from_code("overloaded", "x")) is errors.OverloadedError


def test_a_request_that_cannot_be_built_is_an_invalid_request_for_both() -> None:
    llm = ChatSSD(backend=ScriptedBackend())
    with pytest.raises(framework.ModelInvalidRequestError):
        llm.invoke("Hi", temperature=-1)


def test_retry_of_a_chain_sees_the_framework_class() -> None:
    backend = ScriptedBackend(error=errors.OverloadedError("Busy."))
    llm = ChatSSD(backend=backend).with_retry(
        retry_if_exception_type=(framework.ModelRateLimitError,),
        wait_exponential_jitter=False,
        stop_after_attempt=3,
    )
    with pytest.raises(errors.OverloadedError):
        llm.invoke("Hi")
    assert len(backend.requests) == 3
