"""From a request's messages or prompt to the target's token ids."""

from __future__ import annotations

import json
import re
import secrets
from typing import Any

from jinja2 import TemplateError

from ssd_integrations.errors import ChatTemplateError, InvalidRequestError
from ssd_integrations.protocol import GenerationRequest, Message


class ChatFormat:
    """Renders requests with a tokenizer's chat template, or with one given explicitly.

    Control tokens (``<|im_start|>`` and the like) that stand in a message's text are encoded as
    ordinary characters: a ticket or an article cannot open a turn of its own.
    """

    def __init__(self, model: str, tokenizer: Any, chat_template: str | None = None) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._template = chat_template or getattr(tokenizer, "chat_template", None)
        special = {
            token.content
            for token in getattr(tokenizer, "added_tokens_decoder", {}).values()
            if token.special and token.content
        }
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
        """The prompt's token ids.

        Raises:
          ChatTemplateError: there is no template, or it refuses these messages.
          InvalidRequestError: the prompt encodes to no token at all.
        """
        if request.prompt is not None:
            ids = list(self._tokenizer(request.prompt)["input_ids"])
        else:
            assert request.messages is not None  # the protocol says: exactly one of the two
            ids = self._encode_messages(request.messages)
        if not ids:
            raise InvalidRequestError("The prompt is empty after tokenisation.")
        return ids

    def _encode_messages(self, messages: tuple[Message, ...]) -> list[int]:
        if self._template is None:
            raise ChatTemplateError(f"Model {self._model!r} has no chat template.")
        literals: list[str] = []
        # Private-use characters around a random number: no text can contain it by design.
        nonce = secrets.token_hex(8)

        def shelve(match: re.Match[str]) -> str:
            literals.append(match.group())
            return f"\ue000{nonce}:{len(literals) - 1}\ue001"

        plain = [self._as_dict(message, shelve) for message in messages]
        try:
            text = self._tokenizer.apply_chat_template(
                plain,
                chat_template=self._template,
                add_generation_prompt=True,
                tokenize=False,
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise ChatTemplateError(
                f"The chat template of model {self._model!r} refuses these messages: {error}"
            ) from error
        ids: list[int] = []
        for index, piece in enumerate(re.split(f"\ue000{nonce}:(\\d+)\ue001", text)):
            if index % 2:
                ids += self._literal_ids[literals[int(piece)]]
            elif piece:
                ids += self._tokenizer(piece, add_special_tokens=False)["input_ids"]
        return ids

    def _as_dict(self, message: Message, shelve: Any) -> dict[str, Any]:
        def safe(text: str) -> str:
            return self._special.sub(shelve, text) if self._special else text

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
                        "arguments": json.loads(safe(json.dumps(call.arguments))),
                    },
                }
                for call in message.tool_calls
            ]
        return plain
