"""What an engine is told at start; nothing here changes while it runs."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ssd_integrations.errors import InvalidRequestError
from ssd_integrations.validation import describe_validation_error

DType = Literal["auto", "int8", "float32", "bfloat16", "float16"]


class EngineConfig(BaseModel):
    """One target model, at most one draft model, and the limits they run under.

    ``dtype="auto"`` is bfloat16 on a GPU; on a CPU int8 for the demo model and float32 otherwise.
    ``max_model_len`` is in tokens, prompt and output together; None takes the model's own limit.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    model: str = Field(min_length=1, max_length=1024)
    draft_model: str | None = Field(default=None, min_length=1, max_length=1024)
    dtype: DType = "auto"
    device: str = Field(default="auto", max_length=32)
    max_num_seqs: int = Field(default=8, ge=1, le=1024)
    max_model_len: int | None = Field(default=None, ge=8)
    num_draft_tokens: int = Field(default=8, ge=1, le=64)
    num_threads: int | None = Field(default=None, ge=1, le=1024)
    chat_template: str | None = Field(default=None, max_length=1_000_000)


def build_engine_config(**fields: object) -> EngineConfig:
    """An :class:`EngineConfig` from keyword arguments.

    Raises:
      InvalidRequestError: names the option and the value that is out of bounds.
    """
    try:
        return EngineConfig.model_validate(fields)
    except ValidationError as error:
        raise InvalidRequestError(describe_validation_error("engine option", error)) from error
