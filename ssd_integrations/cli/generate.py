"""`ssd generate`: answer one prompt."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from ssd_integrations.cli.failures import report_failures, usage_errors
from ssd_integrations.cli.option_groups import with_option_groups
from ssd_integrations.cli.progress import LoadingBar
from ssd_integrations.cli.render import AnswerWriter, note, stats_line, write_calls, write_text
from ssd_integrations.cli.request_options import AnswerOptions
from ssd_integrations.cli.session import open_session, stream
from ssd_integrations.cli.structure_options import StructureOptions
from ssd_integrations.cli.tool_options import ToolOptions
from ssd_integrations.errors import InvalidRequestError
from ssd_integrations.protocol import (
    MAX_PROMPT_CHARS,
    DeltaEvent,
    GenerationRequest,
    TokenLogprob,
)

_JSON_FIELDS = {"text", "finish_reason", "usage", "speculation", "timing", "model"}
# There only where the answer has them.
_JSON_FIELDS |= {"reasoning", "tool_calls", "invalid_tool_calls"}


@with_option_groups()
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; `-` reads standard input.")],
    options: AnswerOptions,
    structure: StructureOptions,
    tools: ToolOptions,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of the stream.")
    ] = False,
) -> None:
    """Answer one prompt.

    The text goes to standard output as it is made, the statistics to standard error.

    \b
    Examples:
      ssd generate "Say hello"
      ssd generate - --max-tokens 200 < question.txt
      ssd generate "Name a colour" --temperature 0.8 --seed 7 --json
      ssd generate "Name a colour" --logit-bias 42:-100 --json --logprobs 3
      ssd generate "Once upon a time" --raw --speculation off
      ssd generate "Is 7 prime?" --choice yes,no
      ssd generate "A person" --json-schema person.json
      ssd generate "The weather in Köln?" --tool weather.json --tool-choice required
      ssd generate "Say hello" --broker-url redis://localhost:6379/0
    """
    with report_failures(as_json=as_json):
        with usage_errors(as_json=as_json):
            if options.logprobs is not None and not as_json:
                raise InvalidRequestError(
                    f"--logprobs {options.logprobs} has no place in a plain answer.",
                    remedy="Add --json, which prints them.",
                )
            options.check()
            content = {"structured_output": structure.structured_output(), "tools": tools.fields()}
            request = _request(options, _read_prompt(prompt), content)
        _run(options, request, as_json)


def _read_prompt(prompt: str) -> str:
    if prompt != "-":
        return prompt
    # A stream without an end must not fill the memory first.
    most = 4 * MAX_PROMPT_CHARS
    data = sys.stdin.buffer.read(most + 1)
    if len(data) > most:
        raise InvalidRequestError(
            f"Standard input has more than {most} bytes.",
            remedy=f"Give a prompt of at most {MAX_PROMPT_CHARS} characters.",
        )
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"Standard input is not UTF-8 (byte {error.start}).", remedy="Convert it first."
        ) from error


def _request(options: AnswerOptions, prompt: str, content: dict[str, Any]) -> GenerationRequest:
    if not prompt.strip():
        raise InvalidRequestError("The prompt is empty.", remedy="Give some text.")
    if options.raw:
        if options.system is not None:
            raise InvalidRequestError(
                "--system has no place in a raw prompt.", remedy="Leave out --raw or --system."
            )
        return options.request(prompt=prompt, **content)
    turns = [{"role": "user", "content": prompt}]
    if options.system is not None:
        turns.insert(0, {"role": "system", "content": options.system})
    return options.request(messages=turns, **content)


def _run(options: AnswerOptions, request: GenerationRequest, as_json: bool) -> None:
    logprobs: list[TokenLogprob] = []

    def keep(event: DeltaEvent) -> None:
        logprobs.extend(event.logprobs or ())

    with LoadingBar() as bar, open_session(options, bar) as backend:
        try:
            event = stream(backend, request, keep if as_json else AnswerWriter(), bar)
        except KeyboardInterrupt:
            if not as_json:
                write_text("\n")
            raise
    if as_json:
        summary = event.model_dump(mode="json", include=_JSON_FIELDS)
        if request.sampling.logprobs is not None:
            summary["logprobs"] = [entry.model_dump(mode="json") for entry in logprobs]
        print(json.dumps(summary, ensure_ascii=False), flush=True)
        return
    # An answer that is calls alone needs no line of text.
    if not event.text.endswith("\n") and (event.text or not event.tool_calls):
        write_text("\n")
    write_calls(event)
    note(stats_line(event))
