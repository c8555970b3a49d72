"""What an engine is told at start; nothing here changes while it runs."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from ssd_integrations.errors import InvalidRequestError
from ssd_integrations.validation import describe_validation_error

DType = Literal["auto", "int8", "float32", "bfloat16", "float16"]
AttnImplementation = Literal["packed", "sdpa"]
DecodeStep = Literal["eager", "static", "graphs", "compile"]
ToolFormatName = Literal["auto", "hermes", "llama3", "mistral", "mistral-args", "json"]
ReasoningFormat = Literal["auto", "think", "none"]

_DEVICE_MAP_NAMES = ("auto", "balanced", "balanced_low_0", "sequential")


class EngineConfig(BaseModel):
    """One target model, at most one draft model, and the limits they run under.

    ``dtype="auto"`` is bfloat16 on a GPU; on a CPU int8 for the demo model and float32 otherwise.
    ``suffix_store`` is a file that keeps what was written, for drafts of the next start.
    ``max_model_len`` is in tokens, prompt and output together; None takes the model's own limit.

    ``device_map`` ("auto", or an object of module name -> device) spreads the target over devices;
    ``quantization`` is an object for transformers' ``quantization_config``, also for the target
    only. Both may be given as JSON text, and are kept as such, so that a config can be a key.
    ``attn_implementation`` is "packed", this engine's own products, or "sdpa", torch's fused ones.
    ``decode_step`` is "eager", or steps of fixed shapes: "static" runs them one operation after the
    other, "graphs" as CUDA graphs, "compile" by torch.compile.

    ``kv_cache_mib`` is the memory for keys and values, on all devices together; None takes what is
    free once the models are loaded, less a reserve. ``prefix_cache_mib`` of it may hold those of
    earlier prompts and answers; None is 256 on a CPU and 1024 elsewhere, 0 keeps nothing.

    ``tool_format`` is how the model writes calls of tools, ``reasoning_format`` whether it thinks
    in ``<think>`` tags before it answers; "auto" tells by its chat template and vocabulary.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    model: str = Field(min_length=1, max_length=1024)
    draft_model: str | None = Field(default=None, min_length=1, max_length=1024)
    dtype: DType = "auto"
    device: str = Field(default="auto", max_length=32)
    device_map: str | None = Field(default=None, min_length=1, max_length=100_000)
    quantization: str | None = Field(default=None, min_length=1, max_length=100_000)
    attn_implementation: AttnImplementation = "packed"
    decode_step: DecodeStep = "eager"
    max_num_seqs: int = Field(default=8, ge=1, le=1024)
    max_model_len: int | None = Field(default=None, ge=8)
    num_draft_tokens: int = Field(default=8, ge=1, le=64)
    num_threads: int | None = Field(default=None, ge=1, le=1024)
    suffix_store: str | None = Field(default=None, min_length=1, max_length=4096)
    chat_template: str | None = Field(default=None, max_length=1_000_000)
    tool_format: ToolFormatName = "auto"
    reasoning_format: ReasoningFormat = "auto"
    kv_cache_mib: int | None = Field(default=None, ge=1, le=2**30)
    prefix_cache_mib: int | None = Field(default=None, ge=0, le=2**30)

    @field_validator("device_map", mode="before")
    @classmethod
    def _known_device_map(cls, value: object) -> object:
        if value is None or value in _DEVICE_MAP_NAMES:
            return value
        places = _json_object(value, f"one of {', '.join(_DEVICE_MAP_NAMES)} or a JSON object")
        for module, place in places.items():
            if isinstance(place, bool) or not isinstance(place, int | str) or place == "disk":
                raise ValueError(
                    f"module {module!r} cannot be put on {place!r}: "
                    'give a GPU\'s number, or a name such as "cuda:0" or "cpu"'
                )
        return json.dumps(places, sort_keys=True)

    @field_validator("quantization", mode="before")
    @classmethod
    def _quantization_object(cls, value: object) -> object:
        if value is None:
            return None
        return json.dumps(_json_object(value, "a JSON object"), sort_keys=True)

    @model_validator(mode="after")
    def _not_at_odds(self) -> EngineConfig:
        if self.device_map is not None and self.device != "auto":
            raise ValueError(
                f"device={self.device!r} and device_map={self.device_map} both say where the "
                "model goes: give one of them"
            )
        for option in ("device_map", "quantization"):
            if self.dtype == "int8" and getattr(self, option) is not None:
                raise ValueError(
                    f"dtype='int8' is this engine's own format and takes no {option}: "
                    "drop one of them"
                )
        if self.decode_step != "eager" and (self.device_map is not None or self.dtype == "int8"):
            other = "dtype='int8'" if self.dtype == "int8" else f"device_map={self.device_map}"
            raise ValueError(
                f"decode_step={self.decode_step!r} does not go with {other}: drop one of them"
            )
        return self

    def device_map_for_loading(self) -> str | dict[str, int | str] | None:
        """What transformers takes as ``device_map``."""
        if self.device_map is None or self.device_map in _DEVICE_MAP_NAMES:
            return self.device_map
        places: dict[str, int | str] = json.loads(self.device_map)
        return places

    def quantization_for_loading(self) -> dict[str, Any] | None:
        """The fields of transformers' ``quantization_config``."""
        if self.quantization is None:
            return None
        fields: dict[str, Any] = json.loads(self.quantization)
        return fields


def build_engine_config(**fields: object) -> EngineConfig:
    """An :class:`EngineConfig` from keyword arguments.

    Raises:
      InvalidRequestError: names the option and the value that is out of bounds.
    """
    try:
        return EngineConfig.model_validate(fields)
    except ValidationError as error:
        raise InvalidRequestError(describe_validation_error("engine option", error)) from error


def _json_object(value: object, expected: str) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"must be {expected}") from error
    if not isinstance(value, dict) or not value or not all(isinstance(k, str) for k in value):
        raise ValueError(f"must be {expected} with at least one entry")
    return value
