"""What drafting costs where nothing of it stands, and what adapting draft lengths gains.

    python benchmarks/adaptive_cost.py [--model demo] [--suite business] [--limit 12]
        [--max-tokens 96] [--rounds 3] [--json]

Every prompt is answered without drafts, by the drafters that need no model, and by one that drafts
as many tokens as it may and is never right ("hopeless"), each with adaptive and with fixed draft
lengths. They take turns prompt by prompt. The figure is each one's seconds over those without
drafts, the median of the rounds' totals, prompts included: 1.03 is 3 % slower than off.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Sequence
from statistics import median

from ssd_integrations.protocol import (
    DeltaEvent,
    Event,
    FailedEvent,
    build_request,
    build_sampling,
    build_speculation,
)
from ssd_workers.bench.suites import Item, load_suite
from ssd_workers.engine.chat_format import ChatFormat
from ssd_workers.engine.config import build_engine_config
from ssd_workers.engine.drafters.base import CopyingDrafter, Drafter, DraftView
from ssd_workers.engine.drafters.ngram import NgramDrafter
from ssd_workers.engine.drafters.suffix import SuffixDrafter
from ssd_workers.engine.engine import Engine
from ssd_workers.engine.loading import LoadedModel, load_engine_models
from ssd_workers.engine.memory import CacheMemory
from ssd_workers.engine.request_builder import RequestBuilder
from ssd_workers.progress import no_progress

DRAFTERS = ("ngram", "suffix", "hopeless")


class HopelessDrafter(CopyingDrafter):
    """Drafts one token again and again that the target never chooses."""

    name = "hopeless"

    def __init__(self, token: int) -> None:
        self._token = token

    def propose(self, sequences: Sequence[DraftView], max_tokens: Sequence[int]) -> list[list[int]]:
        """``max_tokens[i]`` times the token."""
        del sequences
        return [[self._token] * limit for limit in max_tokens]

    def forget(self, request_id: str) -> None:
        """Nothing is kept."""


class Contest:
    """One model, and an engine for every way of drafting, so that none learns from another."""

    def __init__(self, model: str) -> None:
        config = build_engine_config(model=model)
        self._target, _ = load_engine_models(config, no_progress)
        self._builder = RequestBuilder(
            config,
            self._target,
            None,
            ChatFormat(self._target.name, self._target.tokenizer, None),
            self._target.context_length,
            CacheMemory(self._target.runner),
        )
        # A control token of the chat format: no answer contains one before its end.
        unused = max(self._target.tokenizer.all_special_ids)
        self._hopeless = HopelessDrafter(unused)
        self._drafters: dict[tuple[str, bool], Drafter] = {}
        self.start_round()
        self._engines = {key: _engine(self._target) for key in [("off", True), *self._drafters]}

    def start_round(self) -> None:
        """Let the drafters forget the answers that they would find again."""
        for adaptive in (True, False):
            self._drafters["ngram", adaptive] = NgramDrafter()
            self._drafters["suffix", adaptive] = SuffixDrafter()
            self._drafters["hopeless", adaptive] = self._hopeless

    @property
    def ways(self) -> list[tuple[str, bool]]:
        """Every drafter, each with adaptive (True) and with fixed draft lengths."""
        return list(self._engines)

    def answer(self, way: tuple[str, bool], item: Item, max_tokens: int) -> tuple[float, list[int]]:
        """Seconds and tokens of the answer to the first turn of ``item``."""
        tokens: list[int] = []
        failures: list[str] = []

        def on_event(event: Event) -> None:
            if isinstance(event, DeltaEvent):
                tokens.extend(event.token_ids)
            elif isinstance(event, FailedEvent):
                failures.append(event.error.message)

        messages = [{"role": "system", "content": item.system}] if item.system else []
        request = build_request(
            model=self._target.name,
            messages=[*messages, {"role": "user", "content": item.user_turns[0]}],
            sampling=build_sampling(max_tokens=max_tokens),
            speculation=build_speculation(mode="off", adaptive=way[1]),
        )
        started = time.perf_counter()
        sequence = self._builder.build(request, on_event)
        sequence.drafter = self._drafters.get(way)
        engine = self._engines[way]
        engine.add(sequence)
        while engine.has_work:
            engine.step()
        if failures:
            raise SystemExit(f"{way[0]} failed on {item.id!r}: {failures[0]}")
        return time.perf_counter() - started, tokens


def _engine(target: LoadedModel) -> Engine:
    info = target.info(
        context_length=target.context_length, draft_model=None, has_chat_template=True
    )
    return Engine(target, info, max_num_seqs=1)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--suite", default="business")
    parser.add_argument("--limit", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    items = load_suite(options.suite, options.limit)
    contest = Contest(options.model)
    for way in contest.ways:
        contest.answer(way, items[0], 4)
    ratios = defaultdict(list)
    for _ in range(options.rounds):
        contest.start_round()
        seconds: dict[tuple[str, bool], float] = defaultdict(float)
        for index, item in enumerate(items):
            shift = index % len(contest.ways)
            texts = {}
            for way in [*contest.ways[shift:], *contest.ways[:shift]]:
                spent, texts[way] = contest.answer(way, item, options.max_tokens)
                seconds[way] += spent
            if any(text != texts["off", True] for text in texts.values()):
                raise SystemExit(f"The texts of {item.id!r} differ.")
        for way in contest.ways[1:]:
            ratios[way].append(seconds[way] / seconds["off", True])
    if options.json:
        print(
            json.dumps({f"{n}-{'adaptive' if a else 'fixed'}": r for (n, a), r in ratios.items()})
        )
        return
    print(f"{'seconds over those without drafts':34} adaptive   fixed")
    for name in DRAFTERS:
        print(f"{name:34} {median(ratios[name, True]):8.3f} {median(ratios[name, False]):7.3f}")
    print(f"{len(items)} prompts, {options.rounds} rounds; texts of all identical.")


if __name__ == "__main__":
    main()
