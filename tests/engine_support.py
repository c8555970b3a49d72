"""What engine tests share: building sequences, running them, comparing texts fairly."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ssd_integrations.protocol import (
    Event,
    FinishedEvent,
    GenerationRequest,
    ModelInfo,
    SamplingParams,
    SpeculationParams,
    StructuredOutput,
    is_terminal,
)
from ssd_workers.engine.drafters.base import Drafter, DraftView
from ssd_workers.engine.engine import Engine
from ssd_workers.engine.grammar import GrammarState
from ssd_workers.engine.grammar_compiler import GrammarCompiler
from ssd_workers.engine.loading import LoadedModel, load_model
from ssd_workers.engine.logit_rules import TokenHistory, has_rules
from ssd_workers.engine.memory import CacheMemory
from ssd_workers.engine.runner import RowBlock
from ssd_workers.engine.sampling import process_logits
from ssd_workers.engine.sequence import Sequence
from ssd_workers.engine.text_stream import TextStream
from ssd_workers.engine.tool_grammar import ToolGrammar
from ssd_workers.models.store import resolve_model
from ssd_workers.progress import no_progress

NEAR_TIE = 1e-3
# One for each tokenizer, which it keeps alive.
_compilers: dict[int, GrammarCompiler] = {}
# Tiny models are too fast for drafts to pay; exactness has to be tested all the same.
FIXED_LENGTH = SpeculationParams(adaptive=False)


def load_tiny(path: Path) -> LoadedModel:
    """The model in ``path`` in float32 on the CPU."""
    return load_model(resolve_model(str(path)), "float32", "cpu", no_progress)


@dataclass
class Job:
    """One request of a batch: prompt ids and how to decode them."""

    prompt: list[int]
    max_new_tokens: int = 32
    sampling: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    structure: StructuredOutput | None = None
    tools: ToolGrammar | None = None


def make_engine(
    target: LoadedModel, memory: CacheMemory | None = None, max_num_seqs: int = 8
) -> Engine:
    """An engine without a service around it."""
    info = ModelInfo(
        name="tiny", architecture="tiny", context_length=512, vocab_size=target.vocab_size,
        dtype="float32", device="cpu",
    )  # fmt: skip
    return Engine(target, info, max_num_seqs, memory)


def run_batch(
    target: LoadedModel,
    jobs: Seq[Job],
    drafter: Drafter | None = None,
    *,
    num_draft_tokens: int = 5,
    max_num_seqs: int = 8,
    speculation: SpeculationParams = FIXED_LENGTH,
    engine: Engine | None = None,
) -> list[FinishedEvent]:
    """Decode all jobs together and return their finished events, in order."""
    results = run_to_end(
        target,
        jobs,
        drafter,
        num_draft_tokens=num_draft_tokens,
        max_num_seqs=max_num_seqs,
        speculation=speculation,
        engine=engine,
    )
    assert all(isinstance(event, FinishedEvent) for event in results), results
    return results  # type: ignore[return-value]


def run_to_end(
    target: LoadedModel,
    jobs: Seq[Job],
    drafter: Drafter | None = None,
    *,
    num_draft_tokens: int = 5,
    max_num_seqs: int = 8,
    speculation: SpeculationParams = FIXED_LENGTH,
    engine: Engine | None = None,
) -> list[Event]:
    """Decode all jobs together and return their last events, whatever they are."""
    engine = engine or make_engine(target, max_num_seqs=max_num_seqs)
    ended: dict[str, Event] = {}

    def on_event(event: Event) -> None:
        if is_terminal(event):
            ended[event.request_id] = event

    for index, job in enumerate(jobs):
        engine.add(
            make_sequence(
                target, job, on_event, f"r{index}", drafter=drafter,
                num_draft_tokens=num_draft_tokens, speculation=speculation,
            )
        )  # fmt: skip
    while engine.has_work:
        engine.step()
    return [ended[f"r{index}"] for index in range(len(jobs))]


def make_sequence(
    target: LoadedModel,
    job: Job,
    on_event: Callable[[Event], None],
    request_id: str = "r0",
    *,
    drafter: Drafter | None = None,
    num_draft_tokens: int = 5,
    speculation: SpeculationParams = FIXED_LENGTH,
) -> Sequence:
    """What an engine needs to run ``job``."""
    request = GenerationRequest(
        model="tiny",
        prompt="x",
        request_id=request_id,
        sampling=job.sampling,
        speculation=speculation,
        structured_output=job.structure,
    )
    return Sequence(
        request=request,
        token_ids=list(job.prompt),
        prompt_length=len(job.prompt),
        max_new_tokens=job.max_new_tokens,
        seed=job.seed,
        drafter=drafter,
        num_draft_tokens=num_draft_tokens,
        # Ids as text, so that equal texts are equal tokens.
        text=TextStream(lambda ids: "".join(f"<{i}>" for i in ids), job.sampling.stop),
        on_event=on_event,
        end_token_ids=target.eos_token_ids | frozenset(job.sampling.stop_token_ids),
        history=TokenHistory(job.prompt) if has_rules(job.sampling) else None,
        grammar=_grammar(target, job),
    )


def _grammar(target: LoadedModel, job: Job) -> GrammarState | None:
    if job.tools is not None:
        return _grammars(target).start_tools(job.tools)
    return _grammars(target).start(job.structure) if job.structure else None


def _grammars(target: LoadedModel) -> GrammarCompiler:
    key = id(target.tokenizer)
    if key not in _compilers:
        _compilers[key] = GrammarCompiler(target.tokenizer, target.vocab_size, target.eos_token_ids)
    return _compilers[key]


def output_ids(event: FinishedEvent) -> list[int]:
    """The token ids behind a finished event of :func:`run_batch`."""
    return [int(part) for part in event.text.replace(">", "").split("<") if part]


def assert_same_tokens(
    target: LoadedModel, job: Job, expected: FinishedEvent, got: FinishedEvent
) -> None:
    """Equal token for token, but for float32 near ties (top two within ``NEAR_TIE``)."""
    left, right = output_ids(expected), output_ids(got)
    if left == right:
        return
    at = next(
        (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b),
        min(len(left), len(right)),
    )
    cache = target.runner.new_cache()
    logits = target.runner.forward([RowBlock(cache, [*job.prompt, *left[:at]], 1)])
    scores = process_logits(logits, [job.sampling]) if job.sampling.temperature else logits
    top = torch.topk(scores[0].float(), 2).values
    gap = float(top[0] - top[1])
    assert gap < NEAR_TIE, f"tokens differ at {at} where the top two are {gap} apart"


class NoisyOracle:
    """A drafter that knows the answers and errs at random: every accepted count occurs."""

    name = "oracle"

    def __init__(self, answers: dict[str, list[int]], error_rate: float, vocab_size: int) -> None:
        self._answers = answers
        self._error_rate = error_rate
        self._vocab_size = vocab_size
        self._random = random.Random(0)

    def propose(self, sequences: Seq[DraftView], max_tokens: Seq[int]) -> list[list[int]]:
        drafts = []
        for sequence, limit in zip(sequences, max_tokens, strict=True):
            known = self._answers[sequence.request_id]
            rest = known[len(sequence.token_ids) :][: self._random.randint(0, max(limit, 0))]
            drafts.append(
                [
                    self._random.randrange(self._vocab_size)
                    if self._random.random() < self._error_rate
                    else token
                    for token in rest
                ]
            )
        return drafts

    def observe(self, request_id: str, proposed: int, accepted: int) -> None:
        pass

    def distributions(self, request_id: str) -> None:
        return None

    def forget(self, request_id: str) -> None:
        pass
