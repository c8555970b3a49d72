"""From a request's messages or prompt to the target's token ids."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jinja2 import TemplateError

from ssd_integrations.errors import ChatTemplateError, InvalidRequestError
from ssd_integrations.protocol import GenerationRequest, Message, Tool
from ssd_workers.engine.output_parsers.formats import recognise
from ssd_workers.engine.output_parsers.thinking import OPEN
from ssd_workers.engine.tool_prompt import in_words

_PROBE = Tool(name="probe", description="probe").as_function()
_HELLO = [{"role": "user", "content": "hello"}]


@dataclass(frozen=True)
class Prompt:
    """A rendered request; ``in_reasoning`` if it ends with the tag that begins reasoning."""

    token_ids: list[int]
    in_reasoning: bool = False


class ChatFormat:
    """Renders requests with a tokenizer's chat template, or with one given explicitly.

    Control tokens (``<|im_start|>`` and the like) that stand in a message's text, or in what
    describes a tool, are encoded as ordinary characters: a ticket or an article cannot open a turn
    of its own. Tools that the template does not render are told in the system message.

    Parameters:
      model: the model's name, for errors.
      tokenizer: the model's.
      chat_template: in place of the tokenizer's.
      tool_format, reasoning_format: how the model writes calls and reasoning; see EngineConfig.
    """

    def __init__(
        self,
        model: str,
        tokenizer: Any,
        chat_template: str | None = None,
        *,
        tool_format: str = "auto",
        reasoning_format: str = "auto",
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._template = chat_template or getattr(tokenizer, "chat_template", None)
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        special = {token.content for token in added if token.special and token.content}
        self.output_format = recognise(
            None if self._template is None else str(self._template),
            {token.content for token in added},
            tool_format,
            reasoning_format,
        )
        longest_first = sorted(special, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first))) if special else None
        # Made now: to encode like this switches the tokenizer over, for every thread that uses it.
        self._literal_ids = {
            token: list(
                tokenizer(token, add_special_tokens=False, split_special_tokens=True)["input_ids"]
            )
            for token in longest_first
        }
        tokenizer("", add_special_tokens=False)  # ... and this back, before there are threads

    @property
    def has_template(self) -> bool:
        """Whether chat messages can be rendered."""
        return self._template is not None

    def encode(self, request: GenerationRequest) -> list[int]:
        """The prompt's token ids; raises as :meth:`prompt` does."""
        return self.prompt(request).token_ids

    def prompt(self, request: GenerationRequest) -> Prompt:
        """The prompt of ``request``.

        Raises:
          ChatTemplateError: there is no template, or it refuses these messages.
          InvalidRequestError: the prompt encodes to no token at all.
        """
        if request.prompt is not None:
            made = Prompt(list(self._tokenizer(request.prompt)["input_ids"]))
        else:
            made = self._from_messages(request)
        if not made.token_ids:
            raise InvalidRequestError("The prompt is empty after tokenisation.")
        return made

    def _from_messages(self, request: GenerationRequest) -> Prompt:
        assert request.messages is not None  # the protocol says: exactly one of the two
        if self._template is None:
            raise ChatTemplateError(f"Model {self._model!r} has no chat template.")
        literals: list[str] = []
        # Private-use characters around a random number: no text can contain it by design.
        nonce = secrets.token_hex(8)

        def shelve(match: re.Match[str]) -> str:
            literals.append(match.group())
            return f"\ue000{nonce}:{len(literals) - 1}\ue001"

        def safe(text: str) -> str:
            return self._special.sub(shelve, text) if self._special else text

        text = self._render_safely(request, request.messages, safe)
        ids: list[int] = []
        for index, piece in enumerate(re.split(f"\ue000{nonce}:(\\d+)\ue001", text)):
            if index % 2:
                ids += self._literal_ids[literals[int(piece)]]
            elif piece:
                ids += self._tokenizer(piece, add_special_tokens=False)["input_ids"]
        thinks = self.output_format.thinks and text.rstrip().endswith(OPEN)
        return Prompt(ids, thinks)

    def _render_safely(
        self, request: GenerationRequest, messages: Sequence[Message], safe: Callable[[str], str]
    ) -> str:
        tools = request.tools if request.tool_choice != "none" else ()
        if not request.tools or self._renders_tools:
            offered = [_everywhere(tool.as_function(), safe) for tool in tools]
            return self._render([_as_dict(m, safe) for m in messages], offered)
        form = self.output_format.tools
        try:
            told = in_words(messages, tools, form, "system")
            return self._render([_as_dict(m, safe) for m in told])
        except ChatTemplateError:
            # Some templates refuse a system message; others these messages in any case.
            told = in_words(messages, tools, form, "user")
            return self._render([_as_dict(m, safe) for m in told])

    @cached_property
    def _renders_tools(self) -> bool:
        """Whether the template makes something of tools."""
        try:
            return self._render(_HELLO, [_PROBE]) != self._render(_HELLO)
        except ChatTemplateError:
            return False

    def _render(self, messages: list[dict[str, Any]], tools: list[Any] | None = None) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages,
                tools=tools or None,
                chat_template=self._template,
                add_generation_prompt=True,
                tokenize=False,
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise ChatTemplateError(
                f"The chat template of model {self._model!r} refuses these messages: {error}"
            ) from error
        return text


def _as_dict(message: Message, safe: Callable[[str], str]) -> dict[str, Any]:
    plain: dict[str, Any] = {"role": message.role, "content": safe(message.content)}
    if message.name is not None:
        plain["name"] = safe(message.name)
    if message.tool_call_id is not None:
        plain["tool_call_id"] = safe(message.tool_call_id)
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                "id": safe(call.id),
                "type": "function",
                "function": {
                    "name": safe(call.name),
                    "arguments": _everywhere(call.arguments, safe),
                },
            }
            for call in message.tool_calls
        ]
    return plain


def _everywhere(value: Any, safe: Callable[[str], str]) -> Any:
    """``value`` with every text in it, names of entries too, made safe."""
    if isinstance(value, str):
        return safe(value)
    if isinstance(value, list):
        return [_everywhere(item, safe) for item in value]
    if isinstance(value, dict):
        return {safe(name): _everywhere(item, safe) for name, item in value.items()}
    return value
