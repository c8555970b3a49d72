"""Facts extracted as JSON: is every answer valid, and what does speculation give under a grammar?

    python -m benchmarks.json_extraction [--limit N] [--modes suffix ...] [--temperatures 0 1]

Answers 200 cases with ``structured_output={"json_schema": ...}``, by plain decoding (``off``) and
by every mode of ``--modes``. They take turns on each case (on each ``--batch`` of cases), and who
begins changes; what a drafter has learnt is forgotten before each temperature. Above temperature 0
each case has a seed. jsonschema, which has no part in decoding, says whether an answer is valid.

The rate counts the tokens after the first over the time from it to the last; with a batch it is
all tokens over the time of the whole, prompts included. The exit code is 1 if an answer is missing
or invalid, or if a mode writes another text than plain decoding.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_args

from benchmarks.extraction_cases import NUM_CASES, Case, cases
from ssd_integrations.backends.local import LocalBackend
from ssd_integrations.errors import EngineError, MissingExtraError, SSDError
from ssd_integrations.protocol import (
    DeltaEvent,
    FinishedEvent,
    SpeculationMode,
    StructuredOutput,
    build_request,
    build_sampling,
    build_speculation,
)

try:
    from jsonschema import Draft202012Validator
except ImportError as missing:
    raise MissingExtraError.for_extra("benchmarks.json_extraction", "dev") from missing

PLAIN: SpeculationMode = "off"
_WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class Answer:
    """One answer; without a text where ``failure`` says why there is none."""

    token_ids: tuple[int, ...] = ()
    text: str = ""
    tokens: int = 0
    steps: int = 0
    decode_s: float = 0.0
    failure: str | None = None


@dataclass
class Result:
    """One mode at one temperature."""

    mode: str
    temperature: float
    answers: list[Answer] = field(default_factory=list)
    wall_s: float = 0.0
    faults: dict[str, str] = field(default_factory=dict)
    differing: list[str] = field(default_factory=list)

    def tokens_per_second(self, batch: int) -> float:
        """While decoding, for one answer at a time; else of the whole."""
        if batch > 1:
            return sum(answer.tokens for answer in self.answers) / self.wall_s
        good = [answer for answer in self.answers if answer.decode_s]
        seconds = sum(answer.decode_s for answer in good)
        return sum(answer.tokens - 1 for answer in good) / seconds if seconds else 0.0

    @property
    def tokens_per_pass(self) -> float:
        """Tokens that one pass of the model gave, after the first token."""
        good = [answer for answer in self.answers if answer.steps]
        steps = sum(answer.steps for answer in good)
        return sum(answer.tokens - 1 for answer in good) / steps if steps else 0.0


class Extraction:
    """Asks a backend, mode by mode.

    Parameters:
      backend: whose drafters can be kept apart.
      max_tokens: longest answer.
      batch: how many cases run at once.
    """

    def __init__(self, backend: LocalBackend, max_tokens: int, batch: int) -> None:
        self._backend = backend
        self._max_tokens = max_tokens
        self._batch = batch

    def run(
        self, todo: Sequence[Case], modes: Sequence[SpeculationMode], temperature: float
    ) -> list[Result]:
        """All ``modes`` on all cases, at one temperature."""
        results = [Result(mode, temperature) for mode in modes]
        for mode in modes:
            self._backend.use_drafters(mode, fresh=True)
            self._ask(todo[0], mode, temperature, 0, _WARM_UP_TOKENS)
            self._backend.use_drafters(mode, fresh=True)
        for turn, start in enumerate(range(0, len(todo), self._batch)):
            chunk = list(enumerate(todo))[start : start + self._batch]
            shift = turn % len(results)
            for result in [*results[shift:], *results[:shift]]:
                self._answer(chunk, result)
        for result in results:
            judge(todo, result, results[0])
        return results

    def _answer(self, chunk: Sequence[tuple[int, Case]], result: Result) -> None:
        mode: Any = result.mode
        self._backend.use_drafters(mode, fresh=False)
        begin = time.perf_counter()

        def ask(numbered: tuple[int, Case]) -> Answer:
            seed, case = numbered
            return self._ask(case, mode, result.temperature, seed, self._max_tokens)

        with ThreadPoolExecutor(self._batch) as pool:
            result.answers += pool.map(ask, chunk)
        result.wall_s += time.perf_counter() - begin

    def _ask(
        self, case: Case, mode: SpeculationMode, temperature: float, seed: int, max_tokens: int
    ) -> Answer:
        request = build_request(
            model=self._backend.models()[0].name,
            messages=[{"role": "user", "content": case.prompt}],
            sampling=build_sampling(max_tokens=max_tokens, temperature=temperature, seed=seed),
            speculation=build_speculation(mode=mode),
            structured_output=StructuredOutput(json_schema=case.schema),
        )
        ids: list[int] = []
        try:
            for event in self._backend.generate(request):
                if isinstance(event, DeltaEvent):
                    ids += event.token_ids
                elif isinstance(event, FinishedEvent):
                    return Answer(
                        tuple(ids),
                        event.text,
                        event.usage.completion_tokens,
                        event.speculation.num_spec_steps,
                        event.timing.decode_s,
                    )
        except SSDError as error:
            return Answer(failure=error.code)
        raise EngineError(f"The stream of request {request.request_id} ended without a result.")


def judge(todo: Sequence[Case], result: Result, plain: Result) -> None:
    """Note what is invalid, and what differs from ``plain``."""
    for case, answer, expected in zip(todo, result.answers, plain.answers, strict=True):
        fault = answer.failure or fault_of(answer.text, case.schema)
        if fault is not None:
            result.faults[case.name] = fault
        theirs = (expected.token_ids, expected.text, expected.failure)
        if (answer.token_ids, answer.text, answer.failure) != theirs:
            result.differing.append(case.name)


def fault_of(text: str, schema: dict[str, Any]) -> str | None:
    """Why ``text`` is no JSON that satisfies ``schema``; None if it is."""
    try:
        value = json.loads(text)
    except ValueError as error:
        return f"not JSON: {error}"
    wrong = next(Draft202012Validator(schema).iter_errors(value), None)
    return None if wrong is None else f"invalid: {wrong.message[:100]}"


def show(results: Sequence[Result], batch: int) -> None:
    """One line for each mode, the first of which is the plain one, and its faults."""
    reference = results[0].tokens_per_second(batch)
    for result in results:
        rate = result.tokens_per_second(batch)
        ratio = f"{rate / reference:.2f}x" if reference else "-"
        good = len(result.answers) - len(result.faults)
        print(
            f"T={result.temperature:g} {result.mode:<7} {len(result.answers):>4} cases, {good:>4} "
            f"complete and valid, {rate:>7.1f} tokens/s ({ratio}), {result.tokens_per_pass:.2f} "
            f"tokens/pass, differing: {', '.join(result.differing) or 'none'}",
            flush=True,
        )
        for fault, count in Counter(result.faults.values()).items():
            names = [name for name, found in result.faults.items() if found == fault]
            print(f"    {count} x {fault}: {', '.join(names)}", flush=True)


def as_json(result: Result, batch: int) -> dict[str, Any]:
    """A report of ``result`` with its answers."""
    return {
        **asdict(result),
        "valid": len(result.answers) - len(result.faults),
        "tokens_per_second": result.tokens_per_second(batch),
        "tokens_per_pass": result.tokens_per_pass,
    }


def main() -> int:
    """Decode, judge, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--draft-model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--modes", nargs="+", choices=get_args(SpeculationMode), default=["suffix"])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--limit", type=int, default=NUM_CASES)
    parser.add_argument("--max-tokens", type=int, default=320)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not 1 <= options.limit <= NUM_CASES or options.batch < 1:
        parser.error(f"--limit is 1 to {NUM_CASES}, and --batch at least 1")
    backend = LocalBackend(
        model=options.model,
        draft_model=options.draft_model,
        dtype=options.dtype,
        max_num_seqs=options.batch,
        # A mode must not find the prompt in memory that another one has just read.
        prefix_cache_mib=0,
    )
    extraction = Extraction(backend, options.max_tokens, options.batch)
    modes: list[SpeculationMode] = [
        PLAIN,
        *(mode for mode in dict.fromkeys(options.modes) if mode != PLAIN),
    ]
    results: list[Result] = []
    for temperature in options.temperatures:
        results += extraction.run(cases(options.limit), modes, temperature)
        show(results[-len(modes) :], options.batch)
    backend.close()
    if options.json:
        report = [as_json(result, options.batch) for result in results]
        options.json.write_text(json.dumps(report, indent=1, ensure_ascii=False))
    return 1 if any(result.faults or result.differing for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
