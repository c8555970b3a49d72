"""`ssd chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

import typer

from ssd_integrations.backends.base import Backend
from ssd_integrations.cli.failures import (
    EXIT_INTERRUPTED,
    report_failures,
    show_error,
    usage_errors,
)
from ssd_integrations.cli.option_groups import with_option_groups
from ssd_integrations.cli.progress import LoadingBar
from ssd_integrations.cli.render import AnswerWriter, note, stats_line, write_text
from ssd_integrations.cli.request_options import AnswerOptions
from ssd_integrations.cli.session import open_session, stream
from ssd_integrations.errors import InvalidRequestError, SSDError

_HELP = (
    "/system TEXT sets the system message · /reset forgets the conversation · "
    "/quit (or end of input) leaves"
)


@dataclass
class Conversation:
    """What was said so far. A turn counts only once it is answered."""

    system: str | None = None
    turns: list[dict[str, str]] = field(default_factory=list)

    def messages(self, text: str) -> list[dict[str, str]]:
        """The whole conversation with ``text`` as the newest user turn."""
        head = [{"role": "system", "content": self.system}] if self.system else []
        return [*head, *self.turns, {"role": "user", "content": text}]

    def answered(self, text: str, answer: str) -> None:
        """Remember one exchange."""
        self.turns += [
            {"role": "user", "content": text},
            {"role": "assistant", "content": answer},
        ]

    def reset(self) -> None:
        """Forget the exchanges; the system message stays."""
        self.turns.clear()


@with_option_groups(without=("stop", "logprobs", "raw"))
def chat(options: AnswerOptions) -> None:
    """Talk with a model; after each answer its speed and acceptance length.

    In the conversation: /system TEXT, /reset, /quit. Ctrl-C stops an answer.

    \b
    Examples:
      ssd chat
      ssd chat --system "Answer in one sentence." --temperature 0.7
      ssd chat --broker-url redis://localhost:6379/0
    """
    with report_failures():
        with usage_errors():
            options.check()
            talk = Conversation(options.system)
            options.request(messages=talk.messages("Hello"))
        with LoadingBar() as bar, open_session(options, bar) as backend:
            models = backend.models()
            # A bar that is still drawn would overwrite what is typed.
            bar.close()
            for info in models:
                note(f"{info.name}: {info.architecture}, {info.dtype} on {info.device}")
            note(_HELP)
            while (line := _read_line()) is not None:
                if not _command(talk, line):
                    break
                if line and not line.startswith("/"):
                    _answer(backend, options, talk, line, bar)


def _read_line() -> str | None:
    """The next line typed, or None at the end of input."""
    interactive = sys.stdin.isatty()
    if interactive:
        import readline  # noqa: F401 - importing it gives input() its line editing
    try:
        return input("> " if interactive else "").strip()
    except EOFError:
        return None


def _command(talk: Conversation, line: str) -> bool:
    """Obey ``line`` if it is a command; False ends the conversation."""
    word, _, rest = line.partition(" ")
    if word == "/quit":
        return False
    if word == "/reset":
        talk.reset()
        note("The conversation starts afresh.")
    elif word == "/system":
        talk.system = rest.strip() or None
        note("System message set." if talk.system else "System message removed.")
    elif line.startswith("/"):
        note(_HELP)
    return True


def _answer(
    backend: Backend, options: AnswerOptions, talk: Conversation, line: str, bar: LoadingBar
) -> None:
    """Stream one answer. A mistake or a passing trouble costs the turn, not the conversation."""
    try:
        request = options.request(messages=talk.messages(line))
        event = stream(backend, request, AnswerWriter(), bar)
    except KeyboardInterrupt:
        write_text("\n")
        note("Stopped; the exchange is forgotten.")
        if not sys.stdin.isatty():
            raise typer.Exit(EXIT_INTERRUPTED) from None
        return
    except SSDError as error:
        if not (error.retryable or isinstance(error, InvalidRequestError)):
            raise
        show_error(error, as_json=False)
        return
    write_text("\n")
    note(stats_line(event))
    talk.answered(line, event.text)
