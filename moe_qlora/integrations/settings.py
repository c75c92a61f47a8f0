"""The `moe_qlora:` block of a host's file, and what axolotl's settings must be beside it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictStr, ValidationError

from ..errors import ConfigError, did_you_mean
from ..models.files import read_json
from ..packing.bnb4bit import NF4

PLUGIN = "moe_qlora.integrations.axolotl.MoeQloraPlugin"

BLOCK = "moe_qlora"

Role = Literal["gate_up", "gate", "up", "down"]  # those of layout.py
_BOOL = "true and false"


def is_named(cfg: Mapping[str, Any]) -> bool:
    """Tell whether a file names this package's plugin."""
    named = cfg.get("plugins") or ()
    listed = named if isinstance(named, (list, tuple)) else (named,)
    return PLUGIN in (str(name).replace(":", ".") for name in listed)


def _is_stage_3(value: Any) -> bool:
    """Whether `deepspeed:` is of ZeRO's stage 3; of a file that is missing its name tells."""
    if not isinstance(value, Mapping) and not Path(value).is_file():
        return "zero3" in re.sub("[-_]|stage", "", str(value).lower())
    read = value if isinstance(value, Mapping) else read_json(Path(value))
    section = read.get("zero_optimization")
    return isinstance(section, Mapping) and str(section.get("stage")) == "3"


# Key -> why it collides with the plugin and what to do, and which of its values do.
_COLLISIONS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "quantize_moe_experts": ("axolotl would pack the experts too; take out one of the two", bool),
    "nf4_backend": (
        "experts are packed by bitsandbytes; leave it out",
        lambda value: value == "torchao",
    ),
    "qlora_sharded_model_loading": ("it loads by code that packs no experts; leave it out", bool),
    "reinit_weights": ("a model of random weights is not loaded, so nothing is packed", bool),
    "gptq": ("a GPTQ model is packed already; take the plugin out", bool),
    "qat": ("it trains the weights that are packed and frozen; take out one of the two", bool),
    "relora": ("it merges adapters into weights that packing rounds anew; leave it out", bool),
    "tensor_parallel_size": (
        "it cannot shard packed experts; use data or context parallelism",
        lambda value: isinstance(value, int) and value > 1,
    ),
    "expert_parallel_size": (
        "it shards plain weights only; use data or context parallelism",
        lambda value: isinstance(value, int) and value > 1,
    ),
    "deepspeed": (
        "stage 3 takes weights apart before they are packed; use stage 2, or FSDP",
        lambda value: bool(value) and _is_stage_3(value),
    ),
    "fsdp_config": (
        "only the first rank gets experts; set cpu_ram_efficient_loading to false",
        lambda value: bool((value or {}).get("cpu_ram_efficient_loading")),
    ),
    "use_scattermoe": ("packed experts run on moe_qlora's own kernels; leave it out", bool),
    "use_sonicmoe": ("packed experts run on moe_qlora's own kernels; leave it out", bool),
    "experts_implementation": (
        "packed experts run through 'moe_qlora'; leave it out",
        # axolotl's kernels plugin writes "eager" by itself
        lambda value: value not in (None, "eager", "moe_qlora"),
    ),
}


def wants_packing(cfg: Mapping[str, Any]) -> bool:
    """Tell whether this run packs experts: its settings say so, and it is no merge."""
    return ExpertsSettings.read(cfg.get(BLOCK)).pack_experts and not cfg.get("merge_lora")


def check(cfg: Mapping[str, Any]) -> None:
    """Refuse a configuration that names the plugin and cannot be followed, by a `ConfigError`."""
    settings = ExpertsSettings.read(cfg.get(BLOCK))
    if not wants_packing(cfg):
        return
    if (adapter := cfg.get("adapter")) not in ("qlora", "lora"):
        seen = "is missing" if adapter is None else f"is {adapter!r}"
        raise ConfigError(
            f"adapter {seen}, and moe_qlora packs experts for LoRA: set adapter: qlora with "
            "load_in_4bit: true, or adapter: lora with load_in_8bit: true."
        )
    own, other = ("load_in_4bit", "load_in_8bit")[:: 1 if adapter == "qlora" else -1]
    if cfg.get(other) or not cfg.get(own):
        seen = f"{other} is true" if cfg.get(other) else f"{own} is not true"
        raise ConfigError(f"adapter is {adapter!r} and {seen}: set {own}: true alone.")
    for key, (why, collides) in _COLLISIONS.items():
        if collides(value := cfg.get(key)):
            seen = "set" if isinstance(value, (Mapping, list)) else shown(value)
            raise ConfigError(f"{key} is {seen} beside the plugin of moe_qlora: {why}.")
    if settings.prepare_training and cfg.get("torch_compile"):
        raise ConfigError(
            f"torch_compile is {shown(cfg.get('torch_compile'))}, and moe_qlora.prepare_training "
            "compiles the layers itself: take torch_compile out."
        )
    if settings.lora_experts and cfg.get("peft_use_dora"):
        raise ConfigError(
            "peft_use_dora is true, and moe_qlora.lora_experts asks for LoRA on packed experts, "
            "whose unpacked rows DoRA would need: take out one of the two."
        )


class ExpertsSettings(BaseModel):
    """The packing and LoRA of experts in a host; an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    # A description is of the values that are allowed.
    pack_experts: StrictBool = Field(default=True, description=_BOOL)  # while the model loads
    # LoRA on all packed experts, or on those of some roles; False: the host's target_parameters.
    lora_experts: StrictBool | Annotated[tuple[Role, ...], Field(min_length=1)] = Field(
        default=False, description=f"true, false and a list of roles ({', '.join(get_args(Role))})"
    )
    lora_router: StrictBool = Field(default=False, description=_BOOL)  # LoRA on the routers too
    # As `llm_int8_skip_modules`, besides those of the host's own config.
    skip_modules: tuple[Annotated[StrictStr, Field(min_length=1)], ...] = Field(
        default=(), description="a list of module names or patterns"
    )
    # A string is `prepare_training`'s memory, such as "40GiB"; None: a refusal is a warning.
    prepare_training: StrictBool | Annotated[StrictStr, Field(min_length=1)] | None = Field(
        default=None, description="true, false and memory such as 40GiB"
    )
    progress: StrictBool = Field(default=True, description=_BOOL)  # bars of packing and merging

    @classmethod
    def read(cls, block: ExpertsSettings | Mapping[str, Any] | None) -> ExpertsSettings:
        """Return the settings of a YAML block, or all defaults; a wrong one is a `ConfigError`."""
        if isinstance(block, ExpertsSettings):
            return block
        if block is None:
            return cls()
        fields = cls.model_fields
        if not isinstance(block, Mapping):
            raise ConfigError(
                f"{BLOCK} is {block!r}; allowed is a block with the keys {', '.join(fields)}."
            )
        try:
            settings = cls.model_validate(dict(block))
        except ValidationError as error:
            fault = error.errors()[0]
            key = str(fault["loc"][0])
            if key not in fields:
                said = f"no setting{did_you_mean(key, fields)}; allowed are {', '.join(fields)}."
            else:
                said = f"{shown(block.get(key))}; allowed are {fields[key].description}."
            raise ConfigError(f"{BLOCK}.{key} is {said}") from None
        for key in ("lora_experts", "lora_router", "skip_modules"):
            value = getattr(settings, key)
            if value and not settings.pack_experts:
                raise ConfigError(
                    f"{BLOCK}.{key} is {shown(value)}, and {BLOCK}.pack_experts is false: it is "
                    "for packed experts; take one of the two out."
                )
        return settings


def shown(value: Any) -> str:
    """Return a value as YAML writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else repr(list(value) if isinstance(value, tuple) else value)


_PLANNED = {
    "batch": "micro_batch_size", "seq": "sequence_len", "rank": "lora_r",
    "accumulation": "gradient_accumulation_steps", "optimizer": "optimizer",
    "attention": "attn_implementation",
}  # fmt: skip
_OWN_ATTENTION = ("xformers", "sage", "s2", "fp8")


def plan_arguments(cfg: Any, devices: int) -> dict[str, Any]:
    """Return the arguments of `planning.plan.plan_settings` for axolotl's validated configuration.

    A run that trains no LoRA on packed weights is a `ConfigError`.
    """

    def get(key: str) -> Any:
        value = getattr(cfg, key, None)
        return getattr(value, "value", value)  # of an enumeration

    adapter, bits = get("adapter"), 4 if get("load_in_4bit") else 8
    if adapter not in ("lora", "qlora") or not get(f"load_in_{bits}bit"):
        raise ConfigError(
            f"adapter is {shown(adapter)}, and plans are of LoRA on packed weights: set adapter: "
            "qlora with load_in_4bit: true."
        )
    names = ["all-linear"] if get("lora_target_linear") else get("lora_target_modules") or []
    if isinstance(names, str):
        raise ConfigError(
            f"lora_target_modules is the pattern {names!r:.80}, and plans take a list of names."
        )
    block = ExpertsSettings.read(get(BLOCK))
    experts = ["experts"] * bool(block.lora_experts or get("lora_target_parameters"))
    quantization: dict[str, Any] = {"load_in_8bit": True}
    if bits == 4:  # axolotl's defaults
        quantization = {"load_in_4bit": True, "bnb_4bit_quant_type": NF4.kind}
        quantization |= {"bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "bfloat16"}
        quantization |= get("bnb_config_kwargs") or {}
    asked = {mine: get(theirs) for mine, theirs in _PLANNED.items()}
    asked["targets"] = ",".join([*map(str, names), *experts]) or None
    asked["checkpointing"] = bool(get("gradient_checkpointing"))
    asked["prepared"] = bool(get("liger_fused_linear_cross_entropy") or block.prepare_training)
    if asked["attention"] in _OWN_ATTENTION:
        asked["attention"] = None
    return {
        "model": get("base_model"),
        "quantization_config": quantization,
        "asked": {name: value for name, value in asked.items() if value is not None},
        "engine": ("fsdp" if get("fsdp_config") else "ddp") if devices > 1 else None,
        "trust_remote_code": bool(get("trust_remote_code")),
    }
