"""Reasoning before an answer: in whatever pieces, with the opening tag in the prompt or not."""

from __future__ import annotations

import pytest

from ssd_workers.engine.output_parsers.formats import recognise
from ssd_workers.engine.output_parsers.output import ParsedOutput
from ssd_workers.engine.output_parsers.thinking import ThinkingParser
from tests.tools import raw_text

# (the prompt opened it, text, reasoning, answer)
OUTPUTS = [
    (False, "<think>\nFirst, <b> then.\n</think>\n\nYes.\n", "First, <b> then.", "Yes.\n"),
    (False, "\n <think>\n\n</think>\n\nYes.", "", "Yes."),
    (False, "Yes, <think> is a tag. </think>", "", "Yes, <think> is a tag. </think>"),
    (False, "  Yes.", "", "  Yes."),
    (False, "<thin", "", "<thin"),
    (False, "<think>cut </thi", "cut </thi", ""),
    (False, "<think>a</think>b<think>c</think>", "a", "b<think>c</think>"),
    (False, "", "", ""),
    (True, "\nWell.\n</think>\nNo.", "Well.", "No."),
    (True, "<think>\nWell.</think>No.", "Well.", "No."),
    (True, "<thought>\n\nWell.  \n", "<thought>\n\nWell.", ""),
    (True, "</think>", "", ""),
    (True, " \n", "", ""),
]


@pytest.mark.parametrize(("opened", "text", "reasoning", "answer"), OUTPUTS)
def test_every_split(opened: bool, text: str, reasoning: str, answer: str) -> None:
    cuts = [[text[:cut], text[cut:]] for cut in range(len(text) + 1)]
    for pieces in [*cuts, list(text)]:
        output = ParsedOutput(ThinkingParser(opened=opened), None)
        parts = [part for piece in pieces for part in output.push(piece)] + output.finish("stop")
        assert (output.reasoning, output.text) == (reasoning, answer), pieces
        assert raw_text(parts) == text


def test_thoughts_come_as_they_are_written() -> None:
    parser = ThinkingParser(opened=True)
    texts = [[part.text for part in parser.push(char)] for char in "a b"]
    assert texts == [["a"], [], [" b"]]


@pytest.mark.parametrize(
    ("template", "tokens", "expected"),
    [
        ("... <tool_call> ... </think>", set(), ("hermes", True)),
        ("[TOOL_CALLS][", {"[ARGS]", "[TOOL_CALLS]"}, ("mistral", False)),
        ("[TOOL_CALLS]name[ARGS]", set(), ("mistral-args", False)),
        ("<|python_tag|>", set(), ("llama3", False)),
        ("messages", {"<tool_call>"}, ("hermes", False)),
        ("messages", {"[TOOL_CALLS]", "[ARGS]"}, ("mistral-args", False)),
        (None, {"<|python_tag|>"}, ("llama3", False)),
        (None, set(), ("json", False)),
    ],
)
def test_formats_are_recognised(
    template: str | None, tokens: set[str], expected: tuple[str, bool]
) -> None:
    found = recognise(template, tokens)
    assert (found.tools.name, found.thinks) == expected
    told = recognise(template, tokens, "llama3", "none")
    assert (told.tools.name, told.thinks) == ("llama3", False)
    assert recognise(template, tokens, "json", "think").thinks
