"""Calls of tools in the engine: valid by construction, and the same for every drafter."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from ssd_integrations.errors import InvalidStructureError
from ssd_integrations.protocol import FinishedEvent, SamplingParams, SpeculationParams, Tool
from ssd_workers.engine.drafters.base import Drafter
from ssd_workers.engine.drafters.hybrid import HybridDrafter
from ssd_workers.engine.drafters.model import ModelDrafter
from ssd_workers.engine.drafters.ngram import NgramDrafter
from ssd_workers.engine.drafters.suffix import SuffixDrafter
from ssd_workers.engine.grammar_compiler import GrammarCompiler
from ssd_workers.engine.loading import LoadedModel
from ssd_workers.engine.output_parsers.formats import FORMATS, OutputFormat
from ssd_workers.engine.output_parsers.output import ParsedOutput
from ssd_workers.engine.output_parsers.thinking import ThinkingParser
from ssd_workers.engine.tool_grammar import ToolGrammar, closed
from tests.engine_support import Job, NoisyOracle, load_tiny, output_ids, run_batch
from tests.json_schema import conforms
from tests.tools import PARAMETERS, SPECIAL, TOOLS, make_tool_model, parsed

SAMPLINGS = {"greedy": SamplingParams(), "seeded": SamplingParams(temperature=1.0)}
DRAFTERS = ["ngram", "suffix", "model", "hybrid"]
TRIGGERED = ["hermes", "llama3", "mistral", "mistral-args"]
ROOM = 220


def grammar(form: str, **options: Any) -> ToolGrammar:
    options = {"required": True, "several": True, "in_reasoning": False, "thinks": False, **options}
    output_format = OutputFormat(FORMATS[form], options.pop("thinks"))
    return ToolGrammar(tools=TOOLS, output_format=output_format, **options)


class Case:
    """A target with a token for every marker, a draft model near it, and plain answers."""

    def __init__(self, folder: Path) -> None:
        path = make_tool_model(folder)
        self.target = load_tiny(path)
        self.draft = load_tiny(path)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for weight in self.draft.runner.model.parameters():
                weight += 0.004 * torch.randn(weight.shape, generator=generator)
        self.ids = {t.content: i for i, t in self.target.tokenizer.added_tokens_decoder.items()}
        self._answers: dict[tuple[str, str], list[tuple[Job, FinishedEvent]]] = {}

    def drafter(self, name: str) -> Drafter:
        if name == "ngram":
            return NgramDrafter()
        if name == "suffix":
            return SuffixDrafter()
        size = self.target.vocab_size
        model = ModelDrafter(self.draft.runner, self.draft.context_length, size)
        return model if name == "model" else HybridDrafter(SuffixDrafter(), model=model)

    def jobs(self, wanted: ToolGrammar, sampling: SamplingParams, count: int = 4) -> list[Job]:
        """Ragged prompts; where calls are free, their trigger is made likely."""
        rng = random.Random(7)
        if not wanted.required:
            likely = {self.ids[wanted.output_format.tools.trigger]: 6.0}
            sampling = sampling.model_copy(update={"logit_bias": likely})
        made = []
        for index in range(count):
            phrase = [rng.randrange(3, 300) for _ in range(rng.randint(3, 9))]
            prompt = phrase * rng.randint(1, 8)
            made.append(Job(prompt, ROOM, sampling, seed=50 + index, tools=wanted))
        return made

    def plain(self, wanted: ToolGrammar, sampling: str) -> list[tuple[Job, FinishedEvent]]:
        """Jobs and their autoregressive answers, each computed once and alone."""
        key = (wanted.key, sampling)
        if key not in self._answers:
            batch = self.jobs(wanted, SAMPLINGS[sampling])
            self._answers[key] = [(job, run_batch(self.target, [job])[0]) for job in batch]
        return self._answers[key]

    def parse(self, event: FinishedEvent, wanted: ToolGrammar) -> ParsedOutput:
        return parse(self.target, event, wanted)


def parse(target: LoadedModel, event: FinishedEvent, wanted: ToolGrammar) -> ParsedOutput:
    """What the parsers make of an answer, special tokens shown."""
    tokenizer = target.tokenizer
    hidden = set(tokenizer.all_special_ids) - set(tokenizer.convert_tokens_to_ids(list(SPECIAL)))
    pieces = [tokenizer.decode([i for i in output_ids(event) if i not in hidden])]
    thinking = None
    if wanted.output_format.thinks:
        thinking = ThinkingParser(opened=wanted.in_reasoning)
    form = wanted.output_format.tools.name
    return parsed(form, pieces, reason=event.finish_reason, thinking=thinking)[0]


def check(output: ParsedOutput, event: FinishedEvent, *, required: bool, several: bool) -> None:
    """Every call satisfies its schema, and only the token limit cuts one off."""
    for call in output.tool_calls:
        assert conforms(call.arguments, PARAMETERS[call.name]), call
    if event.finish_reason == "stop":
        assert not output.invalid_tool_calls, output.invalid_tool_calls
        if required:
            assert output.tool_calls
            assert output.text == ""
    else:
        assert event.finish_reason == "length"
        assert len(output.invalid_tool_calls) <= 1
    if not several:
        assert len(output.tool_calls) <= 1


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("tools"))


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("required", [True, False], ids=["required", "auto"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_speculative_equals_autoregressive(
    case: Case, drafter: str, required: bool, sampling: str, count: int
) -> None:
    wanted = grammar("hermes", required=required)
    reference = case.plain(wanted, sampling)[:count]
    drafting = case.drafter(drafter)
    # Twice: the second time a drafter that remembers knows the answers.
    for _ in range(2):
        got = run_batch(case.target, [job for job, _ in reference], drafting)
        for (_, expected), event in zip(reference, got, strict=True):
            assert output_ids(event) == output_ids(expected)
            assert event.finish_reason == expected.finish_reason
            assert event.usage == expected.usage
    assert sum(event.speculation.num_accepted_tokens for event in got) > 0


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("form", ["llama3", "mistral", "mistral-args"])
def test_other_formats_are_exact_too(case: Case, form: str, sampling: str) -> None:
    wanted = grammar(form, required=False, thinks=True)
    reference = case.plain(wanted, sampling)
    answers = {
        f"r{i}": [*job.prompt, *output_ids(event)] for i, (job, event) in enumerate(reference)
    }
    oracle = NoisyOracle(answers, error_rate=0.3, vocab_size=case.target.vocab_size)
    got = run_batch(case.target, [job for job, _ in reference], oracle, max_num_seqs=3)
    assert [output_ids(e) for e in got] == [output_ids(e) for _, e in reference]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("several", [True, False], ids=["several", "one"])
@pytest.mark.parametrize("thinks", [True, False], ids=["thinking", "plain"])
@pytest.mark.parametrize("form", sorted(FORMATS))
def test_required_calls_satisfy_their_schemas(
    case: Case, form: str, thinks: bool, several: bool, sampling: str
) -> None:
    wanted = grammar(form, several=several, thinks=thinks)
    batch = case.jobs(wanted, SAMPLINGS[sampling], count=5)
    for event in run_batch(case.target, batch, NgramDrafter()):
        check(case.parse(event, wanted), event, required=True, several=several)


@pytest.mark.parametrize("several", [True, False], ids=["several", "one"])
@pytest.mark.parametrize("form", TRIGGERED)
def test_what_a_trigger_begins_is_a_valid_call(case: Case, form: str, several: bool) -> None:
    wanted = grammar(form, required=False, several=several)
    batch = case.jobs(wanted, SAMPLINGS["seeded"], count=8)
    outputs = []
    for event in run_batch(case.target, batch, case.drafter("hybrid")):
        outputs.append(case.parse(event, wanted))
        check(outputs[-1], event, required=False, several=several)
    assert any(output.tool_calls for output in outputs)
    assert any(output.text for output in outputs)


def test_several_calls_come_in_one_answer(case: Case) -> None:
    wanted = grammar("hermes")
    newline = case.target.tokenizer.encode("\n")[0]
    more = SamplingParams(temperature=1.0, logit_bias={newline: 5.0})
    events = run_batch(case.target, case.jobs(wanted, more), case.drafter("hybrid"))
    for event in events:
        check(case.parse(event, wanted), event, required=True, several=True)
    assert max(len(case.parse(event, wanted).tool_calls) for event in events) > 1


def test_thinking_that_the_prompt_began_must_end_before_the_call(case: Case) -> None:
    wanted = grammar("hermes", thinks=True, in_reasoning=True)
    likely = SamplingParams(temperature=1.0, logit_bias={case.ids["</think>"]: 7.0})
    events = run_batch(case.target, case.jobs(wanted, likely, count=6), NgramDrafter())
    outputs = [case.parse(event, wanted) for event in events]
    for output, event in zip(outputs, events, strict=True):
        check(output, event, required=event.finish_reason == "stop", several=True)
    assert any(output.reasoning and output.tool_calls for output in outputs)


def test_the_token_limit_cuts_a_call_that_is_then_invalid(case: Case) -> None:
    wanted = grammar("hermes", several=False)
    job, whole = case.plain(wanted, "greedy")[0]
    (complete,) = case.parse(whole, wanted).tool_calls
    needed = len(output_ids(whole))
    seen = set()
    for limit in (1, 5, 20, needed - 6, needed - 1, needed):
        short = Job(job.prompt, limit, job.sampling, job.seed, tools=wanted)
        events = [
            run_batch(case.target, [short], drafter)[0] for drafter in (None, case.drafter("model"))
        ]
        assert output_ids(events[0]) == output_ids(events[1]) == output_ids(whole)[:limit]
        output = case.parse(events[0], wanted)
        seen.add(len(output.invalid_tool_calls))
        # The object may be whole where only the closing tag is missing.
        assert output.tool_calls in ([], [complete])
        assert len(output.tool_calls) + len(output.invalid_tool_calls) == 1
        assert events[0].finish_reason == ("stop" if limit == needed else "length")
    assert seen == {0, 1}


def test_forced_tokens_are_drafted_and_accepted(case: Case) -> None:
    wanted = grammar("hermes", several=False)
    event = run_batch(case.target, case.jobs(wanted, SamplingParams(), 1), NgramDrafter())[0]
    assert event.speculation.num_accepted_tokens > 0.5 * event.usage.completion_tokens


def test_rejection_is_valid_and_repeatable(case: Case) -> None:
    wanted = grammar("hermes")
    batch = case.jobs(wanted, SAMPLINGS["seeded"])
    rule = SpeculationParams(adaptive=False, acceptance="rejection")
    runs = [
        run_batch(case.target, batch, case.drafter("model"), speculation=rule) for _ in range(2)
    ]
    assert [output_ids(e) for e in runs[0]] == [output_ids(e) for e in runs[1]]
    for event in runs[0]:
        check(case.parse(event, wanted), event, required=True, several=True)


@pytest.mark.parametrize("form", ["hermes", "mistral"])
@pytest.mark.parametrize("thinks", [True, False], ids=["thinking", "plain"])
def test_markers_that_are_no_tokens(tiny_model: Path, form: str, thinks: bool) -> None:
    """A tokenizer without them spells them; they begin a call all the same."""
    target = load_tiny(tiny_model)
    made = GrammarCompiler(target.tokenizer, target.vocab_size, target.eos_token_ids)
    wanted = grammar(form, required=False, thinks=thinks)
    state = made.start_tools(wanted)
    assert state is not None
    form_ = FORMATS[form]
    text = f"a < b {form_.begin}{form_.before}now{form_.between}"
    for token in target.tokenizer.encode(text):
        assert bool(state.allowed([])[token])  # type: ignore[index]
        state.advance([token], None)
    allowed = state.allowed([])
    assert allowed is not None
    brace = target.tokenizer.encode("{}")
    assert {int(i) for i in allowed.nonzero()} <= {brace[0], target.tokenizer.encode("{")[0]}


def test_parameters_that_cannot_be_kept_name_their_tool(case: Case) -> None:
    made = GrammarCompiler(case.target.tokenizer, case.target.vocab_size, {2})
    for parameters, fault in [
        ({"properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "without an end"),
        ({"properties": {"a": {"type": "foo"}}}, "Invalid type"),
        ({"properties": {"a": {"enum": []}}, "required": ["a"]}, "'bad'"),
    ]:
        tool = Tool(name="bad", parameters=parameters)
        for form, required in (("hermes", True), ("json", False)):
            wanted = ToolGrammar(
                (*TOOLS, tool), OutputFormat(FORMATS[form], False), required, True, False
            )
            with pytest.raises(InvalidStructureError, match="'bad'") as caught:
                made.start_tools(wanted)
            assert fault in str(caught.value)


def test_objects_are_closed_unless_they_say_otherwise() -> None:
    inner = {"type": "object", "properties": {"const": {"type": "object", "properties": {}}}}
    schema = {"properties": {"a": inner}, "required": ["a"]}
    loose = closed(Tool(name="t", parameters=schema))
    assert loose["additionalProperties"] is False
    assert loose["properties"]["a"] == inner
    strict = closed(Tool(name="t", parameters=schema, strict=True))
    assert strict["properties"]["a"]["additionalProperties"] is False
    assert strict["properties"]["a"]["properties"]["const"]["additionalProperties"] is False
    for key, value in (("additionalProperties", True), ("allOf", [{"properties": {}}])):
        kept = closed(Tool(name="t", parameters={**schema, key: value}))
        assert kept.get("additionalProperties", True) is True
