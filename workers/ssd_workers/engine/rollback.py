"""What cannot be rolled back, or is not computed here, and how a model shows that it needs it.

A rejected draft is forgotten by setting the length of the key-value cache back. State of any other
kind would have to be copied at every step, so a model that keeps some is refused.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NoReturn

from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ssd_integrations.errors import UnsupportedModelError

_RECURRENT = (
    "a recurrent state (linear attention, a state-space model or a convolution), which every token "
    "overwrites, so that rejected tokens cannot be taken out again"
)
_CHUNKED = "chunked local attention, whose chunks this engine does not compute"
_SPARSE = "sparse attention over keys that an index chooses or compresses, which is not computed"

OWN_ATTENTION = (
    "it computes attention itself, as models with position biases (ALiBi) do, instead of through "
    "transformers' attention interface"
)

_ROLLBACK_LAYERS = {"full_attention", "sliding_attention"}
_LAYER_REASONS = {
    "linear_attention": _RECURRENT,
    "conv": _RECURRENT,
    "hybrid": _RECURRENT,
    "hybrid_sliding": _RECURRENT,
    "moe": _RECURRENT,  # beside recurrent layers
    "chunked_attention": _CHUNKED,
    "window_attention": _CHUNKED,
    "indexed_attention": _SPARSE,
    "compressed_sparse_attention": _SPARSE,
    "heavily_compressed_attention": _SPARSE,
}

# What some models hand to their attention and this one does not compute.
_NOT_COMPUTED = {
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "position_bias": "a bias for each distance (relative positions)",
    "indices": _SPARSE,
    "block_indices": _SPARSE,
}


def refusal_of_config(config: Any) -> str | None:
    """Why a model of this configuration cannot be decoded; None where that is not known yet."""
    if getattr(config, "is_encoder_decoder", False):
        return (
            "it is an encoder-decoder model, whose decoder attends to an input that this engine "
            "does not encode."
        )
    text = config.get_text_config(decoder=True)
    kinds = set(getattr(text, "layer_types", None) or ())
    for kind in sorted(kinds - _ROLLBACK_LAYERS):
        reason = _LAYER_REASONS.get(kind, "which is not known to be computed right")
        return f"it has layers of kind {kind!r}: {reason}."
    if not isinstance(getattr(text, "num_attention_heads", None), int):
        return (
            "its configuration has no number of attention heads, so it keeps a recurrent state, or "
            "layers of different shapes, which cannot be rolled back here."
        )
    return None


def refuse_what_is_not_computed(model_part: str, arguments: dict[str, Any]) -> None:
    """Look at what an attention layer was handed beyond queries, keys and values.

    Raises:
      UnsupportedModelError: it asks for something that this engine would leave out.
    """
    for name, mechanism in _NOT_COMPUTED.items():
        if arguments.get(name) is not None:
            raise UnsupportedModelError(
                f"its {model_part} needs {mechanism} ({name!r}), which this engine does not "
                "compute."
            )
    if arguments.get("is_causal") is False:
        raise UnsupportedModelError(f"its {model_part} also attends to later tokens.")


def refusal_of_error(model: PreTrainedModel, error: Exception) -> str:
    """Why a model cannot be decoded whose first forward ended with ``error``."""
    if isinstance(error, AttributeError) and isinstance(error.obj, KeysAndValuesOnly):
        return (
            f"it asks its cache for {error.name!r}, a state of another kind than keys and values, "
            "which cannot be rolled back."
        )
    if not model._can_set_attn_implementation():
        return f"{OWN_ATTENTION} ({error})."
    return f"its forward fails with this engine's cache and attention: {error}."


def refusal_of_layers(num_layers: int, writes: Counter[int], reads: Counter[int]) -> str | None:
    """Why a model cannot be decoded, by how often each layer wrote and read keys in a forward."""
    once = Counter(range(num_layers))
    if writes == reads == once:
        return None
    if not writes and not reads:
        return (
            "it keeps its state outside of the key-value cache, as recurrent models do, or has "
            "none, so rejected tokens cannot be taken out again."
        )
    if max((writes | reads).values()) > 1:
        return "some of its layers are run more than once for a token (loops)."
    if len(reads) < len(writes):
        return f"{OWN_ATTENTION} ({len(writes) - len(reads)} of {num_layers} layers)."
    return (
        f"only {len(reads)} of its {num_layers} layers use the key-value cache and the attention "
        "that can be rolled back; the others keep a state of another kind."
    )


def refuse_shared_keys(layer: int) -> NoReturn:
    """Refuse a model whose ``layer`` attends to keys that it did not write."""
    raise UnsupportedModelError(
        f"its layer {layer} attends to keys and values of another one (shared between layers), "
        "which this engine's cache does not hold."
    )


class KeysAndValuesOnly(Cache):  # type: ignore[misc]
    """A cache of keys and values; asked for state of any other kind, it refuses the model."""

    def _refuse_recurrent(self, *args: Any, **kwargs: Any) -> NoReturn:
        del args, kwargs
        raise UnsupportedModelError(f"it needs {_RECURRENT}.")

    get_conv_state = update_conv_state = has_previous_state = _refuse_recurrent
    get_recurrent_state = update_recurrent_state = _refuse_recurrent

    def update_indexer(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: what an index chooses is not computed."""
        del args, kwargs
        raise UnsupportedModelError(f"it needs {_SPARSE}.")


def refuse_latent(keys: tuple[int, ...], values: tuple[int, ...]) -> None:
    """Compare the shapes ``[1, heads, rows, dim]`` of what a layer writes to the cache.

    Raises:
      UnsupportedModelError: they differ, as where compressed latents stand for keys and values.
    """
    if keys != values:
        raise UnsupportedModelError(
            f"it caches keys of {keys[1]} x {keys[3]} and values of {values[1]} x {values[3]} "
            "numbers a token, as multi-head latent attention does; this engine attends to keys "
            "and values of one size, and does not expand latents."
        )
