"""Text that reads like a special token is text in a grammar."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from ssd_integrations.protocol import StructuredOutput
from ssd_workers.engine.grammar import GrammarState
from ssd_workers.engine.grammar_compiler import GrammarCompiler
from tests.tiny import VOCAB_SIZE, make_tokenizer

END = 2
MARKERS = ("<tool_call>", "</tool_call>", "</think>", "[TOOL_CALLS]")
TEXTS = (
    "a<|im_end|>b",
    "<|im_end|>",
    "</think>",
    "<tool_call>x</tool_call>",
    "[TOOL_CALLS]",
    "  x",
)


def with_markers() -> PreTrainedTokenizerFast:
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([AddedToken("[TOOL_CALLS]", special=True)], special_tokens=True)
    tokenizer.add_tokens([AddedToken(text, special=False) for text in (*MARKERS[:3], "  ")])
    return tokenizer


def unigram() -> PreTrainedTokenizerFast:
    """Scores instead of merges, its vocabulary a list."""
    letters = [chr(code) for code in range(33, 127)]
    names = ["<unk>", "<|im_start|>", "<|im_end|>", *letters, "▁"]
    core = Tokenizer(models.Unigram([(name, -1.0) for name in names], unk_id=0))
    core.normalizer = normalizers.Replace(" ", "▁")
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    core.add_special_tokens(["<unk>", "<|im_start|>", "<|im_end|>", *MARKERS])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>")


def written(state: GrammarState) -> tuple[list[int], str | None]:
    """The tokens that ``state`` leads to, and why it ends."""
    output: list[int] = []
    while len(output) < 100:
        mask = state.allowed([])
        assert mask is not None
        token = int(mask.nonzero()[0])
        if token == END:
            return output, state.advance([END], "stop")
        state.advance([token], None)
        output.append(token)
    return output, None


@pytest.mark.parametrize("make", [with_markers, unigram])
@pytest.mark.parametrize("text", TEXTS)
def test_constants_come_out_whole(make: Any, text: str) -> None:
    tokenizer = make()
    compiler = GrammarCompiler(tokenizer, VOCAB_SIZE + len(MARKERS) + 1, {END})
    forms = (
        (StructuredOutput(choice=(text,)), text),
        (StructuredOutput(json_schema={"const": text}), json.dumps(text)),
        (StructuredOutput(grammar=f"start: {json.dumps(text)}"), text),
    )
    for form, expected in forms:
        ids, end = written(compiler.start(form))
        assert tokenizer.decode(ids, skip_special_tokens=True) == expected
        assert end == "stop"


def test_added_tokens_of_plain_text_and_numbers_stay_what_they_are() -> None:
    tokenizer = with_markers()
    compiler = GrammarCompiler(tokenizer, VOCAB_SIZE + len(MARKERS) + 1, {END})
    spaces = tokenizer.convert_tokens_to_ids("  ")
    state = compiler.start(StructuredOutput(regex=" +x"))
    mask = state.allowed([])
    assert mask is not None
    assert mask[spaces]
    call = tokenizer.convert_tokens_to_ids("[TOOL_CALLS]")
    state = compiler.start(StructuredOutput(grammar=f'start: <[{call}]> "x"'))
    assert written(state)[0][0] == call
