"""ChatSSD: a LangChain chat model on the speculative engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, closing
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel
from langchain_core.language_models.base import LangSmithParams
from langchain_core.language_models.chat_models import generate_from_stream
from langchain_core.load import dumpd
from langchain_core.messages import BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.tools import BaseTool
from pydantic import Field

from ssd_integrations.adapter_common import OUTPUT_OPTIONS, AdapterParameters
from ssd_integrations.errors import InvalidRequestError
from ssd_integrations.langchain.chunks import MODEL_PROVIDER, to_chunk
from ssd_integrations.langchain.errors import framework_errors
from ssd_integrations.langchain.messages import to_contract
from ssd_integrations.protocol import GenerationRequest


class ChatSSD(AdapterParameters, BaseChatModel):
    """Chat with a local model, in this process or on Celery workers.

    Construction is instant and offline; the model loads on the first call. The parameters are
    the fields of :class:`ssd_integrations.adapter_common.AdapterParameters`; those in
    ``CALL_OPTIONS`` may also be given per call (``llm.invoke(x, temperature=0.8)``,
    ``llm.bind(stop=["END"])``) and then hold for that call alone.

    Closing a stream early, or cancelling the task that awaits an answer, cancels the request.

    Raises:
      InvalidRequestError: a parameter, call option or message is wrong; says which.
      SSDError: what goes wrong in a call is also an instance of the counterpart in
        ``langchain_core.exceptions`` (ModelTimeoutError, ContextOverflowError...).
    """

    streaming: bool = Field(
        default=False, description="Send tokens to callbacks during `invoke` too."
    )

    @property
    def _llm_type(self) -> str:
        return "ssd-chat"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """Everything that changes the output, and nothing secret."""
        return {name: getattr(self, name) for name in OUTPUT_OPTIONS}

    @property
    def _serialized(self) -> dict[str, Any]:  # type: ignore[override]
        # The base caches this for ever, and with it the key of its response cache: a changed
        # temperature would then go on returning the old answers.
        return dict(dumpd(self))

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """True: serialises to its parameters, with the broker's URL as a secret."""
        return True

    @property
    def lc_secrets(self) -> dict[str, str]:
        """The broker's URL may hold a password."""
        return {"broker_url": "SSD_BROKER_URL"}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        if stop is None and self.stop:
            stop = [self.stop] if isinstance(self.stop, str) else self.stop
        params = super()._get_ls_params(stop=stop, **kwargs)
        params["ls_provider"] = MODEL_PROVIDER
        return params

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        del run_manager  # The base class reports an answer that is not streamed.
        return generate_from_stream(self._stream(messages, stop, **kwargs))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        del run_manager
        chunks = [chunk async for chunk in self._astream(messages, stop, **kwargs)]
        return generate_from_stream(iter(chunks))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        with framework_errors(), closing(self._run(self._request(messages, stop, kwargs))) as run:
            for event in run:
                chunk = to_chunk(event)
                if chunk is not None:
                    if run_manager:
                        run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        with framework_errors():
            async with aclosing(self._arun(self._request(messages, stop, kwargs))) as run:
                async for event in run:
                    chunk = to_chunk(event)
                    if chunk is not None:
                        if run_manager:
                            await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                        yield chunk

    def _request(
        self, messages: Sequence[BaseMessage], stop: list[str] | None, options: dict[str, Any]
    ) -> GenerationRequest:
        # `stream` is the framework's own switch between `_generate` and `_stream`.
        given = {name: value for name, value in options.items() if name != "stream"}
        return self._build_request({**given, "stop": stop}, messages=to_contract(messages))

    def get_token_ids(self, text: str) -> list[int]:
        """Token ids by ``custom_get_token_ids``.

        Raises:
          InvalidRequestError: there is none; the base class would download another model's
            tokenizer and count wrongly.
        """
        if self.custom_get_token_ids is None:
            raise InvalidRequestError(
                "ChatSSD counts tokens but does not hand out their ids.",
                remedy="Use get_num_tokens, or pass custom_get_token_ids=.",
            )
        return self.custom_get_token_ids(text)

    def get_num_tokens(self, text: str) -> int:
        """Exact number of tokens of ``text`` (raw, without a chat template); offline.

        Raises:
          InvalidRequestError: the tokenizer is on the worker and there is no
            ``custom_get_token_ids``.
        """
        if self.custom_get_token_ids is not None:
            return super().get_num_tokens(text)
        with framework_errors():
            return self._count_tokens(prompt=text) if text else 0

    def get_num_tokens_from_messages(
        self,
        messages: list[BaseMessage],
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool] | None = None,
    ) -> int:
        """Exact number of prompt tokens of ``messages``, chat template included; offline.

        Raises:
          InvalidRequestError: as :meth:`get_num_tokens`.
        """
        if self.custom_get_token_ids is not None or tools is not None:
            return super().get_num_tokens_from_messages(messages, tools)
        with framework_errors():
            return self._count_tokens(messages=to_contract(messages))
