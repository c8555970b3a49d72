"""What `ssd` refuses, in words and as JSON, and what it makes of good options."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ssd_integrations.cli.lazy import load_command
from ssd_integrations.protocol import (
    GenerationRequest,
    SamplingParams,
    SpeculationParams,
)
from tests.conftest import SSD, RunSSD, ssd_environment
from tests.unit.missing_packages import environment_without


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--temperature", "-1"], "temperature=-1.0"),
        (["--top-p", "0"], "top_p=0.0"),
        (["--max-tokens", "0"], "max_tokens=0"),
        (["--seed", "-1"], "seed=-1"),
        (["--stop", ""], "stop"),
        (["--speculation", "magic"], "'magic'"),
        (["--num-draft-tokens", "65"], "num_draft_tokens=65"),
        (["--repetition-penalty", "0"], "repetition_penalty=0.0"),
        (["--presence-penalty", "3"], "presence_penalty=3.0"),
        (["--frequency-penalty", "-3"], "frequency_penalty=-3.0"),
        (["--logit-bias", "5:101"], "logit_bias.5=101.0"),
        (["--logit-bias", "5:nan"], "logit_bias.5=nan"),
        (["--logit-bias", "5"], "'5' is not ID:VALUE"),
        (["--logit-bias", "5:1", "--logit-bias", "5:2"], "token 5 twice"),
        (["--min-tokens", "9", "--max-tokens", "8"], "min_tokens=9 is more than max_tokens=8"),
        (["--stop-token-id", "-1"], "stop_token_ids.0=-1"),
        (["--acceptance", "maybe"], "acceptance='maybe'"),
        (["--logprobs", "2"], "--json"),
        (["--timeout", "0"], "timeout_s=0.0"),
        (["--dtype", "int9"], "dtype='int9'"),
        (["--speculation", "model"], "--draft-model"),
        (["--raw", "--system", "s"], "--system"),
        (["--broker-url", "redis://localhost:1/0", "--dtype", "int8"], "--dtype"),
        (["--broker-url", "redis://localhost:1/0", "--suffix-store", "f"], "--suffix-store"),
    ],
)
def test_bad_options_fail_before_anything_loads(
    run_ssd: RunSSD, options: list[str], named: str
) -> None:
    # The model does not exist: reaching for it would give another error and exit code.
    result = run_ssd("generate", "hi", "--model", "/no/such/model", *options)
    assert result.returncode == 2
    assert named in result.stderr
    assert "What to do:" in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_options_become_the_request() -> None:
    """The options of `ssd generate` that no engine is needed for, up to the request."""
    seen: list[GenerationRequest] = []

    def keep(engine: object, request: GenerationRequest, as_json: bool) -> None:
        seen.append(request)

    command = load_command("generate", "ssd_integrations.cli.generate:generate")
    line = (
        "hi --repetition-penalty 1.2 --presence-penalty 0.3 --frequency-penalty -0.4 "
        "--logit-bias 5:-100 --logit-bias 7:2.5 --min-tokens 2 --max-tokens 9 "
        "--stop-token-id 8 --stop-token-id 9 --ignore-eos --logprobs 4 --json "
        "--speculation hybrid --no-adaptive --acceptance rejection --num-draft-tokens 3"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ssd_integrations.cli.generate._run", keep)
        command(line.split(), standalone_mode=False)
        command(["hi"], standalone_mode=False)
    given, plain = seen
    assert given.sampling == SamplingParams(
        repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=-0.4,
        logit_bias={5: -100, 7: 2.5}, min_tokens=2, max_tokens=9, stop_token_ids=(8, 9),
        ignore_eos=True, logprobs=4,
    )  # fmt: skip
    assert given.speculation == SpeculationParams(
        mode="hybrid", adaptive=False, acceptance="rejection", num_draft_tokens=3
    )
    assert (plain.sampling, plain.speculation) == (SamplingParams(), SpeculationParams())


def test_bad_options_as_json(run_ssd: RunSSD) -> None:
    result = run_ssd("generate", "hi", "--temperature", "-1", "--json")
    assert result.returncode == 2
    error = json.loads(result.stdout)["error"]
    assert error["code"] == "invalid_request"
    assert error["retryable"] is False
    assert result.stderr == ""


@pytest.mark.parametrize("stdin", ["", "  \n"])
def test_an_empty_prompt_is_refused(run_ssd: RunSSD, stdin: str) -> None:
    result = run_ssd("generate", "-", stdin=stdin)
    assert result.returncode == 2
    assert "empty" in result.stderr


def test_standard_input_that_is_not_text_is_refused() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "ssd_integrations.cli", "generate", "-"],
        input=b"\xff\xfe caf\xe9",
        env=ssd_environment(),
        capture_output=True,
        check=False,
    )
    assert result.returncode == 2
    assert b"not UTF-8" in result.stderr


def test_generate_without_torch_names_the_extra(run_ssd: RunSSD, tmp_path: Path) -> None:
    result = run_ssd("generate", "hi", "--json", env=environment_without(tmp_path, "torch"))
    assert result.returncode == 1
    error = json.loads(result.stdout)["error"]
    assert error["code"] == "missing_extra"
    assert "ssd-integrations[worker]" in error["remedy"]
    assert "--broker-url" in error["remedy"]


def test_an_unknown_model_fails_in_plain_words(run_ssd: RunSSD) -> None:
    result = run_ssd("generate", "hi", "--model", "/no/such/model")
    assert result.returncode == 1
    assert "/no/such/model" in result.stderr
    assert "What to do:" in result.stderr
    assert "Traceback" not in result.stderr
    as_json = run_ssd("generate", "hi", "--model", "/no/such/model", "--json")
    assert as_json.returncode == 1
    assert json.loads(as_json.stdout)["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["generate", "hi", "--json", "--bogus"], "--bogus"),
        (["generate", "hi", "--json", "--temperature", "warm"], "--temperature"),
        (["generate", "--json"], "prompt"),
        (["doctor", "--json", "surplus"], "surplus"),
        (["models", "pull", "--json"], "name"),
    ],
)
def test_a_wrong_command_line_is_json_for_who_asked_for_it(
    run_ssd: RunSSD, arguments: list[str], named: str
) -> None:
    result = run_ssd(*arguments)
    assert result.returncode == 2
    error = json.loads(result.stdout)["error"]
    assert error["code"] == "invalid_request"
    assert named in error["message"]
    assert result.stderr == ""


def test_an_endless_standard_input_is_refused() -> None:
    with Path("/dev/zero").open("rb") as endless:
        result = subprocess.run(
            [*SSD, "generate", "-"],
            stdin=endless, capture_output=True, text=True, env=ssd_environment(), check=False,
        )  # fmt: skip
    assert result.returncode == 2
    assert "16000000 bytes" in result.stderr


def test_a_broker_that_is_away_is_named(run_ssd: RunSSD) -> None:
    url = "redis://:hunter2@127.0.0.1:1/0"
    result = run_ssd("generate", "hi", "--json", "--timeout", "5", env={"SSD_BROKER_URL": url})
    assert result.returncode == 1
    error = json.loads(result.stdout)["error"]
    assert error["code"] == "broker_unavailable"
    assert error["retryable"] is True
    assert "hunter2" not in result.stdout + result.stderr
