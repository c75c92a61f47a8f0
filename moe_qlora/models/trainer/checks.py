"""Refuses axolotl files whose settings do not work together, before anything is loaded.

`AXOLOTL` has the names of the fields of axolotl's schema and of its own plugins (0.21.0), and those
that it refuses with a message of its own. It ignores any other key without a word, so that a
misspelt one is worth a sentence.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictStr, ValidationError

from ...errors import ConfigError, did_you_mean
from .file import zero_stage

PLUGIN = "moe_qlora.integrations.axolotl.MoeQloraPlugin"
VERSION = "axolotl 0.21.0"

_NAMES = """
    accelerator_config activation_offloading adam_beta1 adam_beta2 adam_beta3 adam_epsilon
    adam_epsilon2 adapter added_tokens_overrides attn_implementation auto_find_batch_size
    auto_resume_from_checkpoints autotune_cache_path autotune_neighborhood autotune_profiles
    axolotl_config_path balance_labels base_model base_model_config batch_flattening batch_size
    bench_dataset bench_split bf16 bfloat16 bnb_config_kwargs capabilities
    center_rewards_coefficient chat_template chat_template_jinja chat_template_kwargs
    chunked_cross_entropy chunked_cross_entropy_num_chunks cls_model_config comet_api_key
    comet_experiment_config comet_experiment_key comet_mode comet_online comet_project_name
    comet_workspace context_parallel context_parallel_size coreweave cosine_constant_lr_ratio
    cosine_min_lr_ratio cpo_alpha curriculum_sampling cut_cross_entropy
    cut_cross_entropy_accum_c_fp32 cut_cross_entropy_c_grad_chunk_size dataloader_drop_last
    dataloader_num_workers dataloader_pin_memory dataloader_prefetch_factor
    dataset_exact_deduplication dataset_keep_in_memory dataset_num_proc dataset_prepared_path
    dataset_processes dataset_shard_idx dataset_shard_num datasets ddp ddp_broadcast_buffers
    ddp_bucket_cap_mb ddp_find_unused_parameters ddp_timeout deepcompile deepspeed
    default_system_message dense_mixer device device_map diffusion diffusion_decision
    diffusion_lm dion_lr dion_momentum dion_rank_fraction dion_rank_multiple_of do_bench_eval
    do_causal_lm_eval dp_replicate_size dp_shard_size dpo_beta dpo_generate_during_eval
    dpo_label_smoothing dpo_ld_alpha dpo_loss_type dpo_loss_weights dpo_norm_loss
    dpo_padding_free dpo_use_liger_kernel dpo_use_logits_to_keep dpo_use_weighting dsv4_bf16_all
    dsv4_fp4_grouped_mode dsv4_fp8_lora_kernel dsv4_fp8_nonexpert_mode
    dsv4_shared_mlp_lora_kernel dynamic_checkpoint eaft_alpha eaft_k eager_attention
    early_stopping_patience ebft embedding_lr embedding_lr_scale embeddings_skip_upcast
    env_capabilities eot_tokens eval_batch_size eval_causal_lm_metrics eval_max_new_tokens
    eval_on_start eval_sample_packing eval_sequence_len eval_steps eval_strategy eval_table_size
    evals_per_epoch evaluation_strategy excess_length_strategy experimental_skip_move_to_device
    expert_backend expert_parallel_backend expert_parallel_dispatch_chunks
    expert_parallel_fallback_on_unsupported expert_parallel_num_nvl_bytes
    expert_parallel_num_rdma_bytes expert_parallel_save_dispatch expert_parallel_size
    expert_parallel_token_capacity experts_implementation export fa_varlen_kwargs_in_collator
    fix_untrained_tokens flash_attention flash_attn_cross_entropy flash_attn_d512
    flash_attn_fuse_mlp flash_attn_rms_norm flash_optimum flex_attention
    flex_attn_compile_kwargs float16 float32 fp16 fp32_norm_classes fp32_norms fp8 fp8_config
    fp8_enable_fsdp_float8_all_gather freeze_mm_modules fsdp fsdp_config
    fsdp_final_state_dict_type fsdp_version full_determinism fused_attn_kernel gc_collect_steps
    gc_steps gemma4_fp8_nonexpert gemma4_hybrid_attn_impl gemma4_nf4_nonexpert generate_samples
    generation_do_sample generation_max_new_tokens generation_prompt_ratio
    generation_temperature generation_top_k generation_top_p gptq gpu_memory_limit
    gradient_accumulation_steps gradient_checkpointing gradient_checkpointing_kwargs
    gradio_max_new_tokens gradio_server_name gradio_server_port gradio_share gradio_temperature
    gradio_title greater_is_better grokfast_alpha grokfast_lamb group_by_length hatchery
    heads_k_stride hf_mlflow_log_artifacts hf_use_auth_token hub_model_id hub_revision
    hub_strategy image_resize_algorithm image_size include_tkps include_tokens_per_second
    is_falcon_derived_model is_llama_derived_model is_mistral_derived_model is_preprocess
    is_qwen_derived_model jagged_restart_anneal_steps jagged_restart_steps
    jagged_restart_warmup_steps kd_alpha kd_beta kd_ce_alpha kd_normalize_topk kd_online_server
    kd_online_server_base_url kd_online_timeout kd_online_topk kd_temperature kd_temperature_min
    kd_trainer kto_desirable_weight kto_undesirable_weight label_balance_window_optim_steps
    large_head_attention layer_offloading learning_rate liger_cross_entropy
    liger_fused_linear_cross_entropy liger_glu_activation liger_kernel_impl liger_layer_norm
    liger_rms_norm liger_rms_norm_gated liger_rope liger_swiglu liger_use_token_scaling
    lisa_layers_attribute lisa_n_layers lisa_step_interval llama4_linearized_experts
    llmcompressor lm_eval_batch_size lm_eval_model lm_eval_post_train lm_eval_tasks
    load_best_model_at_end load_in_4bit load_in_8bit local_rank logging_nan_inf_filter
    logging_steps lora_alpha lora_alpha_pattern lora_dropout lora_embedding_kernel
    lora_fan_in_fan_out lora_fp32_gradients lora_mlp_kernel lora_model_dir lora_modules_to_save
    lora_o_kernel lora_on_cpu lora_qkv_kernel lora_r lora_rank_pattern lora_target_linear
    lora_target_modules lora_target_parameters loraplus_lr_embedding loraplus_lr_ratio
    loss_watchdog_patience loss_watchdog_threshold low_cpu_mem_usage lr_div_factor lr_groups
    lr_quadratic_warmup lr_scheduler lr_scheduler_kwargs max_grad_norm max_memory
    max_packed_sequence_len max_prompt_len max_steps mean_resizing_embeddings merge_lora
    merge_method metric_for_best_model micro_batch_size min_sample_len mixlora_expert_lora_alpha
    mixlora_expert_lora_dropout mixlora_expert_lora_r mixlora_jitter_noise mixlora_num_experts
    mixlora_router_aux_loss_coef mixlora_router_init_range mixlora_top_k mlflow_experiment_name
    mlflow_run_name mlflow_tracking_uri model_config model_kwargs model_quantization_config
    model_quantization_config_kwargs model_revision model_type moe_bnb_fast
    moe_dequant_chunk_size moe_grouped_backend mora multipack_real_batches neftune_noise_alpha
    nemo_gym_auto_clone nemo_gym_auto_start nemo_gym_config_paths nemo_gym_datasets nemo_gym_dir
    nemo_gym_enabled nemo_gym_head_port nemo_gym_max_turns nemo_gym_model_name
    nemo_gym_multi_turn nemo_gym_run_timeout nemo_gym_server_timeout nemo_gym_verify_timeout
    nf4_backend noisy_embedding_alpha nonexpert_quantization num_dataset_shards_to_save
    num_epochs num_generation_samples num_labels nvfp4_merge_aware nvfp4_merge_aware_start_step
    optim_args optim_target_modules optimizer orpo_alpha otel_metrics_host otel_metrics_port
    output_dir overrides_of_model_config overrides_of_model_kwargs pad_to_multiple_of
    pad_to_sequence_len peft peft_autocast_adapter_dtype peft_ensure_weight_tying
    peft_init_lora_weights peft_layer_replication peft_layers_pattern peft_layers_to_transform
    peft_trainable_token_indices peft_use_dora peft_use_rslora ple_cpu_offload plugins
    pose_max_context_len pose_num_chunks pose_split_on_token_ids precompute_ref_log_probs
    preprocess_iterable pretrain_multipack_attn pretrain_multipack_buffer_size
    pretraining_dataset pretraining_sample_concatenation process_reward_model processor_kwargs
    processor_type profiler_steps profiler_steps_start push_dataset_to_hub qat
    qgalore_cos_threshold qgalore_gamma_proj qgalore_proj_bits qgalore_proj_group_size
    qgalore_proj_quant qgalore_proj_type qgalore_queue_size qgalore_rank qgalore_scale
    qgalore_update_proj_gap qlora_sharded_model_loading quantization quantize_moe_experts
    ray_num_workers ray_run_name recipe reinit_weights relora relora_cpu_offload
    relora_prune_method relora_prune_ratio relora_steps remove_unused_columns
    resize_token_embeddings_to_32x resources_per_worker resume_from_checkpoint revision_of_model
    reward_model ring_attn_func rl rl_beta role_boundaries rope_scaling rpo_alpha s2_attention
    sage_attention sample_packing sample_packing_bin_size sample_packing_eff_est
    sample_packing_group_size sample_packing_mp_start_method sample_packing_sequentially
    save_compressed save_first_step save_only_model save_safetensors save_steps save_strategy
    save_total_limit saves_per_epoch scaling_softmax scaling_softmax_bias scaling_softmax_factor
    sdp_attention sdpa_varlen seed selective_checkpointing sequence_len sequence_parallel_degree
    shrink_embeddings shuffle_before_merging_datasets shuffle_merged_datasets simpo_gamma
    skip_prepare_dataset special_tokens spectrum_model_name spectrum_top_fraction streaming
    streaming_multipack_buffer_size strict swanlab_api_host swanlab_api_key
    swanlab_completion_log_interval swanlab_completion_max_buffer swanlab_description
    swanlab_experiment_name swanlab_lark_secret swanlab_lark_webhook_url swanlab_log_completions
    swanlab_log_model swanlab_mode swanlab_project swanlab_web_host swanlab_workspace
    sync_profiler_start_step sync_profiler_steps tensor_parallel_size test_datasets tf32
    tiled_mlp tiled_mlp_num_shards tiled_mlp_use_original_mlp tokenizer_config tokenizer_legacy
    tokenizer_save_jinja_files tokenizer_type tokenizer_use_fast tokenizer_use_mistral_common
    tokens torch_compile torch_compile_backend torch_compile_mode torch_compile_options
    torch_compile_regional torch_empty_cache_steps torchdistx_path total_num_tokens
    total_supervised_tokens trackio_project_name trackio_run_name trackio_space_id
    train_on_inputs trainer_cls trl trust_remote_code type_of_model unfrozen_parameters
    unsloth_cross_entropy_loss unsloth_lora_mlp unsloth_lora_o unsloth_lora_qkv unsloth_rms_norm
    unsloth_rope use_comet use_dft use_dsv4_kernels use_eaft use_glm_dsa_kernels use_kernels
    use_mlflow use_onebitllms use_otel_metrics use_pose use_ray use_scattermoe use_sonicmoe
    use_swanlab use_tensorboard use_trackio use_wandb val_set_size vllm wandb_entity
    wandb_log_model wandb_mode wandb_name wandb_project wandb_run_id wandb_watch warmup_ratio
    warmup_steps weight_decay world_size xformers_attention
    """
AXOLOTL = frozenset(_NAMES.split())

FSDP = (
    *("fsdp_version", "activation_checkpointing", "offload_params", "cpu_ram_efficient_loading"),
    *("cpu_offload_pin_memory", "state_dict_type", "final_state_dict_type", "auto_wrap_policy"),
    *("transformer_layer_cls_to_wrap", "min_num_params", "reshard_after_forward"),
    *("mixed_precision_policy", "version"),
    # of FSDP1, which axolotl refuses or leaves out
    *("sharding_strategy", "forward_prefetch", "sync_module_states", "backward_prefetch"),
    *("backward_prefetch_policy", "limit_all_gathers", "use_orig_params"),
)
"""Keys of `fsdp_config`, each with or without the prefix `fsdp_`."""

BNB = (
    *("load_in_4bit", "load_in_8bit", "llm_int8_threshold", "llm_int8_skip_modules"),
    *("llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight", "bnb_4bit_compute_dtype"),
    *("bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "bnb_4bit_quant_storage", "blocksize"),
)
"""Keys of `bnb_config_kwargs`: the arguments of a `BitsAndBytesConfig`."""

_ALIKE = 0.75  # how near a word must be to be taken for a misspelt key
BLOCK = "moe_qlora"

Role = Literal["gate_up", "gate", "up", "down", "expert"]  # those of layout.py

_ROLES = ", ".join(get_args(Role))
_ALLOWED = {
    "pack_experts": "true and false",
    "lora_experts": f"true, false and a list of roles ({_ROLES})",
    "lora_router": "true and false",
    "skip_modules": "a list of module names or patterns",
    "prepare_training": "true, false and memory such as 40GiB",
    "progress": "true and false",
}


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


def misspelt(cfg: Mapping[str, Any], read: Collection[str]) -> tuple[list[str], list[str]]:
    """Look for keys that axolotl does not have.

    `read` are the keys that decide a plan.

    Returns:
        Sentences about keys that were meant to be ours, or one of `read`; and one sentence about
        any others, if there are some.
    """
    faults, unknown = [], []
    plugins = plugins_of(cfg)
    own = {BLOCK, *ExpertsSettings.model_fields} - {"progress"}  # which is anybody's word
    foreign = any(not name.startswith(("axolotl.", "moe_qlora.")) for name in plugins)
    for key in map(str, cfg):
        if key in AXOLOTL or key == BLOCK or key == "lora_exclude_modules":
            continue
        if ours := _near(key, own):
            where = "" if ours == BLOCK else f" of the block {BLOCK}"
            seen = f"{key} is no key of this file" if key != ours else f"{key} is at the top level"
            hint = f" (did you mean {ours}{where}?)" if key != ours else ""
            does = (
                f"write {BLOCK}: and its settings under it"
                if ours == BLOCK
                else f"write {BLOCK}: {{{ours}: ...}}"
            )
            faults.append(f"{seen}{hint}, where axolotl ignores it: {does}.")
        elif not foreign and (near := _near(key, read)):
            faults.append(
                f"{key} is no key of {VERSION} (did you mean {near}?), which ignores it: correct "
                "it or take it out."
            )
        else:
            unknown.append(f"{key}{did_you_mean(key, AXOLOTL)}")
    faults += _within(cfg, "fsdp_config", FSDP, "fsdp_")
    faults += _within(cfg, "bnb_config_kwargs", BNB, "")
    faults += [
        f"plugins names {name} (did you mean {PLUGIN}?), which this package does not have."
        for name in plugins
        if name != PLUGIN and (name.startswith("moe_qlora") or get_close_matches(name, [PLUGIN]))
    ]
    if not unknown:
        return faults, []
    which = "is no key" if len(unknown) == 1 else "are no keys"
    said = f"{', '.join(unknown)} {which} of {VERSION}, and left out here; a plugin may read it."
    return faults, [said]


def _near(key: str, known: Collection[str]) -> str | None:
    """Return the known key that this one was meant to be, if any."""
    plain = {_plain(each): each for each in known}
    found = get_close_matches(_plain(key), plain, n=1, cutoff=_ALIKE)
    return plain[found[0]] if found else None


def _plain(key: str) -> str:
    return key.lower().replace("-", "_")


def _within(cfg: Mapping[str, Any], name: str, known: Collection[str], prefix: str) -> list[str]:
    """Return a sentence for each key of a block that the block does not have."""
    block = cfg.get(name)
    if not isinstance(block, Mapping):
        return []
    keys = [str(key) for key in block]
    odd = [key for key in keys if key not in known and key.removeprefix(prefix) not in known]
    return [
        f"{name}.{key} is no setting{did_you_mean(key.removeprefix(prefix), known)}; "
        f"allowed are {', '.join(known)}."
        for key in odd
    ]


class ExpertsSettings(BaseModel):
    """How a host packs and adapts experts; an unknown key is an error.

    Attributes:
        pack_experts: Pack them while the model loads; False leaves the model as the host loads it.
        lora_experts: Put LoRA on all packed experts, or on those of some roles; False leaves it to
            the host's own `target_parameters`.
        lora_router: Put LoRA on the routers too.
        skip_modules: Modules, as `llm_int8_skip_modules` names them, that stay in 16 bit besides
            those of the host's own config.
        prepare_training: Call `moe_qlora.prepare_training` before training; a string is its
            `memory`, such as "40GiB".
        progress: Show a bar while a built model is packed, and while an adapter is merged.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    pack_experts: StrictBool = True
    lora_experts: StrictBool | Annotated[tuple[Role, ...], Field(min_length=1)] = False
    lora_router: StrictBool = False
    skip_modules: tuple[Annotated[StrictStr, Field(min_length=1)], ...] = ()
    prepare_training: StrictBool | Annotated[StrictStr, Field(min_length=1)] = False
    progress: StrictBool = True

    @classmethod
    def read(cls, block: ExpertsSettings | Mapping[str, Any] | None) -> ExpertsSettings:
        """Return the settings of a YAML block, or all defaults; a wrong one is a `ConfigError`."""
        if isinstance(block, ExpertsSettings):
            return block
        if block is None:
            return cls()
        if not isinstance(block, Mapping):
            raise ConfigError(
                f"{BLOCK} is {block!r}; allowed is a block with the keys {', '.join(_ALLOWED)}."
            )
        try:
            settings = cls.model_validate(dict(block))
        except ValidationError as error:
            fault = error.errors()[0]
            key = str(fault["loc"][0])
            said = f"{BLOCK}.{key} is {shown(block.get(key))}; allowed are {_ALLOWED.get(key)}."
            if fault["type"] == "extra_forbidden":
                close = difflib.get_close_matches(key, _ALLOWED, 1)
                hint = f" (did you mean {close[0]}?)" if close else ""
                said = f"{BLOCK}.{key} is no setting{hint}; allowed are {', '.join(_ALLOWED)}."
            raise ConfigError(said) from None
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
