"""The `ssd` command with a tiny real model: streams, JSON, interrupts and broken pipes."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest

from ssd_integrations.cli import chat
from ssd_integrations.cli.progress import LoadingBar
from ssd_integrations.cli.session import stream
from ssd_integrations.errors import DeadlineExceededError
from ssd_integrations.protocol import build_request
from tests.conftest import SSD, RunSSD, ssd_environment
from tests.unit.scripted_backend import ScriptedBackend

_SUMMARY = {"text", "finish_reason", "usage", "speculation", "timing", "model"}


@pytest.fixture(scope="module")
def endless_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a long context that never ends by itself."""
    from tests.tiny import make_tiny_model

    folder = make_tiny_model(
        tmp_path_factory.mktemp("models") / "endless",
        seed=3,
        max_position_embeddings=200_000,
        eos_token_id=None,
    )
    for name, keys in (("tokenizer_config.json", ("eos_token",)), ("generation_config.json", ())):
        file = folder / name
        content = json.loads(file.read_text())
        for key in (*keys, "eos_token_id"):
            content.pop(key, None)
        file.write_text(json.dumps(content))
    return folder


def _start(model: Path, *args: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*SSD, "generate", "the router", "--model", str(model), *args],
        env=ssd_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_text_and_json_agree(run_ssd: RunSSD, tiny_model: Path) -> None:
    args = ["generate", "the router", "--model", str(tiny_model), "--max-tokens", "24"]
    plain = run_ssd(*args)
    assert plain.returncode == 0, plain.stderr
    assert "24 tokens" in plain.stderr
    assert "acceptance length" in plain.stderr
    result = run_ssd(*args, "--json")
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout)
    assert set(answer) == _SUMMARY
    assert plain.stdout.rstrip("\n") == answer["text"].rstrip("\n")
    assert answer["usage"]["completion_tokens"] == 24
    assert answer["finish_reason"] == "length"
    assert answer["speculation"]["method"] == "hybrid"


def test_speculation_and_seed_do_what_they_say(run_ssd: RunSSD, tiny_model: Path) -> None:
    args = ["generate", "-", "--model", str(tiny_model), "--max-tokens", "20", "--json", "--raw"]
    args += ["--temperature", "0.8", "--seed", "5"]
    prompt = "The router restarts when you hold the reset button."
    off = json.loads(run_ssd(*args, "--speculation", "off", stdin=prompt).stdout)
    ngram = json.loads(run_ssd(*args, "--speculation", "ngram", stdin=prompt).stdout)
    assert off["text"] == ngram["text"]
    assert off["speculation"]["method"] == "off"
    assert off["usage"]["prompt_tokens"] == ngram["usage"]["prompt_tokens"]


def test_sampling_options_and_log_probabilities(
    run_ssd: RunSSD, tiny_model: Path, tmp_path: Path
) -> None:
    args = ["generate", "the router", "--model", str(tiny_model), "--max-tokens", "12", "--json"]
    args += ["--suffix-store", str(tmp_path / "answers.ssd"), "--logprobs", "2"]
    answer = json.loads(run_ssd(*args, "--ignore-eos", "--min-tokens", "12").stdout)
    assert set(answer) == {*_SUMMARY, "logprobs"}
    assert (tmp_path / "answers.ssd").exists()
    tokens = answer["logprobs"]
    assert len(tokens) == answer["usage"]["completion_tokens"] == 12
    assert all(len(token["top"]) == 2 for token in tokens)
    first = tokens[0]["token_id"]
    assert first == tokens[0]["top"][0]["token_id"]
    banned = json.loads(run_ssd(*args, "--logit-bias", f"{first}:-100").stdout)
    assert first not in [token["token_id"] for token in banned["logprobs"]]
    ended = json.loads(run_ssd(*args, "--stop-token-id", str(first)).stdout)
    assert ended["finish_reason"] == "stop"
    assert ended["usage"]["completion_tokens"] == 1


def test_an_interrupt_ends_with_130_and_no_traceback(endless_model: Path) -> None:
    process = _start(endless_model)
    assert process.stdout is not None
    assert process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    start = time.monotonic()
    stdout, stderr = process.communicate(timeout=30)
    assert process.returncode == 130, stderr
    assert b"Traceback" not in stderr
    assert b"Error: Interrupted" in stderr
    assert stdout.endswith(b"\n"), "the error begins a line of its own"
    assert time.monotonic() - start < 15


def test_a_closed_pipe_ends_quietly(endless_model: Path) -> None:
    process = _start(endless_model)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.read(20)
    process.stdout.close()
    assert process.wait(timeout=30) == 141
    stderr = process.stderr.read()
    process.stderr.close()
    assert b"Traceback" not in stderr
    assert b"Exception ignored" not in stderr


@pytest.mark.parametrize("redirection", [">/dev/full", ">&-", ">/dev/full --json"])
def test_output_that_cannot_be_written_is_an_error(tiny_model: Path, redirection: str) -> None:
    result = _in_shell(f"generate hi --max-tokens 3 --model {tiny_model} {redirection}")
    assert result.returncode == 1, result.stderr
    assert "could not be written" in result.stderr
    assert "Traceback" not in result.stderr
    assert "Exception ignored" not in result.stderr


@pytest.mark.parametrize("command", ["generate -", "chat"])
def test_closed_input_is_empty_input(tiny_model: Path, command: str) -> None:
    result = _in_shell(f"{command} --model {tiny_model} <&-")
    assert "Traceback" not in result.stderr
    assert result.returncode == (0 if command == "chat" else 2), result.stderr


def test_closed_standard_error_takes_nothing_from_the_answer(tiny_model: Path) -> None:
    result = _in_shell(f"generate hi --max-tokens 3 --seed 1 --model {tiny_model} 2>&-")
    assert result.returncode == 0
    assert result.stdout


def _in_shell(command: str) -> subprocess.CompletedProcess[str]:
    line = f"{shlex.join(SSD)} {command}"
    return subprocess.run(
        ["sh", "-c", line], env=ssd_environment(), capture_output=True, text=True, check=False,
        timeout=120,
    )  # fmt: skip


def test_a_deadline_is_an_error_of_its_own(run_ssd: RunSSD, endless_model: Path) -> None:
    result = run_ssd("generate", "hi", "--model", str(endless_model), "--timeout", "0.05", "--json")
    assert result.returncode == 1, result.stderr
    assert json.loads(result.stdout)["error"]["code"] == "deadline_exceeded"


def test_a_prompt_beyond_the_context_is_refused(run_ssd: RunSSD, tiny_model: Path) -> None:
    result = run_ssd("generate", "router " * 2000, "--model", str(tiny_model), "--json")
    assert result.returncode == 1
    assert json.loads(result.stdout)["error"]["code"] == "context_length_exceeded"


def test_chat_from_a_pipe(run_ssd: RunSSD, tiny_model: Path) -> None:
    lines = "hello\n/system Be brief.\nagain\n/reset\n/what\n/quit\nnever read\n"
    options = ["--max-tokens", "8", "--ignore-eos", "--repetition-penalty", "1.1"]
    result = run_ssd("chat", "--model", str(tiny_model), *options, stdin=lines)
    assert result.returncode == 0, result.stderr
    # With what follows it: "8 tokens" alone also stands in "251.8 tokens/s".
    assert result.stderr.count("8 tokens ·") == 2
    assert "System message set." in result.stderr
    assert "starts afresh" in result.stderr
    assert "Traceback" not in result.stderr


def test_chat_goes_on_after_a_line_that_is_no_text(tiny_model: Path) -> None:
    chat = [*SSD, "chat", "--model", str(tiny_model), "--max-tokens", "3"]
    for encoding in ("utf-8:strict", "utf-8:surrogateescape"):
        result = subprocess.run(
            chat,
            input=b"caf\xe9\nhello\n",
            env=ssd_environment(PYTHONIOENCODING=encoding),
            capture_output=True,
            timeout=120,
            check=False,
        )
        errors = result.stderr.decode()
        assert result.returncode == 0, errors
        assert "What to do:" in errors
        assert "3 tokens" in errors
    system = [*SSD, "chat", "--model", str(tiny_model), "--system", b"\xff"]
    refused = subprocess.run(system, env=ssd_environment(), capture_output=True, check=False)
    assert refused.returncode == 2
    assert b"Traceback" not in refused.stderr


@pytest.mark.parametrize(
    ("pieces", "shown"), [(("Hel", "lo"), "Hello\n"), (("Hello\n", ""), "Hello\n"), ((), "")]
)
def test_an_error_stands_on_a_line_of_its_own(pieces: tuple[str, ...], shown: str) -> None:
    backend = ScriptedBackend(pieces, error=DeadlineExceededError("Too late."))
    written: list[str] = []
    with pytest.raises(DeadlineExceededError):
        stream(
            backend,
            build_request(model="scripted", prompt="hi"),
            lambda delta: written.append(delta.text),
        )
    assert "".join(written) == shown


def test_chat_takes_its_bar_away_before_it_reads(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened = []

    class Bar(LoadingBar):
        def close(self) -> None:
            happened.append("bar closed")
            super().close()

    monkeypatch.setattr(chat, "LoadingBar", Bar)
    monkeypatch.setattr(chat, "_read_line", lambda: happened.append("read"))
    chat.chat(model=str(tiny_model))
    assert happened[:2] == ["bar closed", "read"]


def test_chat_goes_on_after_a_turn_that_cannot_be_answered(
    run_ssd: RunSSD, tiny_model: Path
) -> None:
    lines = "router " * 2000 + "\nhello\n"
    result = run_ssd("chat", "--model", str(tiny_model), "--max-tokens", "8", stdin=lines)
    assert result.returncode == 0, result.stderr
    assert "Error:" in result.stderr
    assert result.stderr.count("acceptance length") == 1
