"""What a known prefix saves, and what a streaming answer notices of somebody else's prompt.

    python benchmarks/prefix_reuse.py [--model demo] [--tokens 600] [--rounds 5] [--json]

Each round reads a prefix that no request had before, then the same prefix with another question;
the two take turns, so that a slow spell of the machine hits both. Then an answer is streamed
without speculation while a prompt of the same length is read, and the time between its tokens is
compared with that before. Medians are shown.
"""

from __future__ import annotations

import argparse
import json
import queue
import random
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median

from ssd_integrations.errors import EngineError
from ssd_integrations.protocol import (
    DeltaEvent,
    Event,
    FinishedEvent,
    GenerationRequest,
    build_request,
    build_sampling,
    build_speculation,
    is_terminal,
)
from ssd_workers.engine.config import build_engine_config
from ssd_workers.engine.service import EngineService

_REGIONS = ("northern", "southern", "eastern", "western", "central")
_QUESTIONS = ("Which office had most orders?", "Which office had most returns?")
# Tokens of the streamed answer before the other prompt comes.
_BEFORE = 16


@dataclass(frozen=True)
class Report:
    """Seconds, but for the counts and ratios."""

    prompt_tokens: int
    cached_tokens: int
    rounds: int
    first_token_cold: float
    first_token_warm: float
    warm_to_cold: float
    token_alone: float
    token_beside_a_prompt: float
    longest_beside_a_prompt: float
    beside_to_alone: float
    prompt_beside_an_answer: float


class Running:
    """A request whose events are noted with their time."""

    def __init__(self, service: EngineService, request: GenerationRequest) -> None:
        self.id = request.request_id
        self._events: queue.SimpleQueue[tuple[float, Event]] = queue.SimpleQueue()
        service.submit(request, lambda event: self._events.put((time.perf_counter(), event)))

    def next(self) -> tuple[float, Event]:
        """The next event and when it came."""
        return self._events.get(timeout=600)

    def token_times(self, count: int) -> list[float]:
        """When the next ``count`` tokens came."""
        times: list[float] = []
        while len(times) < count:
            at, event = self.next()
            if is_terminal(event):
                raise EngineError(f"The streamed answer ended early: {event}.")
            if isinstance(event, DeltaEvent) and event.token_ids:
                times.append(at)
        return times

    def end(self) -> FinishedEvent:
        """Its last event."""
        while not is_terminal(event := self.next()[1]):
            pass
        if not isinstance(event, FinishedEvent):
            raise EngineError(f"A request failed: {event}.")
        return event


class Measurement:
    """The requests and what they took."""

    def __init__(self, service: EngineService, tokens: int) -> None:
        self._service = service
        self._tokens = tokens
        self._random = random.Random(0)

    def prefix(self) -> str:
        """A text of about ``tokens`` tokens that differs from all others in its first words."""
        text = f"Report {self._random.randrange(10**9)}."
        week = 0
        while self._service.count_tokens(self._request(text)) < self._tokens:
            week += 1
            region = self._random.choice(_REGIONS)
            orders, returns = self._random.randrange(100, 999), self._random.randrange(10, 99)
            text += f" In week {week} the {region} office had {orders} orders, {returns} returned."
        return text

    def pair(self) -> tuple[FinishedEvent, FinishedEvent]:
        """A prefix read for the first time, and again with another question."""
        prefix = self.prefix()
        cold, warm = (
            Running(self._service, self._request(f"{prefix}\n{question}", max_tokens=2)).end()
            for question in _QUESTIONS
        )
        return cold, warm

    def beside(self) -> tuple[list[float], list[float], float]:
        """Gaps between an answer's tokens alone and beside a prompt; seconds of that prompt."""
        answer = Running(
            self._service, self._request("Write a long report.", max_tokens=4000, ignore_eos=True)
        )
        alone = answer.token_times(_BEFORE)
        reading = self._request(self.prefix(), max_tokens=1)
        submitted = time.perf_counter()
        other = Running(self._service, reading)
        finished = other.end()
        self._service.cancel(answer.id)
        until = submitted + finished.timing.time_to_first_token_s
        times = [alone[-1]]
        while not is_terminal((item := answer.next())[1]):
            times.append(item[0])
        during = [later - sooner for sooner, later in pairwise(times) if submitted < later <= until]
        gaps = [later - sooner for sooner, later in pairwise(alone[2:])]
        return gaps, during, finished.timing.time_to_first_token_s

    def _request(
        self, prompt: str, *, max_tokens: int = 1, ignore_eos: bool = False
    ) -> GenerationRequest:
        return build_request(
            model=self._service.config.model,
            prompt=prompt,
            sampling=build_sampling(max_tokens=max_tokens, ignore_eos=ignore_eos),
            speculation=build_speculation(mode="off"),
        )


def measure(service: EngineService, tokens: int, rounds: int) -> Report:
    """All rounds, after one that is not counted."""
    measurement = Measurement(service, tokens)
    measurement.pair()
    pairs, alone, beside, prompts = [], [], [], []
    for _ in range(rounds):
        pairs.append(measurement.pair())
        gaps, during, seconds = measurement.beside()
        alone += gaps
        beside += during
        prompts.append(seconds)
    cold = median(c.timing.time_to_first_token_s for c, _ in pairs)
    warm = median(w.timing.time_to_first_token_s for _, w in pairs)
    return Report(
        prompt_tokens=pairs[-1][1].usage.prompt_tokens,
        cached_tokens=pairs[-1][1].usage.cached_tokens,
        rounds=rounds,
        first_token_cold=cold,
        first_token_warm=warm,
        warm_to_cold=median(
            w.timing.time_to_first_token_s / c.timing.time_to_first_token_s for c, w in pairs
        ),
        token_alone=median(alone),
        token_beside_a_prompt=median(beside),
        longest_beside_a_prompt=max(beside),
        beside_to_alone=median(beside) / median(alone),
        prompt_beside_an_answer=median(prompts),
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    config = build_engine_config(model=options.model, dtype=options.dtype)
    with EngineService(config) as service:
        report = measure(service, options.tokens, options.rounds)
    if options.json:
        print(json.dumps(asdict(report)))
        return
    print(
        f"{report.prompt_tokens} tokens, {report.cached_tokens} of them known, "
        f"{report.rounds} rounds\n"
        f"first token: {report.first_token_cold:.3f} s, {report.first_token_warm:.3f} s with the "
        f"prefix known ({report.warm_to_cold:.2f})\n"
        f"between tokens: {1e3 * report.token_alone:.0f} ms, "
        f"{1e3 * report.token_beside_a_prompt:.0f} ms while a prompt is read "
        f"({report.beside_to_alone:.2f}; longest {1e3 * report.longest_beside_a_prompt:.0f} ms)\n"
        f"that prompt's first token: {report.prompt_beside_an_answer:.3f} s"
    )


if __name__ == "__main__":
    main()
