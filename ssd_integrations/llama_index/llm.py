"""SSDLLM: a LlamaIndex LLM on the speculative engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import aclosing, closing
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from llama_index.core.base.llms.generic_utils import messages_to_prompt
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
)
from llama_index.core.constants import DEFAULT_CONTEXT_WINDOW, DEFAULT_NUM_OUTPUTS
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import default_completion_to_prompt
from pydantic import Field, PrivateAttr

from ssd_integrations.adapter_common import AdapterParameters
from ssd_integrations.backends.choices import aread, read
from ssd_integrations.errors import InvalidRequestError
from ssd_integrations.llama_index.messages import to_contract
from ssd_integrations.llama_index.responses import Answer
from ssd_integrations.protocol import GenerationRequest

if TYPE_CHECKING:
    from llama_index.core.tools import BaseTool

Response = TypeVar("Response", ChatResponse, CompletionResponse)


class SSDLLM(AdapterParameters, FunctionCallingLLM):
    """A local model for LlamaIndex, in this process or on Celery workers.

    Construction is instant and offline; the model loads on the first call. The parameters are
    the fields of :class:`ssd_integrations.adapter_common.AdapterParameters`; those in
    ``CALL_OPTIONS`` may also be given per call and then hold for that call alone.

    ``complete`` sends its prompt as a user message through the model's chat template. With
    ``formatted=True``, or with a ``completion_to_prompt`` of your own, the prompt goes to the
    model as it is; so does a chat with a ``messages_to_prompt`` of your own.

    Closing a stream early, or cancelling the task that awaits an answer, cancels the request.

    Raises:
      InvalidRequestError: a parameter, call option or message is wrong; says which.
      SSDError: the kind of error tells what went wrong in a call.
    """

    context_window: int | None = Field(
        default=None,
        ge=1,
        description="Tokens of prompt and answer together, for metadata only; None takes "
        "max_model_len, else what the model tells with its first answer.",
    )
    _learned_context: int | None = PrivateAttr(default=None)

    @classmethod
    def class_name(cls) -> str:
        """The name that serialisation uses."""
        return "SSDLLM"

    @property
    def metadata(self) -> LLMMetadata:
        """What LlamaIndex plans prompts with. Never loads a model or opens a connection."""
        window = self.context_window or self.max_model_len or self._learned_context
        return LLMMetadata(
            context_window=window or DEFAULT_CONTEXT_WINDOW,
            num_output=self.max_tokens or DEFAULT_NUM_OUTPUTS,
            is_chat_model=True,
            is_function_calling_model=False,
            model_name=self.model,
        )

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """The assistant's answer; ``raw`` holds usage and speculation statistics."""
        return self._answer(self._chat_request(messages, kwargs)).chat()

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """The text that answers (or, with ``formatted=True``, continues) ``prompt``."""
        return self._answer(self._completion_request(prompt, formatted, kwargs)).completion()

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """:meth:`chat` as it comes; the last response has ``raw``."""
        return self._answers(self._chat_request(messages, kwargs), Answer.chat)

    @llm_completion_callback()
    def stream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseGen:
        """:meth:`complete` as it comes; the last response has ``raw``."""
        request = self._completion_request(prompt, formatted, kwargs)
        return self._answers(request, Answer.completion)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """:meth:`chat` without blocking the event loop."""
        return (await self._aanswer(self._chat_request(messages, kwargs))).chat()

    @llm_completion_callback()
    async def acomplete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponse:
        """:meth:`complete` without blocking the event loop."""
        request = self._completion_request(prompt, formatted, kwargs)
        return (await self._aanswer(request)).completion()

    @llm_chat_callback()
    async def astream_chat(
        self, messages: Sequence[ChatMessage], **kwargs: Any
    ) -> ChatResponseAsyncGen:
        """:meth:`stream_chat` without blocking the event loop."""
        return self._aanswers(self._chat_request(messages, kwargs), Answer.chat)

    @llm_completion_callback()
    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseAsyncGen:
        """:meth:`stream_complete` without blocking the event loop."""
        request = self._completion_request(prompt, formatted, kwargs)
        return self._aanswers(request, Answer.completion)

    def _chat_request(
        self, messages: Sequence[ChatMessage], options: dict[str, Any]
    ) -> GenerationRequest:
        to_prompt = self.messages_to_prompt
        if to_prompt is not None and to_prompt is not messages_to_prompt:
            return self._build_request(options, prompt=to_prompt(messages))
        return self._build_request(options, messages=to_contract(messages))

    def _completion_request(
        self, prompt: str, formatted: bool, options: dict[str, Any]
    ) -> GenerationRequest:
        if formatted:
            return self._build_request(options, prompt=prompt)
        to_prompt = self.completion_to_prompt
        if to_prompt is not None and to_prompt is not default_completion_to_prompt:
            return self._build_request(options, prompt=to_prompt(prompt))
        return self._build_request(options, messages=[{"role": "user", "content": prompt}])

    def _answer(self, request: GenerationRequest) -> Answer:
        answer = Answer()
        for event in read(self._open_backend(), request):
            answer.add(event)
        self._learn(answer)
        return answer

    async def _aanswer(self, request: GenerationRequest) -> Answer:
        answer = Answer()
        async for event in aread(await self._aopen_backend(), request):
            answer.add(event)
        self._learn(answer)
        return answer

    def _answers(
        self, request: GenerationRequest, build: Callable[[Answer], Response]
    ) -> Generator[Response, None, None]:
        answer = Answer()
        with closing(read(self._open_backend(), request)) as run:
            for event in run:
                if answer.add(event):
                    self._learn(answer)
                    yield build(answer)

    async def _aanswers(
        self, request: GenerationRequest, build: Callable[[Answer], Response]
    ) -> AsyncGenerator[Response, None]:
        answer = Answer()
        async with aclosing(aread(await self._aopen_backend(), request)) as run:
            async for event in run:
                if answer.add(event):
                    self._learn(answer)
                    yield build(answer)

    def _learn(self, answer: Answer) -> None:
        if answer.finished is not None:
            self._learned_context = answer.finished.model.context_length

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        **kwargs: Any,
    ) -> NoReturn:
        del user_msg, chat_history, verbose, allow_parallel_tool_calls, tool_required, kwargs
        # Agents read `is_function_calling_model` first and describe the tools in the prompt.
        raise InvalidRequestError(
            f"SSDLLM was asked for a call with {len(tools)} tools, but the metadata of this "
            "model says that it takes none.",
            remedy="Use a ReActAgent, which describes the tools in the prompt.",
        )
