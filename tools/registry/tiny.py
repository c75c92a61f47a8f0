"""Make small configurations, of the same sizes for every architecture.

A tiny configuration keeps the published defaults for everything that is not a size, so that each
architecture keeps its own layout, and is small enough to build and run on a CPU in milliseconds.
What an architecture needs besides is written into its file by hand.
"""

import dataclasses
from typing import Any

EXPERT_COUNTS = ("moe_num_experts", "n_routed_experts", "num_experts", "num_local_experts")

TINY_EXPERTS = 4

# Every attribute that a configuration has of these is set; `EXPERT_COUNTS` come from the caller.
SIZES: dict[str, Any] = {
    "hidden_size": 64, "d_model": 64, "embed_dim": 64, "n_embd": 64, "intermediate_size": 96,
    "ffn_hidden_size": 96, "ffn_dim": 96, "encoder_ffn_dim": 96, "intermediate_size_mlp": 96,
    "moe_intermediate_size": 40, "moe_hidden_size": 48, "projection_hidden_dim": 64,
    "expert_ffn_hidden_size": 40, "shared_expert_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 40, "shared_intermediate_size": 40,
    "num_hidden_layers": 2, "n_layers": 2, "num_layers": 2, "depth": 2, "encoder_layers": 2,
    "num_attention_heads": 4, "n_heads": 4, "num_heads": 4, "encoder_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "kv_channels": 16, "num_experts_per_tok": 2,
    "num_experts_per_token": 2, "moe_topk": 2, "moe_top_k": 2, "moe_k": 2, "top_k_experts": 2,
    "n_group": 1, "topk_group": 1, "vocab_size": 128, "max_position_embeddings": 64,
    "q_lora_rank": 24, "kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
    "qk_head_dim": 32, "v_head_dim": 16, "index_n_heads": 2, "index_head_dim": 32, "index_topk": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_num_heads": 4, "linear_head_dim": 16,
    "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16,
    "zero_expert_num": 2, "projection_intermediate_size": 96, "mamba_num_heads": 8,
    "mamba_n_heads": 8, "mamba_head_dim": 16, "mamba_d_head": 16, "mamba_d_state": 8,
    "ssm_state_size": 8, "mamba_n_groups": 2, "n_groups": 2, "mamba_chunk_size": 16,
    "chunk_size": 16, "out_hidden_size": 64, "projector_hidden_size": 64, "output_hidden_size": 64,
    "sliding_window": 16, "num_nextn_predict_layers": 0, "unpadded_vocab_size": 120,
}  # fmt: skip

TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")

# What parts without experts, which have no file, need besides.
NEEDS: dict[str, dict[str, Any]] = {
    "dots3_note_audio_encoder": {"adapter_input_size": 64, "adapter_out_dim": 64,
                                 "conv_output_size": 128, "downsample_hidden_size": 8},
    "inkling_vision": {"text_hidden_size": 64, "patch_size": 2, "num_hidden_layers": 4},
    "muse_spark_audio": {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 16, 32, 32],
                         "num_hidden_layers": 4},
}  # fmt: skip

# Absent by default where an architecture does without: then they stay absent.
OPTIONAL = (
    "head_dim", "q_lora_rank", "shared_intermediate_size", "sliding_window", "unpadded_vocab_size",
)  # fmt: skip


def _read(default: Any, name: str) -> Any:
    """Return an attribute of a default configuration; the first layer's where layers differ."""
    try:
        return getattr(default, name, None)
    except AttributeError:
        return default.per_layer_config[0].to_dict().get(name)
    except Exception:  # noqa: BLE001 - the library's own error for "differs by layer"
        return getattr(default.per_layer_config[0], name, None)


def tiny_kwargs(config_class: Any, default: Any, experts: int) -> dict[str, Any]:
    """Return keyword arguments of a small configuration, sub-configurations included."""
    fields = {item.name for item in dataclasses.fields(config_class)}
    kwargs: dict[str, Any] = {
        name: value
        for name, value in SIZES.items()
        if name in fields and not (name in OPTIONAL and _read(default, name) is None)
    }
    heads = _read(default, "num_attention_heads")
    if "num_key_value_heads" in kwargs and _read(default, "num_key_value_heads") == heads:
        kwargs["num_key_value_heads"] = SIZES["num_attention_heads"]
    layers = _read(default, "mlp_layer_types") or ["dense"]
    if "mlp_layer_types" in fields and "dense" in layers:
        kwargs["mlp_layer_types"] = ["dense", "sparse"]
    kinds = list(dict.fromkeys(_read(default, "layer_types") or []))
    if len(kinds) == 2 and kinds[0] == "linear_attention" and "layer_types" in fields:
        # Caches ask a layer of full attention how long they are.
        kwargs["layer_types"] = kinds
    if "first_k_dense_replace" in fields and _read(default, "first_k_dense_replace"):
        kwargs["first_k_dense_replace"] = 1
    if _read(default, "mlp_only_layers"):
        kwargs["mlp_only_layers"] = [0]
    kwargs |= {name: experts for name in EXPERT_COUNTS if name in fields}
    for name in TOKENS:
        value = _read(default, name)
        if isinstance(value, int) and value >= SIZES["vocab_size"]:
            kwargs[name] = TOKENS.index(name)
    for name, sub_class in getattr(config_class, "sub_configs", {}).items():
        sub = _read(default, name)
        if sub is None and sub_class.__name__ == "AutoConfig":
            continue
        actual = type(sub) if sub is not None else sub_class
        inner = tiny_kwargs(actual, sub if sub is not None else default_of(actual), experts)
        if sub_class.__name__ == "AutoConfig":
            inner["model_type"] = actual.model_type
        kwargs[name] = inner
    return kwargs | NEEDS.get(config_class.model_type, {})


def default_of(config_class: Any) -> Any:
    """Return the default configuration, or the class where its defaults do not validate."""
    try:
        return config_class()
    except Exception:  # noqa: BLE001 - any validator may object
        return config_class
