"""Published sizes of models with experts, by the names that the benchmarks take."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

SHAPES: dict[str, tuple[str, dict[str, int]]] = {
    "qwen3-235b-a22b": ("qwen3_moe", {"hidden_size": 4096, "moe_intermediate_size": 1536,
                                      "num_experts": 128, "num_experts_per_tok": 8}),
    "gpt-oss-120b": ("gpt_oss", {"hidden_size": 2880, "intermediate_size": 2880,
                                 "num_local_experts": 128, "num_experts_per_tok": 4}),
    "qwen3-30b-a3b": ("qwen3_moe", {"hidden_size": 2048, "moe_intermediate_size": 768,
                                    "num_experts": 128, "num_experts_per_tok": 8}),
    "mixtral-8x7b": ("mixtral", {"hidden_size": 4096, "intermediate_size": 14336,
                                 "num_local_experts": 8, "num_experts_per_tok": 2}),
    "gpt-oss-20b": ("gpt_oss", {"hidden_size": 2880, "intermediate_size": 2880,
                                "num_local_experts": 32, "num_experts_per_tok": 4}),
    "glm-4.5-air": ("glm4_moe", {"hidden_size": 4096, "moe_intermediate_size": 1408,
                                 "n_routed_experts": 128, "num_experts_per_tok": 8}),
    "deepseek-v3": ("deepseek_v3", {"hidden_size": 7168, "moe_intermediate_size": 2048,
                                    "n_routed_experts": 256, "num_experts_per_tok": 8}),
}  # fmt: skip
"""Model type and the sizes of its experts; a model type is the last one's that has it."""

TINY = ("qwen3_moe", {"hidden_size": 64, "moe_intermediate_size": 64, "num_experts": 4,
                      "num_experts_per_tok": 2})  # fmt: skip

WHOLE: dict[str, dict[str, int]] = {
    "qwen3-235b-a22b": {"num_hidden_layers": 94, "vocab_size": 151936, "intermediate_size": 12288,
                        "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128},
    "gpt-oss-120b": {"num_hidden_layers": 36, "vocab_size": 201088, "num_attention_heads": 64,
                     "num_key_value_heads": 8, "head_dim": 64},
    "qwen3-30b-a3b": {"num_hidden_layers": 48, "vocab_size": 151936, "intermediate_size": 6144,
                      "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128},
    "mixtral-8x7b": {"num_hidden_layers": 32, "vocab_size": 32000, "num_attention_heads": 32,
                     "num_key_value_heads": 8},
    "gpt-oss-20b": {"num_hidden_layers": 24, "vocab_size": 201088, "num_attention_heads": 64,
                    "num_key_value_heads": 8, "head_dim": 64},
    "glm-4.5-air": {"num_hidden_layers": 46, "vocab_size": 151552, "intermediate_size": 10944,
                    "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128},
    "deepseek-v3": {"num_hidden_layers": 61, "vocab_size": 129280, "intermediate_size": 18432,
                    "num_attention_heads": 128, "num_key_value_heads": 128},
}  # fmt: skip
"""The sizes of the rest of the model."""


def name_of(model: str) -> str:
    """A name of `SHAPES` for a model type that has one; else what was given."""
    named = {model_type: name for name, (model_type, _) in SHAPES.items()}
    return named.get(model, model)


def whole_config(model: str, *, layers: int | None = None, tiny: bool = False) -> Any:
    """The configuration of a whole model.

    Args:
        model: A name of `SHAPES`, a model type (its published size if it has one, else its
            configuration's defaults), or a `config.json` or the folder that holds one.
        layers: Hidden layers to keep; None keeps all.
        tiny: The registry's tiny configuration of this model type, for a CPU.

    Raises:
        ValueError: Nothing goes by this name.
    """
    from transformers import CONFIG_MAPPING

    path = Path(model)
    if path.exists():
        file = path / "config.json" if path.is_dir() else path
        sizes = json.loads(file.read_text(encoding="utf-8"))
        model_type = sizes.pop("model_type")
    else:
        name = name_of(model)
        model_type, experts = SHAPES.get(name, (model, {}))
        sizes = {**experts, **WHOLE.get(name, {})}
    if model_type not in CONFIG_MAPPING:
        known = ", ".join(SHAPES)
        raise ValueError(f"{model}: neither a file, nor a model type, nor one of {known}")
    if tiny:
        from moe_qlora.testing import tiny_config

        sizes = dict(tiny_config(model_type).to_dict())
        sizes.pop("model_type")
    return CONFIG_MAPPING[model_type](**(sizes if layers is None else _cut(sizes, layers)))


def _cut(sizes: dict[str, Any], layers: int) -> dict[str, Any]:
    """With fewer layers, lists of one entry a layer included, in a text model's part if any."""
    if "text_config" in sizes:
        return {**sizes, "text_config": _cut(sizes["text_config"], layers)}
    had = sizes.get("num_hidden_layers")
    cut = {
        key: value[:layers] if isinstance(value, list) and len(value) == had else value
        for key, value in sizes.items()
    }
    return {**cut, "num_hidden_layers": layers}


def random_mxfp4(shape: Sequence[int], transposed: bool, device: torch.device) -> Any:
    """A packed weight of random MXFP4 codes that decodes to `shape` in bf16, std about 0.02.

    Args:
        shape: Of the parameter.
        transposed: Whether that is `(E, in, out)`: codes run along `in`, whatever it is.
        device: Where the weight is to be.

    Raises:
        ValueError: Rows have no whole blocks of 32.
    """
    from moe_qlora.packing.mxfp4 import MXFP4
    from moe_qlora.packing.settings import CodecSettings

    if shape[1 if transposed else 2] % 32:
        raise ValueError(f"{tuple(shape)} has no whole blocks of 32")
    numel = torch.Size(shape).numel()
    codes = torch.randint(256, (numel // 2,), device=device, dtype=torch.uint8)
    exponents = torch.randint(119, 122, (numel // 32,), device=device, dtype=torch.uint8)
    settings = CodecSettings("mxfp4", stored_transposed=transposed)
    return MXFP4.finish(codes, exponents, shape, torch.bfloat16, settings)
