"""Make small configurations: the same sizes for every architecture, and what some need besides.

A tiny configuration keeps the published defaults for everything that is not a size, so that each
architecture keeps its own layout, and is small enough to build and run on a CPU in milliseconds.
"""

from __future__ import annotations

import dataclasses
from typing import Any

EXPERT_COUNTS = (
    "moe_num_experts",
    "n_routed_experts",
    "num_experts",
    "num_local_experts",
)

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

_SAM = {"output_channels": 32, "mlp_dim": 96, "downsample_channels": [32, 64]}

# What an architecture needs besides: by model type of the configuration that has the attribute.
NEEDS: dict[str, dict[str, Any]] = {
    "dbrx": {"attn_config": {"clip_qkv": 8.0, "kv_n_heads": 2, "rope_theta": 10000.0}},
    "deepseek_ocr2_sam_vision_model": _SAM,
    "diffusion_gemma": {"canvas_length": 12}, "dots1": {"n_shared_experts": 1},
    "dots3_note_audio_encoder": {"adapter_input_size": 64, "adapter_out_dim": 64,
                                 "conv_output_size": 128, "downsample_hidden_size": 8},
    "dots3_note_text": {"head_dim": 32},
    "dots3_note_vision_encoder": {"adapter_in_dim": 64, "adapter_out_dim": 64,
                                  "pyramid_num_routed": [0, 4]},
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [40, 24], "rope_parameters": {
        "mrope_section": [3, 3, 2], "rope_theta": 500000.0, "rope_type": "default"}},
    "gemma4_vision": {"position_embedding_size": 64},
    "gemma4_text": {"enable_moe_block": True, "hidden_size_per_layer_input": 8,
                    "vocab_size_per_layer_input": 128},
    "glm5_next_text": {"head_dim": 0, "qk_head_dim": 16, "qk_rope_head_dim": 0},
    "glm4v_moe_text": {"rope_parameters": {"mrope_section": [2, 1, 1], "rope_type": "default",
                                           "partial_rotary_factor": 0.5, "rope_theta": 10000.0}},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "hunyuan_v1_moe": {"head_dim": 16},
    "hy_v4_vl_text": {"rope_parameters": {"mrope_section": [3, 3, 2], "rope_theta": 10000.0,
                                          "rope_type": "default"}},
    "inkling2_vision": {"text_hidden_size": 64, "projection_hidden_dim": 64},
    "inkling_audio": {"text_hidden_size": 64, "n_mel_bins": 8, "mel_vocab_size": 32},
    "inkling_vision": {"text_hidden_size": 64, "patch_size": 2, "num_hidden_layers": 4},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "llama4_vision_model": {"projector_input_dim": 64, "projector_output_dim": 64,
                            "vision_output_dim": 64},
    "muse_spark_audio": {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 16, 32, 32],
                         "num_hidden_layers": 4},
    "nemotron3_5_transcribe_word_timestamp": {"blank_token_id": 0},
    "nemotron3_diarization": {"head_config": {"audio_hidden_size": 64}},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]},
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2, "max_img_size": 128}},
    "qwen3_omni_moe": {"code2wav_config": {"codebook_size": 64, "decoder_dim": 64},
                       "talker_config": {"spatial_merge_size": 2}},
    "qwen3_omni_moe_audio_encoder": {"downsample_hidden_size": 8, "output_dim": 64},
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 40},
    "qwen4_exp_text": {
        "indexer_budget": 8, "indexer_compress_ratio": 2, "indexer_head_dim": 16,
        "indexer_kv_heads": 1, "indexer_n_heads": 4,
    },
    "unlimited_ocr_sam_vision_model": _SAM,
    "step3p5": {"sliding_window": 16}, "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip

# What published defaults lack: without it the default configuration builds no model, or one
# without experts.
PUBLISHED: dict[str, dict[str, Any]] = {
    "dbrx": {"attn_config": {"kv_n_heads": 8, "rope_theta": 10000.0}},
    "deepseek_ocr2_text": {
        "mlp_layer_types": ["dense", *["sparse"] * 31],
        "num_experts_per_tok": 6,
    },
    "diffusion_gemma_text": {"moe_intermediate_size": 704, "num_experts": 128, "top_k_experts": 8},
    "dots1": {
        "first_k_dense_replace": 1, "n_routed_experts": 128, "n_shared_experts": 2,
        "num_experts_per_tok": 6,
    },
    "gemma4_text": {
        "enable_moe_block": True, "moe_intermediate_size": 704, "num_experts": 128,
        "top_k_experts": 8,
    },
    "hunyuan_v1_moe": {
        "head_dim": 128, "intermediate_size": 3072, "moe_topk": 8, "num_experts": 64,
        "num_key_value_heads": 8,
    },
    "lfm2_moe": {"layer_types": ["conv", "conv", *["full_attention", *["conv"] * 3] * 7,
                                 "full_attention", "conv"]},
    "qwen3_omni_moe": {"talker_config": {"spatial_merge_size": 2}},
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 768},
    "qwen4_exp_text": {
        "indexer_budget": 2048, "indexer_compress_ratio": 4, "indexer_head_dim": 256,
        "indexer_kv_heads": 1, "indexer_n_heads": 16,
    },
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


def _fields(config_class: Any) -> set[str]:
    return {item.name for item in dataclasses.fields(config_class)}


def tiny_kwargs(config_class: Any, default: Any, experts: int) -> dict[str, Any]:
    """Return keyword arguments of a small configuration, sub-configurations included."""
    fields = _fields(config_class)
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
    return _merged(kwargs, NEEDS.get(config_class.model_type, {}))


def _merged(kwargs: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    merged = dict(kwargs)
    for name, value in more.items():
        part = merged.get(name)
        merged[name] = _merged(part, value) if isinstance(part, dict) else value
    return merged


def default_of(config_class: Any) -> Any:
    """Return the default configuration, or the class where its defaults do not validate."""
    try:
        return config_class()
    except Exception:  # noqa: BLE001 - any validator may object
        return config_class


def published_kwargs(config_class: Any, default: Any) -> dict[str, Any]:
    """Return keyword arguments that make the default configuration one of a model with experts."""
    kwargs: dict[str, Any] = dict(PUBLISHED.get(config_class.model_type, {}))
    for name, sub_class in (getattr(config_class, "sub_configs", None) or {}).items():
        sub = _read(default, name)
        actual = type(sub) if sub is not None else sub_class
        if actual.__name__ == "AutoConfig":
            continue
        inner = published_kwargs(actual, sub if sub is not None else default_of(actual))
        if not inner:
            continue
        if sub is not None:
            changed = {k: v for k, v in sub.to_diff_dict().items() if k in _fields(actual)}
            inner = _merged(changed, inner)
        if sub_class.__name__ == "AutoConfig":
            inner["model_type"] = actual.model_type
        kwargs[name] = _merged(kwargs.get(name, {}), inner)
    return kwargs
