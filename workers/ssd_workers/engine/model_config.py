"""What a model's configuration says before any weights are read."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from transformers import AutoConfig, GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME

from ssd_integrations.errors import UnsupportedModelError
from ssd_workers.engine.rollback import refusal_of_config
from ssd_workers.models.store import ModelSource

logger = logging.getLogger(__name__)


def load_config(source: ModelSource) -> Any:
    """The configuration of ``source``.

    Raises:
      UnsupportedModelError: transformers does not know it, or it cannot be rolled back.
    """
    try:
        config = AutoConfig.from_pretrained(source.path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UnsupportedModelError(
            f"Model {source.name!r} is of a kind that transformers cannot load: {error}"
        ) from error
    reason = refusal_of_config(config)
    if reason is not None:
        raise UnsupportedModelError(
            f"Model {source.name!r} ({config.model_type}) cannot be decoded by this engine: "
            f"{reason}"
        )
    return config


def context_length(text_config: Any) -> int:
    """The longest sequence, in tokens.

    With rotary embeddings of the kind ``longrope`` it ends where the long factors would begin:
    they apply to all of a sequence at once, so its earlier keys would have to be computed again,
    and a sequence would depend on the longest one beside it.
    """
    length = 2048
    for key in ("max_position_embeddings", "n_positions", "max_seq_len"):
        value = getattr(text_config, key, None)
        if value:
            length = int(value)
            break
    for rope in _rope_settings(text_config):
        original = rope.get("original_max_position_embeddings")
        if rope.get("rope_type") == "longrope" and original and int(original) < length:
            logger.warning(
                "Sequences are limited to %d of %d tokens: beyond, this model's rotary embedding "
                "(longrope) changes for all of a sequence at once.",
                original,
                length,
            )
            length = int(original)
    return length


def _rope_settings(text_config: Any) -> list[dict[str, Any]]:
    """The settings of the rotary embedding, one for each kind of layer."""
    settings = getattr(text_config, "rope_parameters", None) or {}
    nested = [value for value in settings.values() if isinstance(value, dict)]
    return [*nested, settings]


def eos_token_ids(source: ModelSource, text_config: Any, tokenizer: Any) -> frozenset[int]:
    """Every token that ends the output: those of the generation settings and the tokenizer's."""
    values = [getattr(text_config, "eos_token_id", None), getattr(tokenizer, "eos_token_id", None)]
    if (Path(source.path) / GENERATION_CONFIG_NAME).is_file():
        values.append(GenerationConfig.from_pretrained(source.path).eos_token_id)
    found: set[int | None] = set()
    for value in values:
        found.update(value if isinstance(value, list | tuple) else [value])
    return frozenset(int(v) for v in found if v is not None)
