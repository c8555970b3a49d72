"""Tiny random models and a real small tokenizer, built from configs in a second or two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

ARCHITECTURES = ("llama", "qwen3", "gemma3", "gpt2")
VOCAB_SIZE = 400

CORPUS = [
    "The router restarts when you hold the reset button for ten seconds.",
    "Revenue rose in the north and fell in the south during the third quarter.",
    "Please restart the router, then check the cable and call us again.",
    "안녕하세요, 라우터를 다시 시작해 주세요. Grüße aus Köln! ¿Qué tal? 🙂🙃",
] * 8

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer(*, chat_template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of ``VOCAB_SIZE`` tokens at most, the same at every call."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(CORPUS, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def tiny_config(arch: str, **overrides: Any) -> Any:
    """A configuration of ``arch`` with two or three layers of width 64."""
    common: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        # Wide enough that the logits are spread as a trained model's are, and no near ties.
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    if arch == "llama":
        return LlamaConfig(**{**common, **overrides})
    if arch == "qwen3":
        return Qwen3Config(**{**common, **overrides})
    if arch == "gemma3":
        gemma = {
            "sliding_window": 16, "num_hidden_layers": 3, "query_pre_attn_scalar": 16,
            # Tied to scaled embeddings, random weights only ever repeat the last token.
            "tie_word_embeddings": False,
        }  # fmt: skip
        layers = {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
        return Gemma3TextConfig(**{**common, **gemma, **layers, **overrides})
    if arch == "gpt2":
        gpt2 = {
            "vocab_size": VOCAB_SIZE, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512,
            "initializer_range": 0.3, "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0,
        }  # fmt: skip
        return GPT2Config(**{**gpt2, **overrides})
    raise ValueError(f"unknown architecture {arch!r}; one of {ARCHITECTURES}")


def make_tiny_model(
    path: Path,
    arch: str = "llama",
    seed: int = 0,
    *,
    chat_template: str | None = CHAT_TEMPLATE,
    **overrides: Any,
) -> Path:
    """Save a random model of ``arch`` with a tokenizer into ``path`` and return it."""
    torch.manual_seed(seed)
    config = tiny_config(arch, **overrides)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(path)
    make_tokenizer(chat_template=chat_template).save_pretrained(path)
    return path
