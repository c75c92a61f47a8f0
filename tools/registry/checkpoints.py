"""Sizes of well-known checkpoints, as what their config.json says beyond the class's defaults.

Each is a record of its makers' own configuration, as far as memory and compute depend on it. The
generator builds each and refuses a number of weights that is not the one its makers publish.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

TOLERANCE = 0.01
"""How far the number of weights may be from the published one, which makers round."""


@dataclass(frozen=True)
class Sizes:
    """Checkpoints of one size."""

    names: tuple[str, ...]  # Hub ids; the first is the best known
    billions: float  # Weights as published, without layers for multi-token prediction
    config: dict[str, Any] = field(default_factory=dict)  # Keyword arguments of the configuration


MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}

CHECKPOINTS: dict[str, tuple[Sizes, ...]] = {
    "deepseek_v2": (
        Sizes((
                  "deepseek-ai/DeepSeek-V2-Lite", "deepseek-ai/DeepSeek-V2-Lite-Chat",
                  "deepseek-ai/DeepSeek-Coder-V2-Lite-Base",
                  "deepseek-ai/DeepSeek-Coder-V2-Lite-Instruct",
              ), 15.7,
              {
                  "first_k_dense_replace": 1, "hidden_size": 2048, "intermediate_size": 10944,
                  "moe_intermediate_size": 1408, "num_attention_heads": 16,
                  "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16,
                  "q_lora_rank": None,
              }),
    ),
    "deepseek_v3": (
        Sizes((
                  "deepseek-ai/DeepSeek-V3", "deepseek-ai/DeepSeek-V3-Base",
                  "deepseek-ai/DeepSeek-V3-0324", "deepseek-ai/DeepSeek-R1",
                  "deepseek-ai/DeepSeek-R1-0528",
              ), 671,
              {"quantization_config": FP8}),
        Sizes(("moonshotai/Kimi-K2-Instruct", "moonshotai/Kimi-K2-Base"), 1026,
              {
                  "first_k_dense_replace": 1, "n_group": 1, "n_routed_experts": 384,
                  "num_attention_heads": 64, "num_key_value_heads": 64, "quantization_config": FP8,
                  "routed_scaling_factor": 2.827, "topk_group": 1, "vocab_size": 163840,
              }),
        Sizes(("moonshotai/Moonlight-16B-A3B", "moonshotai/Moonlight-16B-A3B-Instruct"), 16,
              {
                  "first_k_dense_replace": 1, "hidden_size": 2048, "intermediate_size": 11264,
                  "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 64,
                  "n_shared_experts": 2, "num_attention_heads": 16, "num_experts_per_tok": 6,
                  "num_hidden_layers": 27, "num_key_value_heads": 16, "q_lora_rank": None,
                  "routed_scaling_factor": 2.446, "topk_group": 1, "vocab_size": 163840,
              }),
    ),
    "dots1": (
        Sizes(("rednote-hilab/dots.llm1.inst", "rednote-hilab/dots.llm1.base"), 142,
              {
                  "first_k_dense_replace": 1, "hidden_size": 4096, "n_routed_experts": 128,
                  "n_shared_experts": 2, "num_experts_per_tok": 6,
              }),
    ),
    "ernie4_5_moe": (
        Sizes(("baidu/ERNIE-4.5-21B-A3B-PT", "baidu/ERNIE-4.5-21B-A3B-Base-PT"), 21.8),
    ),
    "glm4_moe": (
        Sizes(("zai-org/GLM-4.5-Air", "zai-org/GLM-4.5-Air-Base"), 106,
              {"attention_bias": True, "head_dim": 128}),
        Sizes(("zai-org/GLM-4.5", "zai-org/GLM-4.5-Base", "zai-org/GLM-4.6", "zai-org/GLM-4.7"),
              355,
              {
                  "attention_bias": True, "first_k_dense_replace": 3, "head_dim": 128,
                  "hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536,
                  "n_routed_experts": 160, "num_hidden_layers": 92, "routed_scaling_factor": 2.5,
                  "use_qk_norm": True,
              }),
    ),
    "glm4_moe_lite": (
        Sizes(("zai-org/GLM-4.7-Flash",), 30),
    ),
    "gpt_oss": (
        Sizes(("openai/gpt-oss-20b",), 20.9,
              {"num_hidden_layers": 24, "num_local_experts": 32, "quantization_config": MXFP4}),
        Sizes(("openai/gpt-oss-120b",), 116.8, {"quantization_config": MXFP4}),
    ),
    "granitemoe": (
        Sizes((
                  "ibm-granite/granite-3.1-1b-a400m-instruct",
                  "ibm-granite/granite-3.1-1b-a400m-base",
              ), 1.33,
              {
                  "hidden_size": 1024, "intermediate_size": 512, "num_attention_heads": 16,
                  "num_experts_per_tok": 8, "num_hidden_layers": 24, "num_key_value_heads": 8,
                  "num_local_experts": 32, "tie_word_embeddings": True, "vocab_size": 49155,
              }),
        Sizes((
                  "ibm-granite/granite-3.1-3b-a800m-instruct",
                  "ibm-granite/granite-3.1-3b-a800m-base",
              ), 3.3,
              {
                  "hidden_size": 1536, "intermediate_size": 512, "num_attention_heads": 24,
                  "num_experts_per_tok": 8, "num_key_value_heads": 8, "num_local_experts": 40,
                  "tie_word_embeddings": True, "vocab_size": 49155,
              }),
    ),
    "hunyuan_v1_moe": (
        Sizes(("tencent/Hunyuan-A13B-Instruct", "tencent/Hunyuan-A13B-Pretrain"), 80.4,
              {
                  "head_dim": 128, "intermediate_size": 3072, "moe_topk": 8, "num_experts": 64,
                  "num_key_value_heads": 8, "tie_word_embeddings": True, "vocab_size": 128167,
              }),
    ),
    "llama4": (
        Sizes(("meta-llama/Llama-4-Scout-17B-16E-Instruct", "meta-llama/Llama-4-Scout-17B-16E"),
              109),
        Sizes((
                  "meta-llama/Llama-4-Maverick-17B-128E-Instruct",
                  "meta-llama/Llama-4-Maverick-17B-128E",
              ), 400,
              {
                  "text_config": {
                      "interleave_moe_layer_step": 2, "num_local_experts": 128,
                      "use_qk_norm": False,
                  },
              }),
    ),
    "minimax_m2": (
        Sizes(("MiniMaxAI/MiniMax-M2", "MiniMaxAI/MiniMax-M2.5"), 229,
              {
                  "quantization_config": {**FP8,
                      "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]},
              }),
    ),
    "mixtral": (
        Sizes(("mistralai/Mixtral-8x7B-v0.1", "mistralai/Mixtral-8x7B-Instruct-v0.1"), 46.7),
        Sizes(("mistralai/Mixtral-8x22B-v0.1",), 141,
              {
                  "hidden_size": 6144, "intermediate_size": 16384, "num_attention_heads": 48,
                  "num_hidden_layers": 56,
              }),
    ),
    "olmoe": (
        Sizes((
                  "allenai/OLMoE-1B-7B-0924", "allenai/OLMoE-1B-7B-0924-Instruct",
                  "allenai/OLMoE-1B-7B-0125", "allenai/OLMoE-1B-7B-0125-Instruct",
              ), 6.92,
              {"intermediate_size": 1024}),
    ),
    "phimoe": (
        Sizes(("microsoft/Phi-3.5-MoE-instruct",), 41.9,
              {"attention_bias": True, "lm_head_bias": True}),
    ),
    "qwen2_moe": (
        Sizes(("Qwen/Qwen1.5-MoE-A2.7B", "Qwen/Qwen1.5-MoE-A2.7B-Chat"), 14.3),
        Sizes(("Qwen/Qwen2-57B-A14B", "Qwen/Qwen2-57B-A14B-Instruct"), 57.4,
              {
                  "hidden_size": 3584, "intermediate_size": 18944, "moe_intermediate_size": 2560,
                  "num_attention_heads": 28, "num_experts": 64, "num_experts_per_tok": 8,
                  "num_hidden_layers": 28, "num_key_value_heads": 4,
                  "shared_expert_intermediate_size": 20480,
              }),
    ),
    "qwen3_5_moe": (
        Sizes(("Qwen/Qwen3.5-35B-A3B", "Qwen/Qwen3.6-35B-A3B"), 35,
              {"vision_config": {"out_hidden_size": 2048}}),
        Sizes(("Qwen/Qwen3.5-122B-A10B",), 122,
              {
                  "text_config": {
                      "hidden_size": 3072, "linear_num_value_heads": 64,
                      "moe_intermediate_size": 1024, "num_attention_heads": 32,
                      "num_hidden_layers": 48, "shared_expert_intermediate_size": 1024,
                  },
                  "vision_config": {"out_hidden_size": 3072},
              }),
        Sizes(("Qwen/Qwen3.5-397B-A17B",), 397,
              {
                  "text_config": {
                      "hidden_size": 4096, "linear_num_value_heads": 64,
                      "moe_intermediate_size": 1024, "num_attention_heads": 32, "num_experts": 512,
                      "num_experts_per_tok": 10, "num_hidden_layers": 60,
                      "shared_expert_intermediate_size": 1024,
                  },
                  "vision_config": {"out_hidden_size": 4096},
              }),
    ),
    "qwen3_moe": (
        Sizes((
                  "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-30B-A3B-Base",
                  "Qwen/Qwen3-30B-A3B-Instruct-2507", "Qwen/Qwen3-30B-A3B-Thinking-2507",
                  "Qwen/Qwen3-Coder-30B-A3B-Instruct",
              ), 30.5,
              {
                  "head_dim": 128, "hidden_size": 2048, "moe_intermediate_size": 768,
                  "norm_topk_prob": True, "num_experts": 128, "num_hidden_layers": 48,
              }),
        Sizes((
                  "Qwen/Qwen3-235B-A22B", "Qwen/Qwen3-235B-A22B-Instruct-2507",
                  "Qwen/Qwen3-235B-A22B-Thinking-2507",
              ), 235,
              {
                  "head_dim": 128, "hidden_size": 4096, "intermediate_size": 12288,
                  "moe_intermediate_size": 1536, "norm_topk_prob": True, "num_attention_heads": 64,
                  "num_experts": 128, "num_hidden_layers": 94,
              }),
        Sizes(("Qwen/Qwen3-Coder-480B-A35B-Instruct",), 480,
              {
                  "head_dim": 128, "hidden_size": 6144, "intermediate_size": 8192,
                  "moe_intermediate_size": 2560, "norm_topk_prob": True, "num_attention_heads": 96,
                  "num_experts": 160, "num_hidden_layers": 62, "num_key_value_heads": 8,
              }),
    ),
    "qwen3_next": (
        Sizes(("Qwen/Qwen3-Next-80B-A3B-Instruct", "Qwen/Qwen3-Next-80B-A3B-Thinking"), 80,
              {"intermediate_size": 5120}),
    ),
    "qwen3_vl_moe": (
        Sizes(("Qwen/Qwen3-VL-30B-A3B-Instruct", "Qwen/Qwen3-VL-30B-A3B-Thinking"), 31.1,
              {
                  "text_config": {
                      "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768,
                      "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
                      "num_hidden_layers": 48, "num_key_value_heads": 4,
                  },
                  "vision_config": {"out_hidden_size": 2048},
              }),
    ),
}  # fmt: skip
