"""What a terminal and a pipe are shown: text, statistics, bars, a conversation."""

from __future__ import annotations

import io

import pytest

from ssd_integrations.cli.chat import Conversation
from ssd_integrations.cli.progress import LoadingBar
from ssd_integrations.cli.render import clean_for_terminal, stats_line, write_text
from ssd_integrations.protocol import (
    FinishedEvent,
    ModelInfo,
    SpeculationStats,
    Timing,
    Usage,
)


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
