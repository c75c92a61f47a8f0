"""The training step of a file: sizes, precision, optimizer, attention and engine."""

from __future__ import annotations

from typing import Any

from .checks import plugins_of
from .file import DEFAULT, AskedEngine, Reader, zero_stage

_LIGER = "axolotl.integrations.liger.LigerPlugin"
_LIGER_LOSS = "liger_fused_linear_cross_entropy"
_CUT_LOSS = "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"
LIGER_KEYS = (
    *("liger_rope", "liger_rms_norm", "liger_rms_norm_gated", "liger_layer_norm", "liger_swiglu"),
    *("liger_glu_activation", "liger_cross_entropy", "liger_fused_linear_cross_entropy"),
)

# axolotl's keys for attention before attn_implementation; the first that is set decides.
_ATTENTION = {
    "xformers_attention": "xformers",
    "sage_attention": "sage",
    "flex_attention": "flex_attention",
    "flash_attention": "flash_attention_2",
    "sdp_attention": "sdpa",
    "eager_attention": "eager",
}
_OWN_ATTENTION = ("xformers", "sage", "fp8", "varlen")  # axolotl's, which transformers has not

# Optimizer of a file -> that of a plan, with states of the same size.
_OPTIMIZERS = {
    **dict.fromkeys(
        (
            *("adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_torch_npu_fused"),
            *("optimi_adamw", "adopt_adamw", "adamc", "stable_adamw", "schedule_free_adamw"),
            *("schedule_free_radam", "adamw"),
        ),
        "adamw",
    ),
    **dict.fromkeys(
        ("adamw_8bit", "adamw_bnb_8bit", "adamw_torch_8bit", "ao_adamw_8bit", "ao_adamw_fp8"),
        "adamw_8bit",
    ),
    "paged_adamw_32bit": "paged_adamw",
    "paged_adamw": "paged_adamw",
    "paged_adamw_8bit": "paged_adamw_8bit",
}
# The same with the smallest one that is larger.
_SMALLER = {
    **dict.fromkeys(("adamw_torch_4bit", "ao_adamw_4bit", "lion_8bit"), "adamw_8bit"),
    **dict.fromkeys(("rmsprop_bnb_8bit",), "adamw_8bit"),
    **dict.fromkeys(("paged_lion_8bit",), "paged_adamw_8bit"),
    **dict.fromkeys(("paged_lion_32bit",), "paged_adamw"),
    **dict.fromkeys(
        (
            *("sgd", "adagrad", "rmsprop", "rmsprop_bnb", "rmsprop_bnb_32bit", "lion_32bit"),
            *("adafactor", "schedule_free_sgd"),
        ),
        "adamw",
    ),
}

# Keys that decide memory and that no plan counts, where they are set and not false.
_UNPLANNED = (
    *("activation_offloading", "layer_offloading", "selective_checkpointing", "tiled_mlp"),
    *("chunked_cross_entropy", "flash_attn_cross_entropy", "rl", "reward_model"),
    *("process_reward_model", "kd_trainer", "diffusion", "diffusion_lm", "ebft", "mora"),
    *("unfrozen_parameters", "auto_find_batch_size", "max_memory", "gpu_memory_limit"),
    *("fp8", "fp32_norms", "qat", "relora", "lisa_n_layers", "spectrum_top_fraction"),
    *("ple_cpu_offload", "lora_on_cpu", "qlora_sharded_model_loading", "reinit_weights", "gptq"),
    *("llama4_linearized_experts", "use_onebitllms", "flash_optimum", "model_kwargs"),
    *("overrides_of_model_kwargs", "use_scattermoe", "use_sonicmoe", "dense_mixer"),
    *("experts_implementation", "expert_backend"),
)
_PARALLEL = (
    *("tensor_parallel_size", "context_parallel_size", "sequence_parallel_degree"),
    "expert_parallel_size",
)

KEYS = (
    *("sequence_len", "micro_batch_size", "gradient_accumulation_steps", "batch_size", "optimizer"),
    *("bf16", "fp16", "bfloat16", "float16", "float32", "peft_autocast_adapter_dtype"),
    *("gradient_checkpointing", "attn_implementation", "torch_compile", "cut_cross_entropy"),
    *("fsdp_config", "fsdp_version", "deepspeed", "dp_shard_size", "dp_replicate_size"),
    *("device_map", "world_size", "ddp", "eval_batch_size", "eval_sequence_len", "sample_packing"),
    *("embeddings_skip_upcast", *_ATTENTION, *LIGER_KEYS, *_UNPLANNED, *_PARALLEL),
)
"""The keys that are read here."""


def read_sizes(reader: Reader) -> None:
    """Read tokens and sequences of a micro-batch, and micro-batches of a step."""
    seq, batch = reader.number("sequence_len", 512), reader.number("micro_batch_size", 1)
    reader.ask("seq", seq, "sequence_len")
    reader.ask("batch", batch, "micro_batch_size")
    whole = reader.number("batch_size")
    if whole and reader.get("gradient_accumulation_steps") is None:
        reader.ask("accumulation", max(1, whole // (batch or 1)), "batch_size")
    else:
        steps = reader.number("gradient_accumulation_steps", 1)
        reader.ask("accumulation", steps, "gradient_accumulation_steps")
    evaluated = (reader.number("eval_batch_size") or batch or 1) * (
        reader.number("eval_sequence_len") or seq or 1
    )
    if evaluated > (batch or 1) * (seq or 1):
        key = "eval_batch_size" if reader.get("eval_batch_size") else "eval_sequence_len"
        reader.unplanned.append(f"{key} (evaluation takes more tokens at once than training)")


def read_dtype(reader: Reader) -> Any:
    """Return the `torch.dtype` that the model is loaded in, on a GPU that has bfloat16."""
    import torch

    fp16 = reader.flag("fp16")
    half = reader.get("bf16", "auto")
    brain = not fp16 if half == "auto" else bool(half)  # "full" is yes too
    if brain or reader.flag("bfloat16"):
        dtype = torch.bfloat16
    elif fp16 or reader.flag("float16") or reader.flag("load_in_8bit"):
        dtype = torch.float16
    else:
        dtype = torch.float32
    reader.ask("dtype", dtype, "bf16 / fp16 / bfloat16 / float16")
    kept = reader.get("peft_autocast_adapter_dtype")
    adapters = dtype if kept is False else torch.float32
    reader.ask("adapter_dtype", str(adapters).partition(".")[2], "peft_autocast_adapter_dtype")
    return dtype


def read_optimizer(reader: Reader) -> None:
    """Read the optimizer, as a plan has it."""
    name = str(reader.get("optimizer", "adamw_torch_fused"))
    planned = _OPTIMIZERS.get(name) or _SMALLER.get(name) or "adamw"
    if name in _SMALLER:
        reader.unplanned.append(f"optimizer {name} (planned as {planned}, whose states are larger)")
    elif name not in _OPTIMIZERS:
        reader.unplanned.append(f"optimizer {name:.40} (planned as adamw)")
    reader.ask("optimizer", planned, "optimizer")


def read_layers(reader: Reader) -> None:
    """Read checkpointing, attention and fused kernels."""
    kept = reader.get("gradient_checkpointing", False)
    on, key = bool(kept), "gradient_checkpointing"
    if isinstance(kept, str):
        on = kept.lower() not in ("false", "no")
        if kept not in ("true", "True", "false", "False"):
            reader.unplanned.append(f"{key} {kept!r:.40} (planned as true)")
    fsdp = fsdp_settings(reader)
    if not on and fsdp.get("activation_checkpointing"):
        on, key = True, "fsdp_config"
    reader.ask("checkpointing", on, key)
    _read_attention(reader)
    plugins = plugins_of(reader.cfg)
    liger = [name for name in LIGER_KEYS if reader.flag(name)]
    if liger and _LIGER not in plugins:
        reader.notes.append(f"axolotl reads {', '.join(liger)} only where plugins names {_LIGER}.")
    elif _LIGER_LOSS in liger:
        reader.ask("liger", True, _LIGER_LOSS)
    if _LIGER in plugins:
        reader.unplanned += [name for name in liger if name != _LIGER_LOSS]
    cut = _CUT_LOSS in plugins and (reader.get("cut_cross_entropy", True) is True)
    if cut:
        reader.unplanned.append("cut_cross_entropy")
    if reader.get("torch_compile"):
        reader.ask("compile", True, "torch_compile")


def _read_attention(reader: Reader) -> None:
    asked, key = reader.get("attn_implementation"), "attn_implementation"
    if asked is None:
        set_keys = (name for name in _ATTENTION if reader.flag(name))
        key = next(set_keys, key)
        asked = _ATTENTION.get(key)
    if asked is None:
        return
    if not isinstance(asked, str):
        reader.faults.append(f"attn_implementation is {asked!r:.80}; give a name.")
    elif asked in _OWN_ATTENTION:
        reader.unplanned.append(f"{key} {asked} (planned as transformers' choice)")
    else:
        reader.ask("attention", asked, key)


def fsdp_settings(reader: Reader) -> dict[str, Any]:
    """Return the settings of `fsdp_config`, without the prefix that they may have."""
    found = reader.block("fsdp_config")
    return {str(key).removeprefix("fsdp_"): value for key, value in found.items()}


def read_engine(reader: Reader) -> AskedEngine:
    """Return how the run is spread over GPUs, and note what of that is not planned."""
    for key in _PARALLEL:
        if (reader.number(key) or 1) > 1:
            reader.unplanned.append(f"{key} {reader.get(key)}")
    replicas, shards = map(reader.number, ("dp_replicate_size", "dp_shard_size"))
    world = reader.number("world_size")
    fsdp = fsdp_settings(reader)
    if reader.get("fsdp"):
        reader.faults.append("fsdp is a list for FSDP1, which axolotl refuses: use fsdp_config.")
    if fsdp and reader.get("deepspeed"):
        reader.faults.append(
            "fsdp_config and deepspeed are both set, which axolotl refuses: take one of them out."
        )
    if fsdp:
        _read_fsdp(reader, fsdp)
        if shards is None and world is not None:
            shards = world // (replicas or 1)
        key = "dp_shard_size" if shards else "fsdp_config"
        return AskedEngine("fsdp", key, shards, replicas or 1)
    if reader.get("deepspeed"):
        return _read_deepspeed(reader, world)
    if reader.get("device_map") is not None:
        return AskedEngine(None, "device_map")
    return AskedEngine("ddp", "world_size" if world else DEFAULT, world)


def _read_fsdp(reader: Reader, fsdp: dict[str, Any]) -> None:
    versions = (
        reader.get("fsdp_version"),
        fsdp.get("version"),
        reader.block("fsdp_config").get("fsdp_version"),
    )
    old = next((version for version in versions if version not in (None, 2, "2")), None)
    if old is not None or "sharding_strategy" in fsdp or "forward_prefetch" in fsdp:
        reader.faults.append(
            "fsdp_config is for FSDP1, which axolotl refuses: set fsdp_version: 2, and take "
            "sharding_strategy and forward_prefetch out."
        )
    if reader.get("optimizer") in ("adamw_8bit", "adamw_bnb_8bit"):
        reader.faults.append(
            f"optimizer is {reader.get('optimizer')!r} beside fsdp_config, which axolotl refuses: "
            "set optimizer: adamw_torch_8bit."
        )
    if fsdp.get("offload_params"):
        reader.unplanned.append("fsdp_config.offload_params")
    if fsdp.get("reshard_after_forward") is False:
        reader.unplanned.append("fsdp_config.reshard_after_forward false")
    if fsdp.get("auto_wrap_policy") == "SIZE_BASED_WRAP":
        reader.unplanned.append("fsdp_config.auto_wrap_policy SIZE_BASED_WRAP (planned by layers)")
    cut = _CUT_LOSS in plugins_of(reader.cfg)
    if reader.get("adapter") == "qlora" and not cut and not reader.flag("embeddings_skip_upcast"):
        reader.unplanned.append(
            "embeddings in float32, as axolotl keeps them under FSDP without "
            "embeddings_skip_upcast: true"
        )


def _read_deepspeed(reader: Reader, world: int | None) -> AskedEngine:
    value = reader.get("deepspeed")
    stage = zero_stage(reader.zero or value)
    if reader.zero is None:
        by_name = "which does not say its stage" if stage is None else f"taken for stage {stage}"
        reader.notes.append(f"deepspeed: {value!s:.80} is not here, {by_name} by its name.")
    if stage is None:
        reader.unplanned.append("deepspeed")
    found = reader.zero or {}
    section = found.get("zero_optimization")
    section = section if isinstance(section, dict) else {}
    for name in ("offload_param", "offload_optimizer"):
        device = section.get(name)
        device = device.get("device") if isinstance(device, dict) else device
        if device not in (None, False, "none"):
            reader.unplanned.append(f"deepspeed: {name} to {device!s:.20}")
    if stage != 3:
        if stage in (1, 2):
            reader.notes.append(
                f"ZeRO stage {stage} is planned as DDP: gradients and optimizer states, which it "
                "shares out among ranks, are counted whole."
            )
        return AskedEngine("ddp", "deepspeed", world)
    half = found.get("bf16")
    if isinstance(half, dict) and half.get("enabled") in (True, "auto"):
        # DeepSpeed casts the adapters, and keeps its own copies in float32.
        dtype = str(reader.settings["dtype"].value).partition(".")[2]
        reader.ask("adapter_dtype", dtype, "deepspeed")
    return AskedEngine("zero3", "deepspeed", world)


def read_rest(reader: Reader) -> None:
    """Note every other key that decides memory and that no plan counts."""
    for key in _UNPLANNED:
        value = reader.get(key)
        if value not in (None, False, [], {}, "", "eager"):
            plain = isinstance(value, (str, int, float)) and not isinstance(value, bool)
            reader.unplanned.append(f"{key} {value!s:.40}" if plain else key)
