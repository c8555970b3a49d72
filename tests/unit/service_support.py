"""Requests to an engine service, and what comes back."""

from __future__ import annotations

import queue
from typing import Any

from ssd_integrations.protocol import (
    Event,
    FinishedEvent,
    GenerationRequest,
    build_request,
    build_sampling,
    build_speculation,
    is_terminal,
)
from ssd_workers.engine.service import EngineService


def request(
    service: EngineService, *, prompt: str = "The router", **fields: Any
) -> GenerationRequest:
    options = ("temperature", "seed", "max_tokens", "stop", "logprobs")
    sampling = {name: fields.pop(name) for name in options if name in fields}
    mode = fields.pop("mode", "auto")
    source = {} if "messages" in fields else {"prompt": prompt}
    return build_request(
        model=service.config.model,
        sampling=build_sampling(**{"max_tokens": 32, **sampling}),
        speculation=build_speculation(mode=mode),
        **source,
        **fields,
    )


class Reader:
    """Collects one request's events."""

    def __init__(self, service: EngineService, req: GenerationRequest) -> None:
        self.events: list[Event] = []
        self._queue: queue.SimpleQueue[Event] = queue.SimpleQueue()
        service.submit(req, self._queue.put)

    def next(self, timeout: float = 30) -> Event:
        self.events.append(self._queue.get(timeout=timeout))
        return self.events[-1]

    def until_terminal(self) -> Event:
        while not (self.events and is_terminal(self.events[-1])):
            self.next()
        return self.events[-1]


def finish(service: EngineService, req: GenerationRequest) -> FinishedEvent:
    event = Reader(service, req).until_terminal()
    assert isinstance(event, FinishedEvent), event
    return event
