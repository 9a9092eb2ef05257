"""Random models of almost every architecture of transformers, with a few thousand weights each."""

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from cavesson.models.load import prepare

WINDOW = 8
"""Attention that does not reach back to the first token reaches back so far."""
SIZES = {
    # Layers and heads, under every name that configs give them.
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_global_key_value_heads"), 2),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_size", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("attention_hidden_size", "lru_width"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size", "n_inner", "dff", "ffn_dim"), 64),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "mamba_d_ssm"), 64),
    **dict.fromkeys(("head_dim", "global_head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 512),
    "rotary_dim": 4,
    # Experts.
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts"), 1),
    "num_experts_per_tok": 2,
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 16),
    # State spaces.
    **dict.fromkeys(("state_size", "mamba_d_state", "mamba_n_heads", "mamba_d_head"), 8),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 8),
    **dict.fromkeys(("conv_kernel", "mamba_d_conv"), 4),
    **dict.fromkeys(("expand", "mamba_expand", "expansion_ratio"), 2),
    "mamba_n_groups": 1,
    # Gemma 3n.
    **dict.fromkeys(("hidden_size_per_layer_input", "laurel_rank"), 8),
    "vocab_size_per_layer_input": 258,
    "num_kv_shared_layers": 0,
    "initializer_range": 0.2,
    **dict.fromkeys(("sliding_window", "attention_window_size", "window_size"), WINDOW),
}
TOKENS = {"vocab_size": 258, "eos_token_id": 0, "pad_token_id": 1, "bos_token_id": 0}
_HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
OWN = {
    "bailing_hybrid": {**_HYBRID, "mlp_layer_types": ["dense", "sparse"]},
    "bamba": {"attn_layer_indices": [1]},
    "deepseek_v2": {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": _HYBRID,
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"head_dim": 8, "num_heads": 8, "n_groups": 1},
    "minicpm3": {"dim_model_base": 16},
    "minimax": _HYBRID,
    "ministral": {"head_dim": 8},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "qwen3_5_moe_text": _HYBRID,
    "qwen3_5_text": _HYBRID,
    "qwen3_next": _HYBRID,
    "recurrent_gemma": {"num_hidden_layers": 3},  # recurrent, recurrent, attention
}
"""What an architecture needs beside the sizes."""


def small_config(architecture: str, **settings: object) -> PretrainedConfig:
    """The config of a small model: whatever of the sizes this architecture knows."""
    kind = CONFIG_MAPPING[architecture]
    default = kind()
    computed = {name for name in SIZES if isinstance(getattr(kind, name, None), property)}
    if hasattr(default, "kv_lora_rank"):
        computed |= {"head_dim", "num_key_value_heads"}
    if architecture == "gpt_neo":
        computed |= {"num_hidden_layers", "num_attention_heads"}
    known = {
        name: size
        for name, size in SIZES.items()
        if name not in computed and (getattr(default, name, None) is not None or name == "intermediate_size")
    }
    if "intermediate_size" in known and not hasattr(default, "intermediate_size"):
        del known["intermediate_size"]
    if hasattr(default, "kv_lora_rank"):
        known["num_key_value_heads"] = known["num_attention_heads"]
    if hasattr(default, "is_decoder"):
        known["is_decoder"] = True
    return kind(**{**known, **TOKENS, **OWN.get(architecture, {}), **settings})


def small_model(architecture: str, **settings: object) -> PreTrainedModel:
    """A model with random weights, large enough that what it reads matters."""
    config = small_config(architecture, **settings)
    torch.manual_seed(0)
    return prepare(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config))
