"""The parameters that ChatSSD and SSDLLM share, and which of them mean what."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from ssd_integrations.backends.base import Backend
from ssd_integrations.protocol import Acceptance, QueueName, SpeculationMode

# Passed on to the request under the same name.
SAMPLING_OPTIONS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "max_tokens",
    "seed",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "ignore_eos",
)
# None is the empty one.
SAMPLING_COLLECTIONS = ("stop", "logit_bias", "stop_token_ids")
LOGPROB_OPTIONS = ("logprobs", "top_logprobs")
SPECULATION_OPTIONS = ("num_draft_tokens", "adaptive", "acceptance")
CALL_OPTIONS = (
    *SAMPLING_OPTIONS,
    *SAMPLING_COLLECTIONS,
    *LOGPROB_OPTIONS,
    "speculation",
    *SPECULATION_OPTIONS,
    "structured_output",
    "timeout",
    "queue",
    "queue_timeout",
)
ENGINE_OPTIONS = (
    "draft_model",
    "dtype",
    "device",
    "device_map",
    "quantization",
    "attn_implementation",
    "decode_step",
    "max_num_seqs",
    "max_model_len",
    "num_threads",
    "chat_template",
    "tool_format",
    "reasoning_format",
    "suffix_store",
    "kv_cache_mib",
    "prefix_cache_mib",
)

# What the answer depends on, statistics included; the rest says where, when and for how long.
# Under acceptance="rejection" the text depends on the drafts, so all that shapes them is here.
OUTPUT_OPTIONS = (
    "model",
    "draft_model",
    "dtype",
    "device",
    "max_model_len",
    "chat_template",
    "tool_format",
    "reasoning_format",
    "suffix_store",
    "kv_cache_mib",
    *SAMPLING_OPTIONS,
    *SAMPLING_COLLECTIONS,
    *LOGPROB_OPTIONS,
    "speculation",
    *SPECULATION_OPTIONS,
    "structured_output",
)


class AdapterFields(BaseModel):
    """The parameters themselves; :mod:`ssd_integrations.adapter_common` checks and uses them."""

    # An error's traceback must not show what was put into broker_url.
    model_config = ConfigDict(arbitrary_types_allowed=True, hide_input_in_errors=True)

    model: str = Field(
        default="demo", description="`demo`, a folder, a GGUF file or a hub id; fixed per instance."
    )
    broker_url: SecretStr | str | None = Field(
        default=None,
        exclude=True,
        repr=False,
        description="Redis URL of the Celery workers, kept as a SecretStr since it may hold a "
        "password; None runs the engine in this process.",
    )
    temperature: float = Field(default=0.0, description="0 is greedy decoding.")
    top_p: float = 1.0
    top_k: int = Field(default=0, description="0 keeps every token.")
    min_p: float = 0.0
    max_tokens: int | None = Field(default=None, description="None fills the context window.")
    stop: list[str] | str | None = Field(
        default=None, description="Strings that end the text; they are not part of it."
    )
    seed: int | None = Field(default=None, description="Same seed, same text. None draws afresh.")
    repetition_penalty: float = Field(
        default=1.0, description="Above 1 makes tokens of the prompt and the answer less likely."
    )
    presence_penalty: float = Field(
        default=0.0, description="Taken off the logits of tokens that the answer has already."
    )
    frequency_penalty: float = Field(
        default=0.0, description="The same, once for each time that the answer has the token."
    )
    logit_bias: dict[int, float] | None = Field(
        default=None, description="Added to the logits of token ids; -100 bans, 100 forces."
    )
    min_tokens: int = Field(default=0, description="No end of the text before so many tokens.")
    stop_token_ids: list[int] | None = Field(
        default=None, description="Token ids that end the text as the model's own end does."
    )
    ignore_eos: bool = Field(default=False, description="Go on past the model's own end.")
    logprobs: bool | None = Field(
        default=None, description="Report the log-probability of each token of the answer."
    )
    top_logprobs: int | None = Field(
        default=None, description="So many of the best alternatives too; needs logprobs=True."
    )
    speculation: SpeculationMode = Field(
        default="auto", description="How drafts are made: changes the speed, not the text."
    )
    num_draft_tokens: int | None = Field(
        default=None, description="Longest draft per verification; None takes the engine's default."
    )
    adaptive: bool = Field(
        default=True, description="Draft less, or nothing, where drafts do not pay."
    )
    acceptance: Acceptance = Field(
        default="coupled",
        description="coupled: a seed gives one text, whatever the drafter. rejection: the rule of "
        "the literature; the same law, but when sampling, a seed's text depends on the drafts.",
    )
    structured_output: dict[str, Any] | None = Field(
        default=None,
        description="The form of the answer: a dict with one of json_schema, regex, choice and "
        "grammar.",
    )
    timeout: float | None = Field(
        default=None, description="Seconds until the whole answer must be there."
    )
    queue: QueueName = Field(default="interactive", description="Which queue of the workers.")
    queue_timeout: float = Field(
        default=60.0, description="Seconds until a worker must have taken the request."
    )
    draft_model: str | None = Field(
        default=None, description="A smaller model with the same tokenizer (in process only)."
    )
    dtype: str | None = Field(
        default=None, description="auto, int8, float32, bfloat16 or float16 (in process only)."
    )
    device: str | None = Field(default=None, description="auto, cpu, cuda... (in process only).")
    device_map: dict[str, int | str] | str | None = Field(
        default=None, description="auto, or module names to devices (in process only)."
    )
    quantization: dict[str, Any] | str | None = Field(
        default=None, description="transformers' quantization_config (in process only)."
    )
    attn_implementation: str | None = Field(
        default=None, description="packed or sdpa (in process only)."
    )
    decode_step: str | None = Field(
        default=None, description="eager, static, graphs or compile (in process only)."
    )
    max_num_seqs: int | None = Field(
        default=None, description="Requests decoded together (in process only)."
    )
    max_model_len: int | None = Field(
        default=None, description="Tokens of prompt and answer together (in process only)."
    )
    num_threads: int | None = Field(
        default=None, description="Threads of the engine (in process only)."
    )
    chat_template: str | None = Field(
        default=None, description="Jinja template in place of the model's own (in process only)."
    )
    tool_format: str | None = Field(
        default=None,
        description="How the model writes calls of tools: auto, hermes, llama3, mistral, "
        "mistral-args or json (in process only).",
    )
    reasoning_format: str | None = Field(
        default=None,
        description="Whether it thinks in <think> tags before it answers: auto, think or none "
        "(in process only).",
    )
    suffix_store: str | None = Field(
        default=None,
        description="File that keeps what suffix drafts learnt between starts (in process only).",
    )
    kv_cache_mib: int | None = Field(
        default=None, description="MiB for keys and values (in process only)."
    )
    prefix_cache_mib: int | None = Field(
        default=None,
        description="MiB of them for prompts and answers that later requests may begin with; "
        "0 keeps none (in process only).",
    )
    backend: Backend | None = Field(
        default=None,
        exclude=True,
        repr=False,
        description="A ready backend, in place of the one that `model` and `broker_url` name.",
    )
