"""Every drafter's text against plain decoding's, over a whole suite of prompts, token for token.

    python benchmarks/suite_exactness.py [--suite business] [--limit N] [--temperatures 0 0.8]

Plain answers are decoded first, in batches of ``--batch``; some of them again alone. Then every
drafter answers the same requests in batches of half that size, so that rows stand among others. At
temperatures above 0 each request has a seed. The draft model, if none is named, is the first
``--draft-layers`` layers of the model itself: a poor one, which the text must not notice.

Prints how many tokens were compared and how many drafted ones were accepted; the exit code is 1 if
a single token differs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

from ssd_integrations.backends.local import LocalBackend
from ssd_integrations.protocol import (
    DeltaEvent,
    FailedEvent,
    FinishedEvent,
    GenerationRequest,
    Message,
    SpeculationMode,
    build_request,
    build_sampling,
    build_speculation,
)
from ssd_workers.bench.suites import Item, load_suite
from ssd_workers.models.store import resolve_model

DRAFTERS: tuple[SpeculationMode, ...] = ("ngram", "suffix", "model", "hybrid", "auto")
# Every so many of the plain answers are decoded once more, alone.
ALONE_EVERY = 6


@dataclass(frozen=True)
class Prompt:
    """One turn to answer, with the turns before it."""

    name: str
    messages: tuple[Message, ...]
    max_tokens: int
    seed: int


@dataclass
class Comparison:
    """One drafter at one temperature against plain decoding in batches."""

    mode: str
    temperature: float
    texts: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0
    differing: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Answer:
    """The tokens of an answer, and what drafts there were."""

    token_ids: tuple[int, ...]
    text: str
    drafted: int
    accepted: int


class Suite:
    """The requests of a suite for one backend.

    Parameters:
      backend: with a draft model.
      max_tokens: longest answer.
      num_draft_tokens: longest draft.
    """

    def __init__(self, backend: LocalBackend, max_tokens: int, num_draft_tokens: int) -> None:
        self._backend = backend
        self._max_tokens = max_tokens
        self._num_draft_tokens = num_draft_tokens

    def request(
        self, prompt: Prompt, mode: SpeculationMode, temperature: float
    ) -> GenerationRequest:
        """``prompt`` as a request."""
        return build_request(
            model=self._backend.models()[0].name,
            messages=prompt.messages,
            sampling=build_sampling(
                max_tokens=min(prompt.max_tokens, self._max_tokens),
                temperature=temperature,
                seed=prompt.seed,
            ),
            # Of fixed length: drafts are made even where they do not pay.
            speculation=build_speculation(
                mode=mode, adaptive=False, num_draft_tokens=self._num_draft_tokens
            ),
        )

    def answer(self, request: GenerationRequest) -> Answer:
        """The whole answer of one request."""
        ids: list[int] = []
        for event in self._backend.generate(request):
            if isinstance(event, DeltaEvent):
                ids += event.token_ids
            elif isinstance(event, FailedEvent):
                raise RuntimeError(event.error.message)
            elif isinstance(event, FinishedEvent):
                stats = event.speculation
                return Answer(
                    tuple(ids), event.text, stats.num_draft_tokens, stats.num_accepted_tokens
                )
        raise RuntimeError(f"request {request.request_id} ended without an answer")

    def answers(
        self, prompts: Sequence[Prompt], mode: SpeculationMode, temperature: float, at_once: int
    ) -> list[Answer]:
        """Answers of all prompts, ``at_once`` at a time."""
        requests = [self.request(prompt, mode, temperature) for prompt in prompts]
        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(self.answer, requests))


def first_turns(items: Sequence[Item]) -> list[Prompt]:
    """The first turn of every conversation."""
    return [
        Prompt(item.id, _opening(item), item.max_tokens, seed) for seed, item in enumerate(items)
    ]


def second_turns(items: Sequence[Item], answers: Sequence[Answer]) -> list[Prompt]:
    """The second turn of those that have one, after the answers to the first."""
    return [
        Prompt(
            f"{item.id}/2",
            (
                *_opening(item),
                Message(role="assistant", content=answer.text),
                Message(role="user", content=item.user_turns[1]),
            ),
            item.max_tokens,
            seed,
        )
        for seed, (item, answer) in enumerate(zip(items, answers, strict=True))
        if len(item.user_turns) > 1 and answer.text
    ]


def _opening(item: Item) -> tuple[Message, ...]:
    system = [] if item.system is None else [Message(role="system", content=item.system)]
    return (*system, Message(role="user", content=item.user_turns[0]))


def first_layers(model: str, count: int, folder: Path) -> Path:
    """A model of the first ``count`` layers of ``model``, with its embedding and its tokenizer."""
    source = Path(resolve_model(model).path)
    for file in source.iterdir():
        if file.suffix in (".json", ".txt", ".jinja") and "index" not in file.name:
            shutil.copy(file, folder / file.name)
    config = json.loads((source / "config.json").read_text())
    config["num_hidden_layers"] = count
    if config.get("layer_types"):
        config["layer_types"] = config["layer_types"][:count]
    (folder / "config.json").write_text(json.dumps(config))
    kept = {}
    for file in source.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                if ".layers." not in name or int(name.split(".layers.")[1].split(".")[0]) < count:
                    kept[name] = tensors.get_tensor(name)
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def compare(
    suite: Suite,
    prompts: Sequence[Prompt],
    plain: Sequence[Answer],
    mode: SpeculationMode,
    temperature: float,
    at_once: int,
) -> Comparison:
    """Decode ``prompts`` with ``mode`` and compare every token with ``plain``."""
    started = time.perf_counter()
    name = f"{mode}, {at_once} at once"
    result = Comparison(name, temperature)
    answers = suite.answers(prompts, mode, temperature, at_once)
    for prompt, answer, expected in zip(prompts, answers, plain, strict=True):
        result.texts += 1
        result.tokens += len(expected.token_ids)
        result.drafted += answer.drafted
        result.accepted += answer.accepted
        if (answer.token_ids, answer.text) != (expected.token_ids, expected.text):
            result.differing.append(prompt.name)
    result.seconds = time.perf_counter() - started
    return result


def main() -> int:
    """Decode, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--draft-model")
    parser.add_argument("--draft-layers", type=int, default=2)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--suite", default="business")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--num-draft-tokens", type=int, default=4)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    items = load_suite(options.suite, options.limit)
    with tempfile.TemporaryDirectory() as folder:
        draft = options.draft_model
        if draft is None:
            draft = str(first_layers(options.model, options.draft_layers, Path(folder)))
        backend = LocalBackend(
            model=options.model,
            draft_model=draft,
            dtype=options.dtype,
            max_num_seqs=options.batch,
        )
        suite = Suite(backend, options.max_tokens, options.num_draft_tokens)
        results = run(suite, items, options)
        backend.close()
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=1))
    faults = sum(len(result.differing) for result in results)
    print(f"{faults} of {sum(r.texts for r in results)} texts differ from plain decoding's")
    return 1 if faults else 0


def run(suite: Suite, items: Sequence[Item], options: argparse.Namespace) -> list[Comparison]:
    """All comparisons, printed as they come."""
    results = []
    for temperature in options.temperatures:
        prompts = first_turns(items)
        plain = suite.answers(prompts, "off", temperature, options.batch)
        more = second_turns(items, plain)
        prompts += more
        plain += suite.answers(more, "off", temperature, options.batch)
        jobs: list[tuple[SpeculationMode, int, int]] = [("off", 1, ALONE_EVERY)]
        jobs += [(mode, max(1, options.batch // 2), 1) for mode in DRAFTERS]
        for mode, at_once, every in jobs:
            result = compare(suite, prompts[::every], plain[::every], mode, temperature, at_once)
            results.append(result)
            print(
                f"T={temperature:g} {result.mode:<14} {result.texts:>4} texts {result.tokens:>6} "
                f"tokens {result.accepted:>5} of {result.drafted:>5} drafted accepted, "
                f"{result.seconds:>5.0f} s, differing: {', '.join(result.differing) or 'none'}",
                flush=True,
            )
    return results


if __name__ == "__main__":
    sys.exit(main())
