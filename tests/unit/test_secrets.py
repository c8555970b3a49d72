"""A broker's password is never shown: not in messages, tracebacks, logs, copies or output."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from ssd_integrations import SSDLLM, ChatSSD
from ssd_integrations.backends.wire import check_broker_url, mask_text, mask_url, unreachable
from ssd_integrations.errors import InvalidRequestError
from ssd_workers.settings import build_worker_settings
from tests.conftest import RunSSD

# Each holds the password "hunter2", whole or in two halves.
URLS = {
    "redis://:hunter2@host/0": "redis://:***@host/0",
    "redis://user:hun@ter2@host:6379/0": "redis://user:***@host:6379/0",
    "redis://user:hun/ter2@host/0": "redis://user:***@host/0",
    "redis://user:hun?ter2@host": "redis://user:***@host",
    "redis://user:hun#ter2@host": "redis://user:***@host",
    "redis://user:hun ter2@host": "redis://user:***@host",
    "redis://user:hunter2": "redis://user:***",
    "redis://hunter2@host": "redis://***@host",
    "redis:user:hunter2@host": "redis:***@host",
    "user:hunter2@host:6379": "user:***@host:6379",
    "redis://user:hunter2@[::1": "redis://user:***@[::1",
    "redis://user:hunter2@host:99999": "redis://user:***@host:99999",
    "redis://host/0?password=hunter2&db=1": "redis://host/0?password=***&db=1",
    "redis://host/0?password=hun@ter2": "redis://host/0?password=***",
}
HALVES = ("hunter2", "hun@", "hun/", "hun?", "hun#", "hun ", "ter2")


def _is_redis_url(url: str) -> bool:
    with contextlib.suppress(InvalidRequestError):
        return bool(check_broker_url(url))
    return False


def leaks(text: str) -> list[str]:
    return [part for part in HALVES if part in text]


@pytest.mark.parametrize(("url", "masked"), URLS.items())
def test_passwords_are_masked(url: str, masked: str) -> None:
    assert mask_url(url) == masked
    assert not leaks(str(unreachable(url, OSError(f"cannot connect to {url}"))))


@pytest.mark.parametrize("url", [url for url in URLS if not _is_redis_url(url)])
def test_a_refused_url_is_masked(url: str) -> None:
    with pytest.raises(InvalidRequestError, match="is not a Redis URL") as info:
        check_broker_url(url)
    assert not leaks(str(info.value))


@pytest.mark.parametrize(
    "url", ["redis://host:6379/0", "rediss://[::1]:6380/2", "redis://host", "host:6379", ""]
)
def test_what_is_no_password_stays(url: str) -> None:
    assert mask_url(url) == url
    assert mask_text(f"at {url}.") == f"at {url}."


@pytest.mark.parametrize("adapter", [ChatSSD, SSDLLM])
@pytest.mark.parametrize(
    "value", [["redis://:hunter2@host"], b"redis://:hunter2@host", {"url": "hunter2"}, 7]
)
def test_a_url_of_the_wrong_type_is_not_shown(adapter: type[Any], value: object) -> None:
    with pytest.raises(InvalidRequestError, match=r"broker_url=\*\*\*: a \w+ is not a URL") as info:
        adapter(broker_url=value)
    chain = [info.value, info.value.__cause__]
    assert not [error for error in chain if leaks(str(error))]


def test_worker_settings_do_not_show_it() -> None:
    with pytest.raises(InvalidRequestError) as info:
        build_worker_settings(broker_url=["redis://:hunter2@host"], engine={"model": "demo"})
    assert not leaks(str(info.value) + str(info.value.__cause__))


@pytest.mark.parametrize("command", [["doctor"], ["generate", "hi"], ["worker"]])
def test_commands_do_not_show_it(run_ssd: RunSSD, command: list[str]) -> None:
    result = run_ssd(*command, "--broker-url", "redis://user:hun/ter2@host")
    assert result.returncode != 0
    assert "is not a Redis URL" in result.stdout + result.stderr
    assert not leaks(result.stdout + result.stderr)
