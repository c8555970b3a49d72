"""`ssd generate`: answer one prompt."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from ssd_integrations.cli import options as opt
from ssd_integrations.cli.failures import report_failures, usage_errors
from ssd_integrations.cli.progress import LoadingBar
from ssd_integrations.cli.render import note, stats_line, write_delta, write_text
from ssd_integrations.cli.request_options import (
    EngineOptions,
    RequestOptions,
    parse_logit_bias,
)
from ssd_integrations.cli.session import open_session, stream
from ssd_integrations.errors import InvalidRequestError
from ssd_integrations.protocol import (
    MAX_PROMPT_CHARS,
    DeltaEvent,
    GenerationRequest,
    TokenLogprob,
)

_JSON_FIELDS = {"text", "finish_reason", "usage", "speculation", "timing", "model"}


def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; `-` reads standard input.")],
    model: opt.Model = "demo",
    draft_model: opt.DraftModel = None,
    speculation: opt.Speculation = "auto",
    num_draft_tokens: opt.NumDraftTokens = None,
    adaptive: opt.Adaptive = True,
    acceptance: opt.AcceptanceRule = "coupled",
    temperature: opt.Temperature = 0.0,
    top_p: opt.TopP = 1.0,
    top_k: opt.TopK = 0,
    min_p: opt.MinP = 0.0,
    repetition_penalty: opt.RepetitionPenalty = 1.0,
    presence_penalty: opt.PresencePenalty = 0.0,
    frequency_penalty: opt.FrequencyPenalty = 0.0,
    logit_bias: opt.LogitBias = None,
    max_tokens: opt.MaxTokens = None,
    min_tokens: opt.MinTokens = 0,
    stop: opt.Stop = None,
    stop_token_ids: opt.StopTokenIds = None,
    ignore_eos: opt.IgnoreEOS = False,
    seed: opt.Seed = None,
    logprobs: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Log-probabilities of the tokens and of N alternatives each; with --json.",
        ),
    ] = None,
    dtype: opt.DTypeOption = None,
    device: opt.Device = None,
    suffix_store: opt.SuffixStore = None,
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
      ssd generate "Name a colour" --logit-bias 42:-100 --json --logprobs 3
      ssd generate "Once upon a time" --raw --speculation off
      ssd generate "Say hello" --broker-url redis://localhost:6379/0
    """
    with report_failures(as_json=as_json):
        with usage_errors(as_json=as_json):
            if logprobs is not None and not as_json:
                raise InvalidRequestError(
                    f"--logprobs {logprobs} has no place in a plain answer.",
                    remedy="Add --json, which prints them.",
                )
            engine = EngineOptions(model, draft_model, dtype, device, broker_url, suffix_store)
            engine.check(speculation)
            wanted = RequestOptions(
                speculation={
                    "mode": speculation,
                    "num_draft_tokens": num_draft_tokens,
                    "adaptive": adaptive,
                    "acceptance": acceptance,
                },
                sampling={
                    "temperature": temperature,
                    "top_p": top_p,
                    "top_k": top_k,
                    "min_p": min_p,
                    "repetition_penalty": repetition_penalty,
                    "presence_penalty": presence_penalty,
                    "frequency_penalty": frequency_penalty,
                    "logit_bias": parse_logit_bias(logit_bias or ()),
                    "max_tokens": max_tokens,
                    "min_tokens": min_tokens,
                    "stop": stop or (),
                    "stop_token_ids": stop_token_ids or (),
                    "ignore_eos": ignore_eos,
                    "seed": seed,
                    "logprobs": logprobs,
                },
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
    wanted: RequestOptions, model: str, prompt: str, system: str | None, raw: bool
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


def _run(engine: EngineOptions, request: GenerationRequest, as_json: bool) -> None:
    logprobs: list[TokenLogprob] = []

    def keep(event: DeltaEvent) -> None:
        logprobs.extend(event.logprobs or ())

    with LoadingBar() as bar, open_session(engine, bar) as backend:
        try:
            event = stream(backend, request, keep if as_json else write_delta, bar)
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
    if not event.text.endswith("\n"):
        write_text("\n")
    note(stats_line(event))
