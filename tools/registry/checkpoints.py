"""Sizes of well-known checkpoints, as what their config.json says beyond the class's defaults.

Each was checked against the number of parameters that its makers publish: the experts' share of
these sizes is right to a few percent of it (Qwen3-30B-A3B 29.0 of 30.5 billion, GLM-4.5-Air 99.7 of
106, DeepSeek-V3 654 of 671, ...).
"""

from __future__ import annotations

from typing import Any

CHECKPOINTS: dict[str, dict[str, dict[str, Any]]] = {
    "deepseek_v3": {"deepseek-ai/DeepSeek-V3": {}},
    "glm4_moe": {
        "zai-org/GLM-4.5": {
            "first_k_dense_replace": 3,
            "hidden_size": 5120,
            "intermediate_size": 12288,
            "moe_intermediate_size": 1536,
            "n_routed_experts": 160,
            "num_attention_heads": 96,
            "num_hidden_layers": 92,
        },
        "zai-org/GLM-4.5-Air": {
            "first_k_dense_replace": 1,
            "hidden_size": 4096,
            "moe_intermediate_size": 1408,
            "n_routed_experts": 128,
            "num_attention_heads": 96,
            "num_hidden_layers": 46,
        },
    },
    "gpt_oss": {
        "openai/gpt-oss-120b": {"num_hidden_layers": 36, "num_local_experts": 128},
        "openai/gpt-oss-20b": {"num_hidden_layers": 24, "num_local_experts": 32},
    },
    "mixtral": {
        "mistralai/Mixtral-8x22B-v0.1": {
            "hidden_size": 6144,
            "intermediate_size": 16384,
            "num_attention_heads": 48,
            "num_hidden_layers": 56,
        },
        "mistralai/Mixtral-8x7B-v0.1": {},
    },
    "olmoe": {
        "allenai/OLMoE-1B-7B-0924": {
            "hidden_size": 2048,
            "intermediate_size": 1024,
            "num_experts": 64,
            "num_hidden_layers": 16,
        }
    },
    "qwen3_moe": {
        "Qwen/Qwen3-235B-A22B": {
            "head_dim": 128,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "moe_intermediate_size": 1536,
            "num_attention_heads": 64,
            "num_experts": 128,
            "num_hidden_layers": 94,
        },
        "Qwen/Qwen3-30B-A3B": {
            "head_dim": 128,
            "hidden_size": 2048,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_hidden_layers": 48,
        },
    },
}
