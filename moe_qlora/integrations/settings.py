"""The `moe_qlora:` block of a host's file, and what axolotl's settings must be beside it."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, StrictBool, ValidationError, model_validator

from ..errors import ConfigError
from ..models.files import read_json
from ..packing.bnb4bit import NF4

PLUGIN = "moe_qlora.integrations.axolotl.MoeQloraPlugin"
BLOCK = "moe_qlora"
Word = Annotated[str, Field(strict=True, min_length=1)]
Role = Literal["gate_up", "gate", "up", "down"]


class ExpertsSettings(BaseModel, extra="forbid", frozen=True):
    """The packing and LoRA of experts in a host; an unknown key is an error."""

    pack_experts: StrictBool = True  # while the model loads
    # LoRA on all packed experts, or on those of some roles; False: the host's target_parameters.
    lora_experts: StrictBool | Annotated[tuple[Role, ...], Field(min_length=1)] = False
    lora_router: StrictBool = False  # LoRA on the routers too
    skip_modules: tuple[Word, ...] = ()  # besides the host's own llm_int8_skip_modules
    # A string is `prepare_training`'s memory, such as "40GiB"; None: a refusal is a warning.
    prepare_training: StrictBool | Word | None = None
    progress: StrictBool = True  # bars of packing and merging

    @model_validator(mode="after")
    def _packed(self) -> Self:
        if not self.pack_experts and (self.lora_experts or self.lora_router or self.skip_modules):
            raise ValueError(
                "pack_experts is false, and lora_experts, lora_router and skip_modules are for "
                "packed experts: take them out"
            )
        return self

    @classmethod
    def read(cls, block: Self | Mapping[str, Any] | None) -> Self:
        """Return the settings of a YAML block, or all defaults; a wrong one is a `ConfigError`."""
        given: Any = dict(block or {}) if isinstance(block, Mapping | None) else block
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            fault, *_ = faults = error.errors()
            where = f"{BLOCK}.{fault['loc'][0]} is {fault['input']!r}" if fault["loc"] else BLOCK
            said = " or ".join(dict.fromkeys(each["msg"] for each in faults))
            known = ", ".join(cls.model_fields)
            raise ConfigError(f"{where}: {said}; the keys of {BLOCK} are {known}.") from None


def is_named(cfg: Mapping[str, Any]) -> bool:
    """Tell whether a file names this package's plugin."""
    named = cfg.get("plugins") or ()
    listed = named if isinstance(named, (list, tuple)) else (named,)
    return PLUGIN in (str(name).replace(":", ".") for name in listed)


def wants_packing(cfg: Mapping[str, Any]) -> bool:
    """Tell whether this run packs experts: its settings say so, and it is no merge."""
    return ExpertsSettings.read(cfg.get(BLOCK)).pack_experts and not cfg.get("merge_lora")


# Keys of axolotl that collide with the plugin -> why, and what to do.
_REFUSED = {
    "quantize_moe_experts": "axolotl would pack the experts too; take out one of the two",
    "nf4_backend": "experts are packed by bitsandbytes; leave it out",
    "qlora_sharded_model_loading": "it loads by code that packs no experts; leave it out",
    "reinit_weights": "a model of random weights is not loaded, so nothing is packed",
    "gptq": "a GPTQ model is packed already; take the plugin out",
    "qat": "it trains the weights that are packed and frozen; take out one of the two",
    "relora": "it merges adapters into weights that packing rounds anew; leave it out",
    "tensor_parallel_size": "it cannot shard packed experts; use data or context parallelism",
    "expert_parallel_size": "it shards plain weights only; use data or context parallelism",
    "deepspeed": "stage 3 takes weights apart before they are packed; use stage 2, or FSDP",
    "fsdp_config": "only the first rank gets experts; set cpu_ram_efficient_loading to false",
    "use_scattermoe": "packed experts run on moe_qlora's own kernels; leave it out",
    "use_sonicmoe": "packed experts run on moe_qlora's own kernels; leave it out",
    "experts_implementation": "packed experts run through 'moe_qlora'; leave it out",
}


def _collides(key: str, value: Any) -> bool:
    if key == "nf4_backend":
        return bool(value == "torchao")
    if key.endswith("_parallel_size"):
        return isinstance(value, int) and value > 1
    if key == "fsdp_config":
        return bool((value or {}).get("cpu_ram_efficient_loading"))
    if key == "experts_implementation":  # axolotl's kernels plugin writes "eager" by itself
        return value not in (None, "eager", "moe_qlora")
    if key != "deepspeed" or not value:
        return bool(value)
    if not isinstance(value, Mapping) and not Path(value).is_file():  # the name tells
        return "zero3" in re.sub("[-_]|stage", "", str(value).lower())
    fields = value if isinstance(value, Mapping) else read_json(Path(value))
    section = fields.get("zero_optimization")
    return isinstance(section, Mapping) and str(section.get("stage")) == "3"


def check(cfg: Mapping[str, Any]) -> None:
    """Refuse a configuration that names the plugin and cannot be followed, by a `ConfigError`."""
    settings = ExpertsSettings.read(cfg.get(BLOCK))
    if not wants_packing(cfg):
        return
    if (adapter := cfg.get("adapter")) not in ("qlora", "lora"):
        raise ConfigError(
            f"adapter is {adapter!r}, and moe_qlora packs experts for LoRA: set adapter: qlora "
            "with load_in_4bit: true, or adapter: lora with load_in_8bit: true."
        )
    own, other = ("load_in_4bit", "load_in_8bit")[:: 1 if adapter == "qlora" else -1]
    if cfg.get(other) or not cfg.get(own):
        seen = f"{other} is true" if cfg.get(other) else f"{own} is not true"
        raise ConfigError(f"adapter is {adapter!r} and {seen}: set {own}: true alone.")
    for key, why in _REFUSED.items():
        if _collides(key, cfg.get(key)):
            raise ConfigError(f"{key} is set beside the plugin of moe_qlora: {why}.")
    if settings.prepare_training and cfg.get("torch_compile"):
        raise ConfigError("torch_compile is set, and prepare_training compiles too: take it out.")
    if settings.lora_experts and cfg.get("peft_use_dora"):
        words = "moe_qlora.lora_experts trains packed experts, which DoRA cannot"
        raise ConfigError(f"peft_use_dora is true, and {words}: take out one of the two.")


_PLANNED = {
    "batch": "micro_batch_size", "seq": "sequence_len", "rank": "lora_r",
    "accumulation": "gradient_accumulation_steps", "optimizer": "optimizer",
    "attention": "attn_implementation",
}  # fmt: skip


def plan_arguments(cfg: Any, devices: int) -> dict[str, Any]:
    """Return the arguments of `plan_settings` for axolotl's validated configuration."""

    def get(key: str) -> Any:
        value = getattr(cfg, key, None)
        return getattr(value, "value", value)  # of an enumeration

    adapter, bits = get("adapter"), 4 if get("load_in_4bit") else 8
    if adapter not in ("lora", "qlora") or not get(f"load_in_{bits}bit"):
        raise ConfigError(
            f"adapter is {adapter!r}, and plans are of LoRA on packed weights: set adapter: qlora "
            "with load_in_4bit: true."
        )
    names: Any = get("lora_target_modules") or []
    names = ["all-linear"] if get("lora_target_linear") else names
    if isinstance(names, str):
        raise ConfigError(f"lora_target_modules is {names!r:.80}, and plans take a list of names.")
    block = ExpertsSettings.read(get(BLOCK))
    experts = ["experts"] * bool(block.lora_experts or get("lora_target_parameters"))
    quantization: dict[str, Any] = {"load_in_8bit": True}
    if bits == 4:  # axolotl's defaults
        quantization = {"load_in_4bit": True, "bnb_4bit_quant_type": NF4.kind}
        quantization |= {"bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "bfloat16"}
        quantization |= get("bnb_config_kwargs") or {}
    asked = {mine: get(theirs) for mine, theirs in _PLANNED.items()}
    if asked["attention"] in ("xformers", "sage", "s2", "fp8"):  # axolotl's own kernels
        asked["attention"] = None
    asked["targets"] = ",".join([*map(str, names), *experts]) or None
    asked["checkpointing"] = bool(get("gradient_checkpointing"))
    asked["prepared"] = bool(get("liger_fused_linear_cross_entropy") or block.prepare_training)
    return {
        "model": get("base_model"),
        "quantization_config": quantization,
        "asked": {name: value for name, value in asked.items() if value is not None},
        "engine": ("fsdp" if get("fsdp_config") else "ddp") if devices > 1 else None,
        "trust_remote_code": bool(get("trust_remote_code")),
    }
