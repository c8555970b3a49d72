"""From a request on the wire to a sequence that the engine can run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ssd_integrations.errors import (
    ContextLengthError,
    InvalidRequestError,
    ModelNotFoundError,
)
from ssd_integrations.protocol import Event, GenerationRequest
from ssd_workers.engine.chat_format import ChatFormat, Prompt
from ssd_workers.engine.config import EngineConfig
from ssd_workers.engine.drafters.selection import DrafterSelection
from ssd_workers.engine.grammar import GrammarState
from ssd_workers.engine.grammar_compiler import GrammarCompiler
from ssd_workers.engine.loading import LoadedModel
from ssd_workers.engine.logit_rules import TokenHistory, has_rules
from ssd_workers.engine.memory import CacheMemory
from ssd_workers.engine.noise import fresh_seed
from ssd_workers.engine.output_parsers.calls import CallParser
from ssd_workers.engine.output_parsers.output import Output, ParsedOutput, PlainOutput, call_id
from ssd_workers.engine.output_parsers.thinking import ThinkingParser
from ssd_workers.engine.sequence import Sequence
from ssd_workers.engine.text_stream import TextStream
from ssd_workers.engine.tool_grammar import ToolGrammar

# Enough context for a tokenizer to decide whether a word begins with a space.
_PROMPT_TAIL = 8


class RequestBuilder:
    """Checks and encodes requests; called from any thread.

    Parameters:
      config: the engine's options.
      target: the loaded target model.
      draft: the loaded draft model, if there is one.
      chat_format: how messages become tokens.
      max_model_len: longest prompt plus output, in tokens.
      memory: where keys and values have to fit.
    """

    def __init__(
        self,
        config: EngineConfig,
        target: LoadedModel,
        draft: LoadedModel | None,
        chat_format: ChatFormat,
        max_model_len: int,
        memory: CacheMemory,
    ) -> None:
        self._config = config
        self._target = target
        self._chat_format = chat_format
        self._max_model_len = max_model_len
        self._memory = memory
        self._draft = draft
        special = {i: t.content for i, t in _added_tokens(target.tokenizer).items() if t.special}
        markers = chat_format.output_format.markers
        # Of the special tokens, whose text is not shown, those that parsers look for.
        self._markers = {i for i, text in special.items() if text in markers}
        self._hidden = special.keys() - self._markers
        self._grammars = GrammarCompiler(target.tokenizer, target.vocab_size, target.eos_token_ids)
        self._drafters = DrafterSelection(target, draft, config.suffix_store)
        self._named_drafters = {"": self._drafters}

    def close(self) -> None:
        """Let the drafters write what they hold back."""
        for drafters in self._named_drafters.values():
            drafters.close()

    def use_drafters(self, name: str, *, fresh: bool) -> None:
        """Let requests from now on use the drafters called ``name``; see the local backend."""
        if fresh or name not in self._named_drafters:
            # Without a store on disk: what they learn is for this process alone.
            self._named_drafters[name] = DrafterSelection(self._target, self._draft, None)
        self._drafters = self._named_drafters[name]

    def encode(self, request: GenerationRequest) -> list[int]:
        """The prompt's token ids; raises as :meth:`build` does."""
        return self._prompt(request).token_ids

    def _prompt(self, request: GenerationRequest) -> Prompt:
        if request.model != self._target.name:
            raise ModelNotFoundError(
                f"This engine serves model {self._target.name!r}, not {request.model!r}.",
                remedy="Ask for the model that is served, or start an engine for the other one.",
            )
        return self._chat_format.prompt(request)

    def build(self, request: GenerationRequest, on_event: Callable[[Event], None]) -> Sequence:
        """A sequence for ``request``.

        Raises:
          ModelNotFoundError: the request is for another model.
          ContextLengthError: prompt and max_tokens do not fit the context, or the memory.
          InvalidStructureError: its structured_output or the parameters of one of its tools
            cannot be compiled or satisfied.
          ChatTemplateError, InvalidRequestError: it cannot be encoded or drafted as asked.
        """
        drafter = self._drafters.pick(request.speculation.mode)
        prompt = self._prompt(request)
        token_ids = prompt.token_ids
        max_new_tokens = self._max_new_tokens(request, len(token_ids))
        sampling = request.sampling
        self._check_token_ids(request)
        output = self._output(request, in_reasoning=prompt.in_reasoning)
        decode = self._decode if isinstance(output, PlainOutput) else self._decode_with_markers
        return Sequence(
            request=request,
            token_ids=token_ids,
            prompt_length=len(token_ids),
            max_new_tokens=max_new_tokens,
            seed=fresh_seed() if sampling.seed is None else sampling.seed,
            drafter=drafter,
            num_draft_tokens=request.speculation.num_draft_tokens or self._config.num_draft_tokens,
            text=TextStream(decode, request.sampling.stop, token_ids[-_PROMPT_TAIL:]),
            on_event=on_event,
            end_token_ids=frozenset(sampling.stop_token_ids)
            | (frozenset() if sampling.ignore_eos else self._target.eos_token_ids),
            history=TokenHistory(token_ids) if has_rules(sampling) else None,
            grammar=self._grammar(request, in_reasoning=prompt.in_reasoning),
            output=output,
        )

    def _grammar(self, request: GenerationRequest, *, in_reasoning: bool) -> GrammarState | None:
        if request.structured_output is not None:
            return self._grammars.start(request.structured_output)
        choice = request.tool_choice
        if not request.tools or choice == "none":
            return None
        named = tuple(tool for tool in request.tools if tool.name == choice)
        grammar = ToolGrammar(
            tools=named or request.tools,
            output_format=self._chat_format.output_format,
            required=choice != "auto",
            several=request.parallel_tool_calls and not named,
            in_reasoning=in_reasoning,
        )
        return self._grammars.start_tools(grammar)

    def _output(self, request: GenerationRequest, *, in_reasoning: bool) -> Output:
        """What tells reasoning and calls from text; raw prompts and forms have neither."""
        if request.messages is None or request.structured_output is not None:
            return PlainOutput()
        form = self._chat_format.output_format
        thinking = ThinkingParser(opened=in_reasoning) if form.thinks else None
        calls = None
        if request.tools and request.tool_choice != "none":
            calls = CallParser(
                form.tools,
                {tool.name for tool in request.tools},
                parallel=request.parallel_tool_calls,
                make_id=partial(call_id, request.request_id),
            )
        return ParsedOutput(thinking, calls) if thinking or calls else PlainOutput()

    def _check_token_ids(self, request: GenerationRequest) -> None:
        size = self._target.vocab_size
        for option in ("logit_bias", "stop_token_ids"):
            unknown = [t for t in getattr(request.sampling, option) if t >= size]
            if unknown:
                raise InvalidRequestError(
                    f"{option} names token {unknown[0]}, but model {self._target.name!r} has "
                    f"tokens 0 to {size - 1} only."
                )

    def _max_new_tokens(self, request: GenerationRequest, prompt_length: int) -> int:
        room = self._max_model_len - prompt_length
        asked = request.sampling.max_tokens
        if room < 1:
            raise ContextLengthError(
                f"The prompt has {prompt_length} tokens; the context of model "
                f"{self._target.name!r} holds {self._max_model_len}, output included."
            )
        if asked is not None and asked > room:
            raise ContextLengthError(
                f"The prompt has {prompt_length} tokens and max_tokens={asked}, together more "
                f"than the {self._max_model_len} of model {self._target.name!r}'s context."
            )
        return self._memory.max_new_tokens(prompt_length, asked, room)

    def _decode(self, token_ids: list[int]) -> str:
        tokenizer: Any = self._target.tokenizer
        text: str = tokenizer.decode(
            token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def _decode_with_markers(self, token_ids: list[int]) -> str:
        if not self._markers:
            return self._decode(token_ids)
        tokenizer: Any = self._target.tokenizer
        text: str = tokenizer.decode(
            [token for token in token_ids if token not in self._hidden],
            skip_special_tokens=False,
            clean_up_tokenization_spaces=False,
        )
        return text


def _added_tokens(tokenizer: Any) -> dict[int, Any]:
    found: dict[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    return found
