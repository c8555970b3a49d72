"""`ssd generate`: answer one prompt."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from ssd_integrations.cli import options as opt
from ssd_integrations.cli.failures import report_failures, usage_errors
from ssd_integrations.cli.progress import LoadingBar
from ssd_integrations.cli.render import note, stats_line, write_text
from ssd_integrations.cli.session import open_session, stream
from ssd_integrations.errors import InvalidRequestError
from ssd_integrations.protocol import MAX_PROMPT_CHARS, FinishedEvent, GenerationRequest

_JSON_FIELDS = {"text", "finish_reason", "usage", "speculation", "timing", "model"}


def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; `-` reads standard input.")],
    model: opt.Model = "demo",
    draft_model: opt.DraftModel = None,
    speculation: opt.Speculation = "auto",
    num_draft_tokens: opt.NumDraftTokens = None,
    temperature: opt.Temperature = 0.0,
    top_p: opt.TopP = 1.0,
    top_k: opt.TopK = 0,
    min_p: opt.MinP = 0.0,
    max_tokens: opt.MaxTokens = None,
    stop: opt.Stop = None,
    seed: opt.Seed = None,
    dtype: opt.DTypeOption = None,
    device: opt.Device = None,
    system: opt.System = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Send the prompt as it is, without the chat template.")
    ] = False,
    broker_url: opt.BrokerURL = None,
    timeout: opt.Timeout = None,
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
      ssd generate "Once upon a time" --raw --speculation off
      ssd generate "Say hello" --broker-url redis://localhost:6379/0
    """
    with report_failures(as_json=as_json):
        with usage_errors(as_json=as_json):
            engine = opt.EngineOptions(model, draft_model, dtype, device, broker_url)
            engine.check(speculation)
            wanted = opt.RequestOptions(
                speculation=speculation,
                num_draft_tokens=num_draft_tokens,
                temperature=temperature,
                top_p=top_p,
                top_k=top_k,
                min_p=min_p,
                max_tokens=max_tokens,
                stop=tuple(stop or ()),
                seed=seed,
                timeout_s=timeout,
            )
            request = _request(wanted, model, _read_prompt(prompt), system, raw)
        _run(engine, request, as_json)


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


def _request(
    wanted: opt.RequestOptions, model: str, prompt: str, system: str | None, raw: bool
) -> GenerationRequest:
    if not prompt.strip():
        raise InvalidRequestError("The prompt is empty.", remedy="Give some text.")
    if raw:
        if system is not None:
            raise InvalidRequestError(
                "--system has no place in a raw prompt.", remedy="Leave out --raw or --system."
            )
        return wanted.request(model, prompt=prompt)
    turns = [{"role": "user", "content": prompt}]
    if system is not None:
        turns.insert(0, {"role": "system", "content": system})
    return wanted.request(model, messages=turns)


def _run(engine: opt.EngineOptions, request: GenerationRequest, as_json: bool) -> None:
    with LoadingBar() as bar, open_session(engine, bar) as backend:
        try:
            event = stream(backend, request, _drop if as_json else write_text, bar)
        except KeyboardInterrupt:
            if not as_json:
                write_text("\n")
            raise
    if as_json:
        print(json.dumps(_summary(event), ensure_ascii=False), flush=True)
        return
    if not event.text.endswith("\n"):
        write_text("\n")
    note(stats_line(event))


def _drop(text: str) -> None:
    del text


def _summary(event: FinishedEvent) -> dict[str, object]:
    return event.model_dump(mode="json", include=_JSON_FIELDS)
