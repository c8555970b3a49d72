"""The `ssd` command without a model: help, usage errors, doctor, rendering."""

from __future__ import annotations

import io
import json
import os
import resource
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest

from ssd_integrations.cli.chat import Conversation
from ssd_integrations.cli.checks import Check, machine, packages
from ssd_integrations.cli.lazy import load_command
from ssd_integrations.cli.progress import LoadingBar
from ssd_integrations.cli.render import clean_for_terminal, stats_line, write_text
from ssd_integrations.protocol import (
    FinishedEvent,
    GenerationRequest,
    ModelInfo,
    SamplingParams,
    SpeculationParams,
    SpeculationStats,
    Timing,
    Usage,
)
from tests.conftest import SSD, RunSSD, ssd_environment

HEAVY = ("torch", "transformers", "celery", "redis", "langchain_core", "llama_index")


def test_help_names_every_command_and_has_examples(run_ssd: RunSSD) -> None:
    result = run_ssd("--help")
    assert result.returncode == 0, result.stderr
    for name in ("generate", "chat", "models", "worker", "up", "doctor", "workflows", "demo"):
        assert f" {name} " in result.stdout
    assert 'ssd generate "Say hello"' in result.stdout


@pytest.mark.parametrize(
    "command", ["generate", "chat", "worker", "up", "doctor", "workflows", "demo"]
)
def test_every_command_has_examples(run_ssd: RunSSD, command: str) -> None:
    result = run_ssd(command, "--help")
    assert result.returncode == 0, result.stderr
    assert "Examples:" in result.stdout
    assert f"ssd {command}" in result.stdout


def test_help_imports_nothing_heavy() -> None:
    script = textwrap.dedent(
        f"""
        import sys
        from ssd_integrations.cli import main
        sys.argv = ["ssd", "--help"]
        try:
            main()
        except SystemExit as end:
            assert not end.code, end.code
        loaded = [name for name in {HEAVY!r} if name in sys.modules]
        assert not loaded, loaded
        """
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


def test_help_takes_under_half_a_second(run_ssd: RunSSD) -> None:
    run_ssd("--help")
    # Processor time, not wall time: the machine may be busy with other tests.
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run_ssd("--help")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(times) < 0.5, times


def test_version(run_ssd: RunSSD) -> None:
    from ssd_integrations import __version__

    assert run_ssd("--version").stdout == f"ssd-integrations {__version__}\n"


def test_a_mistyped_command_is_corrected(run_ssd: RunSSD) -> None:
    result = run_ssd("genrate", "x")
    assert result.returncode == 2
    assert "'generate'" in result.stderr


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


def test_doctor_reports_every_extra_and_the_machine(run_ssd: RunSSD) -> None:
    result = run_ssd("doctor", "--json")
    report = json.loads(result.stdout)
    assert (result.returncode == 0) == report["healthy"]
    checks = {check["name"]: check for check in report["checks"]}
    assert {"python", "extra [worker]", "device", "disk", "demo model", "broker"} <= set(checks)
    assert all(check["remedy"] for check in checks.values() if check["status"] != "ok")
    torch = pytest.importorskip("torch")
    assert torch.__version__ in checks["device"]["detail"]


def test_doctor_fails_for_a_broker_that_is_away(run_ssd: RunSSD) -> None:
    result = run_ssd("doctor", "--broker-url", "redis://:hunter2@127.0.0.1:1/0")
    assert result.returncode == 1
    assert "fail  broker" in result.stdout
    assert "hunter2" not in result.stdout + result.stderr


@pytest.mark.parametrize(("cached", "needed"), [(True, "2.6 GB"), (False, "9.0 GB")])
def test_doctor_wants_more_memory_for_the_first_conversion(
    cached: bool, needed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Check("demo model", "ok" if cached else "warn", "")
    monkeypatch.setattr(machine, "_demo_model", lambda: found)
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=2e9))
    (memory,) = (check for check in machine.checks() if check.name == "memory")
    assert memory.status == "warn"
    assert needed in memory.remedy


def test_doctor_says_what_it_does_with_a_broker(run_ssd: RunSSD) -> None:
    shown = run_ssd("doctor", "--help").stdout
    assert "Look at this Redis or Valkey server" in shown
    assert "Send the request" not in shown


def _without(tmp_path: Path, *modules: str) -> dict[str, str]:
    """An environment in which ``modules`` cannot be found, as if they were not installed."""
    (tmp_path / "sitecustomize.py").write_text(
        textwrap.dedent(
            f"""
            from importlib import metadata
            from importlib.machinery import PathFinder

            hidden = {modules!r}
            find_spec, version = PathFinder.find_spec, metadata.version

            def find_visible(name, path=None, target=None):
                return None if name in hidden else find_spec(name, path, target)

            def visible_version(name):
                if name in hidden:
                    raise metadata.PackageNotFoundError(name)
                return version(name)

            PathFinder.find_spec = staticmethod(find_visible)
            metadata.version = visible_version
            """
        )
    )
    return {"PYTHONPATH": str(tmp_path)}


def test_doctor_works_without_torch(run_ssd: RunSSD, tmp_path: Path) -> None:
    result = run_ssd("doctor", "--json", env=_without(tmp_path, "torch"))
    assert result.returncode == 0, result.stderr
    checks = {check["name"]: check for check in json.loads(result.stdout)["checks"]}
    assert checks["device"]["status"] == "warn"
    assert "ssd-integrations[worker]" in checks["extra [worker]"]["remedy"]
    assert checks["extra [celery]"]["status"] == "ok"


def test_doctor_fails_when_no_engine_is_within_reach(run_ssd: RunSSD, tmp_path: Path) -> None:
    bare = ("torch", "transformers", "celery", "redis", "kombu", "filelock", "psutil")
    result = run_ssd("doctor", env=_without(tmp_path, *bare))
    assert result.returncode == 1, result.stdout + result.stderr
    assert "fail  engine" in result.stdout
    assert "Traceback" not in result.stderr


def test_generate_without_torch_names_the_extra(run_ssd: RunSSD, tmp_path: Path) -> None:
    result = run_ssd("generate", "hi", "--json", env=_without(tmp_path, "torch"))
    assert result.returncode == 1
    error = json.loads(result.stdout)["error"]
    assert error["code"] == "missing_extra"
    assert "ssd-integrations[worker]" in error["remedy"]
    assert "--broker-url" in error["remedy"]


def test_requirements_come_from_the_installed_metadata() -> None:
    assert set(packages.requirements("langchain")) == {"langchain-core"}
    assert {"torch", "transformers", "celery"} <= set(packages.requirements("worker"))
    assert packages.requirements("no-such-extra") == {}


def test_model_text_cannot_steer_a_terminal() -> None:
    hostile = "\x1b[2J\x1b]0;owned\x07 a\rb\x08\x9b31m\u0085 [bold]x[/] caf\u00e9\t1\n"
    assert clean_for_terminal(hostile) == "[2J]0;owned ab31m [bold]x[/] caf\u00e9\t1\n"


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_pipe_gets_the_text_unchanged_and_a_terminal_cleaned() -> None:
    pipe, terminal = io.StringIO(), _Terminal()
    for stream in (pipe, terminal):
        write_text("a\x1b[1mb [red]", stream)
    assert pipe.getvalue() == "a\x1b[1mb [red]"
    assert terminal.getvalue() == "a[1mb [red]"


def _finished(method: str, **stats: int | float) -> FinishedEvent:
    return FinishedEvent(
        request_id="r",
        text="x",
        finish_reason="length",
        usage=Usage(prompt_tokens=3, completion_tokens=12, total_tokens=15),
        speculation=SpeculationStats(method=method, **stats),  # type: ignore[arg-type]
        timing=Timing(
            queue_s=0, time_to_first_token_s=0.25, decode_s=1, total_s=1.25, tokens_per_second=11
        ),
        model=ModelInfo(
            name="m", architecture="a", context_length=9, vocab_size=9, dtype="int8", device="cpu"
        ),
    )


def test_the_statistics_line() -> None:
    line = stats_line(
        _finished("ngram", num_draft_tokens=8, num_accepted_tokens=6, mean_acceptance_length=2.5)
    )
    assert "12 tokens" in line
    assert "11.0 tokens/s" in line
    assert "0.25 s" in line
    assert "acceptance length 2.50" in line
    assert "6 of 8" in line
    assert "token limit" in line
    assert "no speculation" in stats_line(_finished("off"))


def test_a_conversation_remembers_what_was_answered() -> None:
    talk = Conversation(system="Be brief.")
    assert [m["role"] for m in talk.messages("one")] == ["system", "user"]
    assert talk.turns == []
    talk.answered("one", "1")
    assert [m["content"] for m in talk.messages("two")] == ["Be brief.", "one", "1", "two"]
    talk.reset()
    assert talk.messages("three")[0] == {"role": "system", "content": "Be brief."}
    assert len(talk.messages("three")) == 2


def test_short_work_draws_nothing_and_long_work_does(capfd: pytest.CaptureFixture[str]) -> None:
    with LoadingBar(delay_s=30) as bar:
        bar("load", 1, 2, "files")
    assert capfd.readouterr().err == ""
    with LoadingBar(delay_s=0) as bar:
        bar("load", 1, 2, "files")
        bar("load", 2, 2, "files")
        bar("wait", 1, 0, "s")
    bar("late", 1, 2, "files")
    err = capfd.readouterr().err
    assert err.count("load") == 1
    assert "wait" in err
    assert "late" not in err


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


def test_environment_of_the_tests_is_clean() -> None:
    os.environ["SSD_BROKER_URL"] = "redis://nowhere"
    try:
        assert "SSD_BROKER_URL" not in ssd_environment()
    finally:
        del os.environ["SSD_BROKER_URL"]
