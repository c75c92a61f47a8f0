"""How a file has the model packed, and what of it gets LoRA."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...errors import ConfigError
from ...packing.bnb4bit import NF4
from ...packing.settings import CodecSettings
from . import checks
from .checks import BLOCK, ExpertsSettings
from .file import AskedLora, Reader

PLANNED = ("lora", "qlora")

# Field of a LoraConfig -> the key that axolotl fills it from.
_LORA_FIELDS = {
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "modules_to_save": "lora_modules_to_save",
    "rank_pattern": "lora_rank_pattern",
    "alpha_pattern": "lora_alpha_pattern",
    "layers_to_transform": "peft_layers_to_transform",
    "layers_pattern": "peft_layers_pattern",
    "use_dora": "peft_use_dora",
    "use_rslora": "peft_use_rslora",
    "layer_replication": "peft_layer_replication",
    "trainable_token_indices": "peft_trainable_token_indices",
    "fan_in_fan_out": "lora_fan_in_fan_out",
}

KEYS = (
    *("adapter", "load_in_4bit", "load_in_8bit", "bnb_config_kwargs", "plugins", "lora_r"),
    *("lora_target_modules", "lora_target_linear", "lora_target_parameters"),
    *("lora_exclude_modules", "quantize_moe_experts", "base_model", *_LORA_FIELDS.values()),
)
"""The keys that are read here."""

# Types of models whose packed codes axolotl keeps in float32, unless the run is sharded.
_FLOAT32_STORAGE = ("jamba", "qwen2_moe", "nemotron_h")
_SKIPPED_4BIT = {"falcon_h1": ["out_proj"]}
_SKIPPED_8BIT = {"falcon_h1": ["out_proj"], "jamba": ["mamba"]}


def read_block(reader: Reader) -> ExpertsSettings | None:
    """Return the plugin's settings; None where the file does not name the plugin."""
    try:
        settings = ExpertsSettings.read(reader.get(BLOCK))
        if checks.is_named(reader.cfg):
            checks.check({**reader.cfg, "deepspeed": reader.zero or reader.get("deepspeed")})
            return settings
    except ConfigError as error:
        reader.faults.append(str(error))
        return None
    if reader.get(BLOCK) is not None:
        reader.notes.append(
            f"axolotl reads the moe_qlora block only where plugins names {checks.PLUGIN}."
        )
    return None


def read_packing(reader: Reader, model_type: str, dtype: Any) -> CodecSettings | None:
    """Return how axolotl's loader packs Linear layers in this file; None where it does not.

    Its defaults are nf4 with double quantization, computed in the dtype that the model is loaded
    in (a `torch.dtype`), with the codes kept in bfloat16; `bnb_config_kwargs` go before them.

    Raises:
        ConfigError: `bnb_config_kwargs` cannot be followed.
    """
    adapter = reader.get("adapter")
    four, eight = reader.flag("load_in_4bit"), reader.flag("load_in_8bit")
    own = reader.get("bnb_config_kwargs") or {}
    if not isinstance(own, Mapping):
        raise ConfigError(f"bnb_config_kwargs is {own!r:.80}; expected a mapping of settings.")
    if not checks.is_named(reader.cfg):  # whose checks have said so
        _check_bits(reader, adapter, four, eight)
    asked: dict[str, Any]
    if adapter in ("qlora", "mixlora") and four:
        sharded = any(reader.get(key) for key in ("deepspeed", "fsdp_config"))
        plain = model_type in _FLOAT32_STORAGE and not sharded
        asked = {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": NF4.kind,
            "bnb_4bit_use_double_quant": True,
            "bnb_4bit_compute_dtype": dtype,
            "bnb_4bit_quant_storage": "float32" if plain else "bfloat16",
            "llm_int8_skip_modules": _SKIPPED_4BIT.get(model_type),
            **own,
        }
    elif adapter == "lora" and eight:
        asked = {"load_in_8bit": True, "llm_int8_skip_modules": _SKIPPED_8BIT.get(model_type)}
        if own:
            reader.notes.append("axolotl follows bnb_config_kwargs in 4 bit only.")
    else:
        reader.notes.append(
            "The file has the model loaded in 16 bit: 4 bit is adapter: qlora with load_in_4bit: "
            "true, 8 bit adapter: lora with load_in_8bit: true."
        )
        return None
    return CodecSettings.from_config(asked)


def _check_bits(reader: Reader, adapter: Any, four: bool, eight: bool) -> None:
    """Note what axolotl refuses of adapter and bits."""
    if adapter is None and (four or eight):
        bits = "load_in_4bit" if four else "load_in_8bit"
        reader.faults.append(
            f"{bits} is true and adapter is missing, which axolotl refuses: set adapter: "
            f"{'qlora' if four else 'lora'}."
        )
    if adapter == "qlora" and (eight or not four):
        seen = "load_in_8bit is true" if eight else "load_in_4bit is not true"
        reader.faults.append(
            f"adapter is 'qlora' and {seen}, which axolotl refuses: set load_in_4bit: true alone."
        )
    if adapter == "lora" and four and not eight:
        reader.notes.append(
            "adapter is 'lora' and load_in_4bit is true: axolotl packs nothing then, and adapter: "
            "qlora is what packs."
        )


def packs_experts(reader: Reader, block: ExpertsSettings | None, codec: Any) -> bool:
    """Tell whether experts are packed, and say what becomes of them otherwise."""
    if codec is None:
        return False
    if block is not None:
        return block.pack_experts
    if reader.flag("quantize_moe_experts"):
        reader.notes.append(
            "quantize_moe_experts has axolotl pack the experts; they are planned as moe_qlora's "
            f"plugin would pack and compute them (plugins: [{checks.PLUGIN}], without "
            "quantize_moe_experts)."
        )
        return True
    reader.notes.append(
        "The file packs Linear layers only, and fused experts stay in 16 bit: to pack them, add "
        f"{checks.PLUGIN} to plugins."
    )
    return False


def with_skips(codec: CodecSettings | None, block: Mapping[str, Any] | Any) -> CodecSettings | None:
    """Return the settings with the modules that the plugin's block skips as well."""
    more = block.get("skip_modules") if isinstance(block, Mapping) else None
    if codec is None or not isinstance(more, list):
        return codec
    return replace(codec, skip_modules=(*codec.skip_modules, *map(str, more)))


def read_lora(reader: Reader, block: ExpertsSettings | None) -> AskedLora | None:
    """Return the LoRA of the file; None where the run has no adapter."""
    adapter = reader.get("adapter")
    if adapter is None:
        return None
    if adapter not in PLANNED:
        reader.unplanned.append(f"adapter {adapter!r:.40} (planned as LoRA)")
    fields = {name: reader.get(key) for name, key in _LORA_FIELDS.items()}
    fields["target_parameters"] = reader.names("lora_target_parameters")
    modules = reader.names("lora_target_modules")
    if reader.flag("lora_target_linear"):
        if modules:
            reader.notes.append(
                "lora_target_linear is true beside lora_target_modules; planned as all Linear "
                "layers."
            )
        modules = "all-linear"
    fields["target_modules"] = modules
    if block is not None:  # without the plugin axolotl drops it
        fields["exclude_modules"] = reader.names("lora_exclude_modules")
    if isinstance(fields["target_parameters"], str):
        fields["target_parameters"] = [fields["target_parameters"]]
    start = reader.get("peft_init_lora_weights", True)
    if start not in (True, False, "gaussian") or reader.block("peft").get("loftq_config"):
        reader.unplanned.append("peft_init_lora_weights")
    given = {name: value for name, value in fields.items() if value not in (None, [], {})}
    given.setdefault("target_modules", [])
    experts = block.lora_experts if block is not None else False
    router = block is not None and block.lora_router
    if not (given["target_modules"] or given.get("target_parameters") or experts or router):
        reader.notes.append(
            "The file names nothing for LoRA (lora_target_modules, lora_target_linear, "
            "lora_target_parameters, or lora_experts of the block moe_qlora)."
        )
    rank = reader.number("lora_r")
    if rank is not None:
        reader.ask("rank", rank, "lora_r")
    else:
        reader.notes.append("The file has no lora_r, without which PEFT makes no adapter.")
    keys = ("lora_target_modules", "lora_target_linear", "lora_target_parameters")
    named = [key for key in (*keys, "lora_modules_to_save") if reader.get(key)]
    named += [BLOCK] * bool(experts or router)
    return AskedLora(given, ", ".join(named), experts, router)
