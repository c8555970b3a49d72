"""ChatSSD: a LangChain chat model on the speculative engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, closing
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel
from langchain_core.language_models.base import LangSmithParams
from langchain_core.load import dumpd
from langchain_core.messages import BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.tools import BaseTool
from pydantic import Field

from ssd_integrations.adapter_common import AdapterParameters
from ssd_integrations.adapter_fields import OUTPUT_OPTIONS
from ssd_integrations.backends.choices import (
    MAX_CHOICES,
    aread,
    aread_all,
    check_choices,
    choices,
    read,
    read_all,
)
from ssd_integrations.errors import InvalidRequestError
from ssd_integrations.langchain.chunks import MODEL_PROVIDER, to_chunk, to_result, total_usage
from ssd_integrations.langchain.errors import framework_errors
from ssd_integrations.langchain.messages import to_contract
from ssd_integrations.protocol import GenerationRequest


class ChatSSD(AdapterParameters, BaseChatModel):
    """Chat with a local model, in this process or on Celery workers.

    Construction is instant and offline; the model loads on the first call. The parameters are
    the fields of :class:`ssd_integrations.adapter_common.AdapterParameters`; those in
    ``CALL_OPTIONS``, and ``n``, may also be given per call (``llm.invoke(x, temperature=0.8)``,
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

    n: int = Field(
        default=1,
        ge=1,
        le=MAX_CHOICES,
        description="Answers per call, from `generate`; they are decoded together.",
    )

    def _check_parameters(self) -> None:
        super()._check_parameters()
        if self.streaming and self.n > 1:
            raise _no_streams(self.n)

    @property
    def _llm_type(self) -> str:
        return "ssd-chat"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """Everything that changes the output, and nothing secret."""
        return {name: getattr(self, name) for name in (*OUTPUT_OPTIONS, "n")}

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

    def _streaming_disabled(self, **kwargs: Any) -> bool:
        # Handlers that would like tokens get the whole of several answers; a stream that the
        # caller asked for goes on, and is refused.
        asked_for = kwargs.get("stream") or self.streaming
        if self._n(kwargs) > 1 and not asked_for:
            return True
        return super()._streaming_disabled(**kwargs)

    def _combine_llm_outputs(self, _llm_outputs: list[dict[str, Any] | None], /) -> dict[str, Any]:
        return total_usage(_llm_outputs)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        del run_manager  # The base class reports an answer that is not streamed.
        with framework_errors():
            requests = choices(self._request(messages, stop, kwargs), self._n(kwargs))
            return to_result(read_all(self._open_backend(), requests))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        del run_manager
        with framework_errors():
            requests = choices(self._request(messages, stop, kwargs), self._n(kwargs))
            return to_result(await aread_all(await self._aopen_backend(), requests))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        with framework_errors():
            request = self._stream_request(messages, stop, kwargs)
            with closing(read(self._open_backend(), request)) as run:
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
            request = self._stream_request(messages, stop, kwargs)
            async with aclosing(aread(await self._aopen_backend(), request)) as run:
                async for event in run:
                    chunk = to_chunk(event)
                    if chunk is not None:
                        if run_manager:
                            await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                        yield chunk

    def _n(self, options: dict[str, Any]) -> int:
        with framework_errors():
            return check_choices(options.get("n", self.n))

    def _stream_request(
        self, messages: Sequence[BaseMessage], stop: list[str] | None, options: dict[str, Any]
    ) -> GenerationRequest:
        n = self._n(options)
        if n > 1:
            raise _no_streams(n)
        return self._request(messages, stop, options)

    def _request(
        self, messages: Sequence[BaseMessage], stop: list[str] | None, options: dict[str, Any]
    ) -> GenerationRequest:
        # `stream` is the framework's own switch between `_generate` and `_stream`.
        given = {name: value for name, value in options.items() if name not in ("stream", "n")}
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


def _no_streams(n: int) -> InvalidRequestError:
    return InvalidRequestError(
        f"n={n} answers cannot be streamed as one.",
        remedy="Use generate() or invoke() without streaming, or n=1.",
    )
