"""Tokens per verification of the model-free drafters, replayed on recorded answers.

Reads lines of ``{"prompt_ids": [...], "output_ids": [...]}``, in the order in which the requests
ran, and plays every answer back: each draft is compared with what the model wrote. No model is
loaded, so many settings are compared in seconds::

    python benchmarks/replay_drafters.py answers.jsonl
    python benchmarks/replay_drafters.py answers.jsonl --concurrency 4 --num-draft-tokens 16

``tokens`` counts the bonus token: plain decoding gives 1. The second half shows what a drafter
learns from the first. ``rows`` are drafted tokens per verification, and ``gain`` is the speed
relative to plain decoding if each of them makes a verification ``--row-cost`` longer.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ssd_integrations.protocol import SamplingParams
from ssd_workers.engine.drafters.base import Drafter
from ssd_workers.engine.drafters.hybrid import HybridDrafter
from ssd_workers.engine.drafters.ngram import NgramDrafter
from ssd_workers.engine.drafters.suffix import SuffixDrafter
from ssd_workers.engine.logit_rules import RowRules


@dataclass(frozen=True)
class Answer:
    """One recorded request."""

    prompt_ids: list[int]
    output_ids: list[int]


@dataclass
class Replay:
    """A running request of the replay, as a drafter sees it (a ``DraftView``)."""

    request_id: str
    answer: Answer
    half: int
    token_ids: list[int] = field(init=False)
    prompt_length: int = field(init=False)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    by_rejection: bool = False

    def rules(self, drafted: list[int]) -> RowRules | None:  # noqa: ARG002
        """None: only a draft model would ask."""
        return None

    def __post_init__(self) -> None:
        # The first token comes from the prefill.
        self.token_ids = [*self.answer.prompt_ids, self.answer.output_ids[0]]
        self.prompt_length = len(self.answer.prompt_ids)

    @property
    def remaining(self) -> list[int]:
        """What the model wrote after ``token_ids``."""
        return self.answer.output_ids[len(self.token_ids) - self.prompt_length :]


@dataclass
class Tally:
    """What one half of a replay amounts to."""

    verifications: int = 0
    emitted: int = 0
    drafted: int = 0

    def tokens(self) -> float:
        """Tokens per verification, the bonus included."""
        return self.emitted / max(1, self.verifications)

    def rows(self) -> float:
        """Drafted tokens per verification."""
        return self.drafted / max(1, self.verifications)

    def gain(self, row_cost: float) -> float:
        """Speed relative to plain decoding."""
        return self.tokens() / (1 + row_cost * self.rows())


@dataclass
class Result:
    """A replay of all answers with one drafter."""

    halves: tuple[Tally, Tally]
    ms_per_draft: float


def replay(
    answers: Sequence[Answer], drafter: Drafter, *, num_draft_tokens: int, concurrency: int
) -> Result:
    """Play ``answers`` back, ``concurrency`` at a time, first come, first served."""
    waiting = deque(
        Replay(f"r{index}", answer, 2 * index // len(answers))
        for index, answer in enumerate(answers)
    )
    halves = (Tally(), Tally())
    running: list[Replay] = []
    spent, calls = 0.0, 0
    while waiting or running:
        while waiting and len(running) < concurrency:
            running.append(waiting.popleft())
        limits = [min(num_draft_tokens, len(r.remaining) - 1) for r in running]
        started = time.perf_counter()
        drafts = drafter.propose(running, limits)
        spent += time.perf_counter() - started
        calls += len(running)
        for request, draft in zip(running, drafts, strict=True):
            _verify(request, draft, drafter, halves[request.half])
        for request in [r for r in running if not r.remaining]:
            drafter.forget(request.request_id)
            running.remove(request)
    return Result(halves, 1000 * spent / max(1, calls))


def _verify(request: Replay, draft: list[int], drafter: Drafter, tally: Tally) -> None:
    rest = request.remaining
    accepted = 0
    while accepted < len(draft) and draft[accepted] == rest[accepted]:
        accepted += 1
    drafter.observe(request.request_id, len(draft), accepted)
    request.token_ids += rest[: accepted + 1]
    tally.verifications += 1
    tally.emitted += accepted + 1
    tally.drafted += len(draft)


def settings() -> dict[str, Callable[[], Drafter]]:
    """What is compared: a drafter for each name."""
    made: dict[str, Callable[[], Drafter]] = {"ngram": NgramDrafter}
    for max_n, per_match in ((3, 2), (4, 1), (4, 4), (6, 2)):
        name = f"ngram max_n={max_n} per_match={per_match}"
        made[name] = partial(NgramDrafter, max_n=max_n, per_match=per_match)
    made["suffix"] = SuffixDrafter
    made["suffix, own tree only"] = partial(SuffixDrafter, max_requests=0)
    for depth in (24, 32):
        made[f"suffix depth={depth}"] = partial(SuffixDrafter, depth=depth)
    for factor, offset in ((1, 0), (1, 1), (1.5, 0), (3, 0), (4, 0)):
        name = f"suffix factor={factor} offset={offset}"
        made[name] = partial(SuffixDrafter, factor=factor, offset=offset)
    for min_prob in (0.05, 0.1, 0.15, 0.35, 0.5):
        made[f"suffix min_prob={min_prob}"] = partial(SuffixDrafter, min_prob=min_prob)
    made["hybrid (suffix, else ngram)"] = _hybrid
    return made


def _hybrid() -> Drafter:
    return HybridDrafter(SuffixDrafter(), ngram=NgramDrafter())


def read_answers(lines: Iterable[str]) -> list[Answer]:
    """The recorded answers; those of less than two tokens have nothing to draft."""
    records = [json.loads(line) for line in lines if line.strip()]
    answers = [Answer(record["prompt_ids"], record["output_ids"]) for record in records]
    return [answer for answer in answers if len(answer.output_ids) > 1]


def main() -> None:
    """Replay with every setting and print one line for each."""
    arguments = _arguments()
    with arguments.answers.open(encoding="utf-8") as file:
        answers = read_answers(file)
    if len(answers) < 2:
        raise SystemExit(f"{arguments.answers} holds fewer than two answers of two tokens.")
    total = sum(len(answer.output_ids) for answer in answers)
    print(f"{len(answers)} answers, {total} tokens; first half / second half")
    print(f"{'drafter':32} {'tokens':>13} {'rows':>13} {'gain':>13} {'ms/draft':>9}")
    for name, make in settings().items():
        result = replay(
            answers,
            make(),
            num_draft_tokens=arguments.num_draft_tokens,
            concurrency=arguments.concurrency,
        )
        columns = [
            " / ".join(f"{value:.2f}" for value in values)
            for values in (
                [half.tokens() for half in result.halves],
                [half.rows() for half in result.halves],
                [half.gain(arguments.row_cost) for half in result.halves],
            )
        ]
        cells = " ".join(f"{column:>13}" for column in columns)
        print(f"{name:32} {cells} {result.ms_per_draft:9.3f}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("answers", type=Path, help="JSON lines with prompt_ids and output_ids")
    parser.add_argument("--num-draft-tokens", type=int, default=8)
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument(
        "--row-cost", type=float, default=0.04, help="of a drafted token, in verifications"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
