"""Tiny configurations of many architectures: what is decoded, and what is refused and why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.tiny import VOCAB_SIZE, make_tokenizer

WINDOW = 16
CONTEXT = 512
OMITTED = object()
"""In the place of a setting that an architecture does not take."""

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT,
    # Wide enough that the logits are spread as a trained model's are, and no near ties.
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

_GPT = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT}
_ONE_WINDOW = {"sliding_window": WINDOW}
_TWO_WINDOWS = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
}

# Long and short factors, and a context of which the short ones serve half.
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + i / 8 for i in range(8)],
    "long_factor": [2.0 + i for i in range(8)],
    "original_max_position_embeddings": CONTEXT // 2,
}

_DENSE: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": _ONE_WINDOW,
    "gemma2": {
        **_TWO_WINDOWS, "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 5.0, "final_logit_softcapping": 10.0,
    },
    "gemma3_text": {**_TWO_WINDOWS, "query_pre_attn_scalar": 16},
    "phi": {"partial_rotary_factor": 0.5},
    "phi3": {
        "sliding_window": WINDOW, "rope_parameters": LONGROPE,
        "original_max_position_embeddings": LONGROPE["original_max_position_embeddings"],
    },
    "gpt2": _GPT,
    "gpt_neox": {"rotary_pct": 0.25},
}  # fmt: skip

_MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
    },
    "qwen3_moe": {
        "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
}  # fmt: skip

# What the settings of experts are called differs; each takes those that it knows.
_EXPERTS: dict[str, Any] = {
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "moe_k": 2, "moe_topk": 2, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32, "n_shared_experts": 1, "num_shared_experts": 1,
    "moe_num_shared_experts": 1, "moe_layer_start_index": 0, "first_k_dense_replace": 0,
    "n_group": 1, "topk_group": 1, "num_expert_groups": 1,
}  # fmt: skip

_FURTHER: dict[str, dict[str, Any]] = {
    "apertus": {},
    "arcee": {},
    "biogpt": {},
    "bitnet": {},
    "codegen": {**_GPT, "rotary_dim": 8},
    "cohere": {},
    "cohere2": _TWO_WINDOWS,
    "ernie4_5": {},
    "exaone4": _TWO_WINDOWS,
    "gemma": {},
    "gemma4_text": {
        **_TWO_WINDOWS, "num_kv_shared_layers": 0, "global_head_dim": 32,
        "vocab_size_per_layer_input": VOCAB_SIZE, "hidden_size_per_layer_input": 8,
    },
    "glm": {},
    "glm4": {},
    "gpt_bigcode": _GPT,
    "gptj": {**_GPT, "rotary_dim": 8},
    "granite": {"residual_multiplier": 0.5, "attention_multiplier": 0.2, "logits_scaling": 2.0},
    "helium": {},
    "hunyuan_v1_dense": {},
    "ministral": _TWO_WINDOWS,
    "ministral3": {},
    "nanochat": {},
    "nemotron": {},
    "olmo": {"clip_qkv": 4.0},
    "olmo2": {},
    "olmo3": _TWO_WINDOWS,
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64},
    "persimmon": {},
    "seed_oss": {},
    "smollm3": {"no_rope_layers": [1, 0]},
    "stablelm": {"use_qkv_bias": True, "partial_rotary_factor": 0.25},
    "starcoder2": _ONE_WINDOW,
    "vaultgemma": {**_TWO_WINDOWS, "query_pre_attn_scalar": 16},
    "afmoe": {**_EXPERTS, **_TWO_WINDOWS, "num_dense_layers": 1},
    "cohere2_moe": {**_EXPERTS, **_TWO_WINDOWS},
    "dots1": {**_EXPERTS, **_TWO_WINDOWS},
    "ernie4_5_moe": _EXPERTS,
    "exaone_moe": {**_EXPERTS, **_TWO_WINDOWS},
    "flex_olmo": _EXPERTS,
    "glm4_moe": _EXPERTS,
    "granitemoe": _EXPERTS,
    "granitemoeshared": {**_EXPERTS, "shared_intermediate_size": 32},
    "minimax_m2": {**_EXPERTS, "rotary_dim": 8},
    "olmoe": _EXPERTS,
    "phimoe": _EXPERTS,
    "solar_open": _EXPERTS,
}  # fmt: skip

MIXTURES = tuple(_MIXTURES)
DECODED = (*_DENSE, *MIXTURES)
"""Tested with every change."""

FURTHER = tuple(_FURTHER)
"""Decoded as well; tested with the slow tests."""

_RECURRENT = "recurrent state"
_MAMBA = {"mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1}
_LATENT = {
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1, "num_key_value_heads": 4,
    "head_dim": 8,
}  # fmt: skip

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "mamba": ({"state_size": 8}, _RECURRENT),
    "mamba2": ({"num_heads": 8, "head_dim": 16, "state_size": 8, "n_groups": 1}, _RECURRENT),
    "rwkv": ({"attention_hidden_size": 64}, "outside of the key-value cache, as recurrent"),
    "recurrent_gemma": ({"block_types": ["recurrent", "attention"]}, _RECURRENT),
    "jamba": (
        {"num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8},
        _RECURRENT,
    ),
    "zamba2": (
        {"layers_block_type": ["mamba", "hybrid"], "n_mamba_heads": 8, "mamba_d_state": 8},
        _RECURRENT,
    ),
    "bamba": ({**_MAMBA, "attn_layer_indices": [1]}, _RECURRENT),
    "falcon_h1": ({**_MAMBA, "mamba_d_ssm": 128}, _RECURRENT),
    "qwen3_next": (
        {
            "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2,
            "linear_num_value_heads": 4, "num_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
            "layer_types": ["linear_attention", "full_attention"],
        },
        _RECURRENT,
    ),
    "lfm2": ({"layer_types": ["conv", "full_attention"]}, _RECURRENT),
    "gpt_oss": (
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW},
        "attention sinks",
    ),
    "bloom": ({"n_layer": 2, "n_head": 4}, "computes attention itself"),
    "mpt": (
        {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": CONTEXT},
        "computes attention itself",
    ),
    "falcon": ({"alibi": True, "head_dim": OMITTED}, "computes attention itself"),
    "jetmoe": (
        {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 16},
        "away from those that transformers",
    ),
    "bert": ({}, "away from those that transformers"),
    "gpt_neo": (
        {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "num_heads": 4},
        "computes attention itself",
    ),
    "xlstm": ({}, "'rnn_state', a state of another kind"),
    "gemma3n_text": (
        {
            "num_hidden_layers": 4, "num_kv_shared_layers": 2, "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "vocab_size_per_layer_input": VOCAB_SIZE, "hidden_size_per_layer_input": 8,
        },
        "shared between layers",
    ),
    "deepseek_v3": (_LATENT, "multi-head latent attention"),
    "llama4_text": (
        {"attention_chunk_size": WINDOW, "num_local_experts": 2, "intermediate_size_mlp": 128},
        "chunked local attention",
    ),
}  # fmt: skip
"""Settings of models that are refused, and what the refusal says."""


def config_of(arch: str, **overrides: Any) -> Any:
    """A configuration of the model type ``arch`` with two layers of width 64."""
    known = {**_DENSE, **_MIXTURES, **_FURTHER}
    settings = known[arch] if arch in known else REFUSED[arch][0]
    settings = {**_COMMON, **settings, **overrides}
    return AutoConfig.for_model(arch, **{k: v for k, v in settings.items() if v is not OMITTED})


def make_model(path: Path, arch: str, seed: int = 0, **overrides: Any) -> Path:
    """Save a random model of ``arch`` with a tokenizer into ``path`` and return it."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config_of(arch, **overrides), dtype=torch.float32)
    model.save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path
