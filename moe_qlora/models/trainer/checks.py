"""What cannot work together in an axolotl file: refused before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...errors import ConfigError
from .block import BLOCK, ExpertsSettings, shown
from .zero import zero_stage

PLUGIN = "moe_qlora.integrations.axolotl.MoeQloraPlugin"


def _more_than_one(value: Any) -> bool:
    return isinstance(value, int) and value > 1


def plugins_of(cfg: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the plugins that a file names, each as `package.module.Class`."""
    named = cfg.get("plugins") or ()
    listed = named if isinstance(named, (list, tuple)) else (named,)
    return tuple(str(name).replace(":", ".") for name in listed)


def is_named(cfg: Mapping[str, Any]) -> bool:
    """Tell whether a file names this package's plugin."""
    return PLUGIN in plugins_of(cfg)


# Key -> why it collides, and what to do.
_COLLISIONS = {
    "quantize_moe_experts": (
        "axolotl would pack the experts that moe_qlora packs; take out one of the two"
    ),
    "nf4_backend": "experts are packed by bitsandbytes; leave it out",
    "qlora_sharded_model_loading": "it loads by other code, which packs no experts; leave it out",
    "reinit_weights": "a model of random weights is not loaded, so nothing is packed",
    "gptq": "a GPTQ model is packed already; take the plugin out",
    "qat": "it trains the weights that moe_qlora packs and freezes; take out one of the two",
    "relora": "it merges adapters into weights that packing rounds anew each time; leave it out",
    "tensor_parallel_size": (
        "a tensor-parallel plan cannot shard packed experts; use data or context parallelism"
    ),
    "expert_parallel_size": (
        "axolotl's expert parallelism shards plain weights only; use data or context parallelism"
    ),
    "deepspeed": (
        "ZeRO stage 3 takes weights apart before they can be packed; use stage 2 or lower, or FSDP"
    ),
    "fsdp_config": (
        "only the first rank would get experts to pack; set cpu_ram_efficient_loading to false"
    ),
    "use_scattermoe": "packed experts run on moe_qlora's own kernels; leave it out",
    "use_sonicmoe": "packed experts run on moe_qlora's own kernels; leave it out",
    "experts_implementation": (
        "packed experts run through the implementation 'moe_qlora'; leave it out"
    ),
}

# Key -> whether a value collides; of the other keys every true one does.
_COLLIDES: dict[str, Callable[[Any], bool]] = {
    "nf4_backend": lambda value: value == "torchao",
    "tensor_parallel_size": _more_than_one,
    "expert_parallel_size": _more_than_one,
    "deepspeed": lambda value: zero_stage(value) == 3,
    "fsdp_config": lambda value: (
        isinstance(value, Mapping) and bool(value.get("cpu_ram_efficient_loading"))
    ),
    # axolotl's kernels plugin writes "eager" where the user wrote nothing
    "experts_implementation": lambda value: value not in ("eager", "moe_qlora"),
}


def wants_packing(cfg: Mapping[str, Any]) -> bool:
    """Tell whether this run packs experts: its settings say so, and it is no merge."""
    return ExpertsSettings.read(cfg.get(BLOCK)).pack_experts and not cfg.get("merge_lora")


def check(cfg: Mapping[str, Any]) -> None:
    """Refuse a configuration that names the plugin and cannot be followed, by a `ConfigError`.

    It may be as it was read from the file, or as axolotl's schema gets it.
    """
    settings = ExpertsSettings.read(cfg.get(BLOCK))
    if not wants_packing(cfg):
        return
    adapter = cfg.get("adapter")
    if adapter not in ("qlora", "lora"):
        seen = "is missing" if adapter is None else f"is {adapter!r}"
        raise ConfigError(
            f"adapter {seen}, and moe_qlora packs experts for LoRA: set adapter: qlora with "
            "load_in_4bit: true, or adapter: lora with load_in_8bit: true."
        )
    bits, other = ("4", "8") if adapter == "qlora" else ("8", "4")
    if not cfg.get(f"load_in_{bits}bit") or cfg.get(f"load_in_{other}bit"):
        both = cfg.get(f"load_in_{other}bit")
        seen = f"load_in_{other}bit is true" if both else f"load_in_{bits}bit is not true"
        raise ConfigError(
            f"adapter is {adapter!r} and {seen}, so that axolotl would not load the model in "
            f"{bits} bit: set load_in_{bits}bit: true alone, or the other adapter."
        )
    for key, why in _COLLISIONS.items():
        value = cfg.get(key)
        if value is not None and _COLLIDES.get(key, bool)(value):
            seen = "set" if isinstance(value, (Mapping, list)) else shown(value)
            raise ConfigError(f"{key} is {seen} beside the plugin of moe_qlora: {why}.")
    if settings.lora_experts and cfg.get("peft_use_dora"):
        raise ConfigError(
            "peft_use_dora is true, and moe_qlora.lora_experts asks for LoRA on packed experts, "
            "whose unpacked rows DoRA would need: take out one of the two."
        )
