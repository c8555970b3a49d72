"""From what a request asks for to a grammar over the model's tokens, compiled once."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from ssd_integrations.errors import InvalidRequestError, InvalidStructureError
from ssd_integrations.protocol import StructuredOutput
from ssd_workers.engine.grammar import GrammarState, reason
from ssd_workers.engine.grammar_tokenizer import grammar_tokenizer
from ssd_workers.engine.schema_recursion import is_endless
from ssd_workers.engine.tool_grammar import ToolGrammar, closed

_CACHED_GRAMMARS = 32
_DRAFT_3 = "http://json-schema.org/draft-03/schema"
# Nothing between the parts of a JSON text: a model could go on with blanks for ever. Given like
# this, a schema cannot ask for it either, nor that what is not supported is ignored.
_COMPACT: Any = {
    "whitespace_flexible": False,
    "whitespace_pattern": None,
    "item_separator": ",",
    "key_separator": ":",
    "lenient": False,
    "coerce_one_of": False,
}


class GrammarCompiler:
    """Compiles what requests ask for, and keeps the compiled. Called from any thread.

    Parameters:
      tokenizer: the target's.
      vocab_size: how many logits a row has.
      end_token_ids: the tokens that end an output.
      capacity: how many compiled grammars are kept; the least recently used goes first.
    """

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int,
        end_token_ids: Collection[int],
        capacity: int = _CACHED_GRAMMARS,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_token_ids = frozenset(end_token_ids)
        self._capacity = capacity
        self._lock = threading.Lock()
        self._prepared: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    def start(self, structure: StructuredOutput) -> GrammarState:
        """The state of a sequence that has no output yet.

        Raises:
          InvalidStructureError: it cannot be compiled, or no text satisfies it.
          InvalidRequestError: this model's tokenizer cannot be used for it.
        """
        matcher = self._get(structure.to_json(), lambda known: _compile(structure, known))
        return GrammarState(matcher, self._end_token_ids, structure.kind)

    def start_tools(self, grammar: ToolGrammar) -> GrammarState | None:
        """The same for calls of tools; None where nothing is ruled out. Raises as it does.

        The tools are checked in either case. The token limit may cut an answer with calls.
        """
        matcher = self._get(grammar.key, lambda known: self._compile_tools(grammar, known))
        if not grammar.constrains:
            return None
        return GrammarState(matcher, self._end_token_ids, "tool call", may_be_cut=True)

    def _get(self, key: str, compiled: Callable[[LLTokenizer], LLMatcher]) -> LLMatcher:
        with self._lock:
            matcher = self._compiled.get(key)
            tokenizer = self._prepare()
        if matcher is None:
            # Outside the lock: a large schema takes a while, and others need not wait.
            matcher = compiled(tokenizer)
        with self._lock:
            self._compiled[key] = matcher
            self._compiled.move_to_end(key)
            if len(self._compiled) > self._capacity:
                self._compiled.popitem(last=False)
            return matcher.deep_copy()

    def _compile_tools(self, grammar: ToolGrammar, tokenizer: LLTokenizer) -> LLMatcher:
        for tool in grammar.tools:
            try:
                _compile(StructuredOutput(json_schema=closed(tool)), tokenizer)
            except InvalidStructureError as error:
                raise InvalidStructureError(
                    f"The parameters of tool {tool.name!r}: {error.message}"
                ) from error
        added = {token.content: i for i, token in self._tokenizer.added_tokens_decoder.items()}
        tokens = {
            marker: added[marker]
            for marker in grammar.output_format.markers
            if marker in added and tokenizer.is_special_token(added[marker])
        }
        checked = grammar if grammar.constrains else replace(grammar, required=True)
        return _matcher(tokenizer, checked.source(tokens), "The tools' grammar")

    def _prepare(self) -> LLTokenizer:
        if self._prepared is None:
            if not self._end_token_ids:
                raise InvalidRequestError(
                    "structured_output and tools need a model with an end-of-sequence token, and "
                    "this one has none.",
                    remedy="Use another model, or leave them out.",
                )
            size = max(self._vocab_size, len(self._tokenizer))
            try:
                self._prepared = grammar_tokenizer(self._tokenizer, size, self._end_token_ids)
            except ValueError as error:
                raise InvalidRequestError(
                    "structured_output and tools cannot be used with this model's tokenizer: "
                    f"{error}.",
                    remedy="Use a model with a fast tokenizer (tokenizer.json).",
                ) from error
        return self._prepared


def _compile(structure: StructuredOutput, tokenizer: LLTokenizer) -> LLMatcher:
    kind, value = structure.kind, structure.value
    shown = repr(value if isinstance(value, str | dict) else list(value))
    if len(shown) > 80:
        shown = shown[:77] + "..."
    try:
        source = _SOURCES[kind](value)
    except (ValueError, RecursionError) as error:
        raise InvalidStructureError(f"{kind}={shown} cannot be read: {error}.") from error
    if isinstance(value, dict) and is_endless(value):
        raise InvalidStructureError(
            f"{kind}={shown}: no text satisfies it, since it demands itself without an end."
        )
    return _matcher(tokenizer, source, f"{kind}={shown}")


def _matcher(tokenizer: LLTokenizer, source: str, what: str) -> LLMatcher:
    limits = LLParserLimits(verbose_errors=False)
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=limits)
    if matcher.is_error():
        raise InvalidStructureError(f"{what} cannot be compiled: {reason(matcher)}.")
    # Some contradictions only show when the first token is looked for.
    first = matcher.deep_copy()
    mask = first.compute_bitmask()
    if first.is_error() or not any(mask):
        raise InvalidStructureError(f"{what}: no text satisfies it.")
    return matcher


def _from_json_schema(schema: dict[str, Any]) -> str:
    if str(schema.get("$schema", "")).rstrip("#") == _DRAFT_3:
        # The parser would take it, and ignore those of its keywords that later drafts lack.
        raise ValueError("draft 3 of JSON Schema is not supported, write it as 2020-12")
    return LLMatcher.grammar_from_json_schema(schema, overrides=_COMPACT)


def _from_choice(choice: Sequence[str]) -> str:
    return LLMatcher.grammar_from_regex("|".join(_literal(text) for text in choice))


def _from_grammar(text: str) -> str:
    try:
        return LLMatcher.grammar_from_lark(any_to_lark(text))
    except Exception as error:
        # The conversion from EBNF says all that is wrong with a text by a plain Exception.
        raise ValueError(f"{error} (a Lark grammar begins with a rule `start:`)") from error


_SOURCES: dict[str, Callable[[Any], str]] = {
    "json_schema": _from_json_schema,
    "regex": LLMatcher.grammar_from_regex,
    "choice": _from_choice,
    "grammar": _from_grammar,
}


def _literal(text: str) -> str:
    """A regular expression for ``text`` and nothing else."""
    return re.sub(r"[^A-Za-z0-9]", lambda match: f"\\x{{{ord(match[0]):x}}}", text)
