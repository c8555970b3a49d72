"""The tokenizer as grammars see it: text, even where it reads like a special token, stays text."""

from __future__ import annotations

import json
from collections.abc import Collection
from copy import copy
from typing import Any

from llguidance import LLTokenizer
from transformers import PreTrainedTokenizerFast

# A noncharacter, which no text has; angle brackets, so that llguidance still calls it special.
_NAME = "<\U0010fffe{}\U0010fffe>"


def grammar_tokenizer(tokenizer: Any, size: int, end_token_ids: Collection[int]) -> LLTokenizer:
    """``tokenizer`` with ``size`` tokens, in which special tokens have names that no text has.

    Where a grammar leaves one way to go on, llguidance encodes that text to know its next token.
    With ``<|im_end|>`` or ``</tool_call>`` in a constant it would take the special token, which
    ends the answer or is no text at all. A grammar names special tokens by number: ``<[7]>``.

    Raises:
      ValueError: it is not a fast tokenizer, or one of an unknown kind.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError("only fast tokenizers are supported")
    backend = copy(tokenizer.backend_tokenizer)
    backend.no_padding()
    backend.no_truncation()
    described = json.loads(backend.to_str())
    names: dict[str, str] = {}
    for token in described["added_tokens"]:
        text = token["content"]
        if token["special"] or _looks_special(text):
            token["content"] = names[text] = _NAME.format(token["id"])
    model = described["model"]
    known = model["vocab"]
    if isinstance(known, dict):
        model["vocab"] = {names.get(text, text): number for text, number in known.items()}
    else:
        model["vocab"] = [[names.get(text, text), score] for text, score in known]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    return LLTokenizer(json.dumps(described), n_vocab=size, eos_token=sorted(end_token_ids))


def _looks_special(text: str) -> bool:
    """What llguidance takes for the name of a special token, whatever the tokenizer says."""
    return text.startswith("<") and text.endswith(">")
