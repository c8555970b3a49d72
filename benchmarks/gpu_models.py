"""Models for benchmarks/gpu_check.py, built from configurations: nothing is downloaded.

The target has random weights, and its later layers add little to what the first ones do. The draft
model is its first layers with some noise, so that it is right about as often as a trained draft
model is. The rows of the output layer differ in size: then the best token stands out from the
others as in a trained model, and rounding seldom decides.
"""

from __future__ import annotations

import gc
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

_ROW_SPREAD = 0.5  # standard deviation of the logarithm of the output rows' sizes
_LATER_SHARE = 0.13  # variance that all later layers add, relative to one layer's
_DRAFT_NOISE = 0.02  # relative to the weights


@dataclass(frozen=True)
class Size:
    """Shapes of the models, and how much is decoded with them."""

    hidden: int
    intermediate: int
    layers: int
    draft_layers: int
    heads: int
    kv_heads: int
    vocab: int
    prompt_tokens: int
    new_tokens: int
    contexts: tuple[int, ...]
    rounds: int


FULL = Size(2048, 8192, 16, 2, 32, 8, 32_768, 256, 96, (256, 4096), 3)
QUICK = Size(128, 256, 4, 1, 4, 2, 512, 70, 24, (100,), 1)


def build_models(folder: Path, size: Size, dtype: torch.dtype, device: str) -> tuple[Path, Path]:
    """Save a target and a draft model with a tokenizer into ``folder``; returns their folders."""
    torch.manual_seed(0)
    target_path, draft_path = folder / "target", folder / "draft"
    with torch.device(device), torch.no_grad():
        target = AutoModelForCausalLM.from_config(_config(size, size.layers), dtype=dtype)
        target.lm_head.weight.mul_(torch.exp(_ROW_SPREAD * torch.randn(size.vocab, 1)))
        later = target.model.layers[size.draft_layers :]
        for layer in later:
            share = math.sqrt(_LATER_SHARE / len(later))
            layer.self_attn.o_proj.weight.mul_(share)
            layer.mlp.down_proj.weight.mul_(share)
        draft = AutoModelForCausalLM.from_config(_config(size, size.draft_layers), dtype=dtype)
        weights = target.state_dict()
        for name, weight in draft.state_dict().items():
            source = weights[name]
            noise = _DRAFT_NOISE * source.float().std() if source.ndim > 1 else 0.0
            weight.copy_(source + noise * torch.randn_like(source))
    for model, path in ((target, target_path), (draft, draft_path)):
        model.save_pretrained(path)
        _tokenizer(size.vocab).save_pretrained(path)
    # The memory is needed for what is measured.
    del target, draft, model, later, layer, weights, weight, source
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
    return target_path, draft_path


def _config(size: Size, layers: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.hidden // size.heads,
        max_position_embeddings=8192,
        initializer_range=1.0 / math.sqrt(size.hidden),
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


def _tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    """Token 17 is the word w17, so that any ids are a text and any text is its ids."""
    core = Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocab)}, unk_token="w0"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core)
