"""A LoraConfig adapted to packed experts; its file is stock PEFT's for unpacked ones."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

from peft import LoraConfig, PeftConfig
from torch import nn
from transformers import PretrainedConfig

from ..checkpoint import training_codec
from ..checkpoint.manifest import read_manifest
from ..checkpoint.training_codec import TOP_K_FIELDS, TrainingCodec
from ..errors import ConfigError
from ..kernels.weights import PackedWeight
from ..layout import name_pattern
from ..models import named
from ..packing import parametrize
from ..packing.parametrize import blank_weight
from .inject import wrap_parameter
from .targets import (
    Targets,
    base_model,
    check_supported,
    extend,
    is_all_linear,
    is_lora,
    linear_experts,
    notes_on,
    packed_parameters,
    patterns,
    resolve_targets,
    rewritten,
)


def adapt_lora_config(
    model: nn.Module | PretrainedConfig | str | Path,
    lora_config: PeftConfig,
    *,
    experts: bool | Collection[str] = False,
    router: bool = False,
    scale_expert_rank: bool | int = False,
    quantization_config: Any = None,
    trust_remote_code: bool = False,
) -> PeftConfig:
    """Return a new config, adapted to a model with packed experts; the caller's is not touched.

    The result can be given to `get_peft_model` of this package or of stock PEFT. Saved, it writes
    the caller's own targets and excludes. On a model without packed experts it is an equal copy.

    For a trainer that loads the model itself, name the model as the trainer gets it: nothing is
    loaded, and PEFT refuses the result where the trainer's model turns out not to be packed.

    Args:
        model: The model that the adapter is for; or, where it is not loaded yet, its folder, its
            hub id, a model type or its configuration.
        lora_config: A `peft.LoraConfig` (or any other PEFT config with target_modules, where
            experts are left alone).
        experts: True adds LoRA on every packed expert parameter, a collection of roles ("gate_up",
            "down") on those; of the layers in `layers_to_transform`, where it is set.
        router: Adds LoRA on the routers, which are left alone otherwise, unless `target_modules` or
            `target_parameters` names them.
        scale_expert_rank: True gives experts the rank r // top_k (at least 1) with the model's own
            number of experts per token, an int with that number. Entries of the caller's
            `rank_pattern` go before it, and `lora_alpha` stays, so the scaling alpha / rank grows.
        quantization_config: For a model that is not loaded yet: the `BitsAndBytesConfig` that it
            will be loaded with, or its dict; None where the checkpoint's config.json has one.
        trust_remote_code: For a model that is not loaded yet: run code that the checkpoint brings.

    Raises:
        ConfigError: The config asks for something that packed experts cannot have (DoRA, lora_bias,
            PiSSA, full training through modules_to_save, ...), an option needs packed experts and
            there are none, or nothing says how a model that is not loaded yet will be packed.
        CheckpointError: There is no model of this name, or transformers cannot build it.
    """
    if not isinstance(lora_config, PeftConfig):
        raise ConfigError(
            f"lora_config is a {type(lora_config).__name__}: give a peft.LoraConfig, or another "
            "PEFT config."
        )
    packing: TrainingCodec | None = None
    if not isinstance(model, nn.Module):
        model, packing = blank_packed_model(
            model, quantization_config, trust_remote_code=trust_remote_code
        )
    elif quantization_config is not None:
        raise ConfigError(
            "quantization_config is for a model that is not loaded yet, and a "
            f"{type(model).__name__} was given: leave it out, or name the model's folder."
        )
    warn = not isinstance(lora_config, AdaptedLoraConfig) and not lora_config.inference_mode
    return adapt(model, lora_config, experts, router, scale_expert_rank, packing, warn=warn)


class AdaptedLoraConfig(LoraConfig):
    """A LoraConfig adapted to a model with packed experts; its file keeps the caller's spelling."""

    _callers: Mapping[str, Any] = {}  # fields that have another value here, in their spelling
    _reload: str = ""  # a warning for a save, where stock PEFT would not load the file
    _packed: TrainingCodec | None = None  # of the model that it was adapted to, or that has it

    def to_dict(self) -> dict[str, Any]:
        written: dict[str, Any] = super().to_dict()
        written.update(copy.deepcopy(dict(self._callers)))
        if written.get("target_parameters"):
            # Dropout is for training, and stock PEFT refuses to load parameters with it.
            written["lora_dropout"] = 0.0
        return written

    def save_pretrained(self, save_directory: str, **kwargs: Any) -> None:
        if self._reload:
            warnings.warn(self._reload, UserWarning, stacklevel=2)
        adapted = {field: getattr(self, field) for field in self._callers}
        self.__dict__.update(self._callers)  # a host's class may bypass `to_dict`
        try:
            super().save_pretrained(save_directory, **kwargs)
        finally:
            self.__dict__.update(adapted)
        if self._packed is not None:
            training_codec.write_note(Path(save_directory), self._packed)


def adapt(
    model: nn.Module,
    config: PeftConfig,
    experts: bool | Collection[str] = False,
    router: bool = False,
    scale_expert_rank: bool | int = False,
    to_be_loaded: TrainingCodec | None = None,
    *,
    warn: bool = False,
) -> PeftConfig:
    """Return the config adapted to a model, which may be on meta in place of one not loaded yet.

    warn: warn if `target_modules` names experts, which PEFT cannot reach that way; False for the
    config of an adapter that was trained so.
    """
    model = base_model(model)
    packed = packed_parameters(model)
    options = {"experts": experts, "router": router, "scale_expert_rank": scale_expert_rank}
    lists = {}
    if any(options.values()) and not config.is_prompt_learning:
        lists = linear_experts(model)
    if lists and not isinstance(experts, bool):
        raise ConfigError(
            f"experts={experts!r} chooses among fused expert weights, and this model's experts are "
            f"lists of Linear layers ({patterns(lists)}): pass experts=True for LoRA on all, or "
            f"name some in target_modules, as in {next(iter(lists.values()))!r}."
        )
    if not packed and not lists:
        why = (
            f"a load of this {cast(Any, model.config).model_type} model with this "
            "quantization_config packs none."
            if to_be_loaded
            else "this model has none: load it under moe_qlora.enabled() with a "
            "BitsAndBytesConfig, or call moe_qlora.quantize_experts(model, config) first; to train "
            "LoRA on experts in 16 bit, name them in target_parameters."
        )
        for option, value in options.items():
            if value:
                raise ConfigError(
                    f"{option}={value!r} is for models with packed experts, and {why}"
                )
    if not (packed or lists) or config.is_prompt_learning:  # which touches no module
        return copy.deepcopy(config)
    asked: Any = _as_asked(config)
    if lists and experts and not is_all_linear(asked):
        regex = isinstance(asked.target_modules, str)
        names = extend(
            "target_modules", asked.target_modules, list(lists if regex else {*lists.values()})
        )
        asked.target_modules = names if regex else set(names)
    targets = resolve_targets(model, asked, experts=experts, router=router)
    reload = targets.reload
    if packed:
        check_supported(model, asked, targets, packed)
        if warn:
            for note in notes_on(model, asked, targets, packed):
                warnings.warn(note, UserWarning, stacklevel=3)
            if is_all_linear(asked):  # said before training, and not again with every save
                reload = ""
    scaled = [*targets.experts, *(lists if experts else ())]
    if scale_expert_rank and scaled:
        _scale_rank(model, asked, scaled, scale_expert_rank)
    codec = to_be_loaded or training_codec.from_packed(model)
    return make_adapted(asked, replace(targets, reload=reload), codec)


def top_k_of(config: Any) -> int | None:
    """Return the number of experts that a token goes to, by the model's configuration, or None."""
    values = (getattr(config, name, None) for name in TOP_K_FIELDS)
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def spell_exactly(model: nn.Module, config: PeftConfig) -> PeftConfig:
    """Return a config whose `target_modules` PEFT does not rewrite, where no expert is packed."""
    if not isinstance(config, LoraConfig) or rewritten(model, config) is None:
        return config
    asked = _as_asked(config)
    return make_adapted(asked, resolve_targets(model, asked), None)


def make_adapted(config: PeftConfig, targets: Targets, packed: TrainingCodec | None) -> PeftConfig:
    """Turn a copy of the caller's config into PEFT's: for LoRA an `AdaptedLoraConfig`."""
    adapted: Any = config
    values = {"exclude_modules": targets.excludes, "target_modules": targets.modules}
    for field, value in values.items():
        setattr(adapted, field, value if value is None or isinstance(value, str) else set(value))
    if hasattr(adapted, "target_parameters"):
        adapted.target_parameters = targets.parameters and list(targets.parameters)
    if not is_lora(adapted):  # AdaLoRA, IA3, ...: their files have PEFT's values
        return cast(PeftConfig, adapted)
    become_adapted(adapted, copy.deepcopy(dict(targets.written)), targets.reload, packed)
    if targets.experts:
        # PEFT's own table of layer classes, of this config only: stock PEFT uses it too.
        adapted._register_custom_module({nn.Module: wrap_parameter})
    return cast(PeftConfig, adapted)


def record_base(model: nn.Module, config: PeftConfig) -> None:
    """Note in an adapter's config the model that has it, as it is before training.

    A config may have been adapted to a folder, whose weights and dtype nobody had read, or to
    another model.
    """
    if isinstance(config, AdaptedLoraConfig):
        config._packed = training_codec.from_packed(model)


def become_adapted(
    config: LoraConfig,
    callers: Mapping[str, Any],
    reload: str,
    packed: TrainingCodec | None,
) -> None:
    """Make a LoraConfig an `AdaptedLoraConfig` in place, a host's own class included."""
    adapted: Any = config
    adapted.__class__ = _adapted_class(cast(Any, type(config)))
    adapted._callers, adapted._reload, adapted._packed = callers, reload, packed


@cache
def _adapted_class(base: Any) -> Any:
    if issubclass(base, AdaptedLoraConfig):
        return base
    if base is LoraConfig:
        return AdaptedLoraConfig
    return type(base.__name__, (AdaptedLoraConfig, base), {})


def _as_asked(config: PeftConfig) -> PeftConfig:
    asked = copy.deepcopy(config)
    if isinstance(asked, AdaptedLoraConfig):
        asked.__dict__.update(asked._callers)
        asked._callers = {}
    if not hasattr(asked, "exclude_modules") or not hasattr(asked, "target_modules"):
        raise ConfigError(
            f"{type(config).__name__} has no target_modules and exclude_modules, which models with "
            "packed experts need; pass a LoraConfig."
        )
    return asked


def _scale_rank(
    model: nn.Module, config: LoraConfig, experts: Sequence[str], scale: bool | int
) -> None:
    """Give the experts the rank r // top_k: to a token, together the rank of a dense layer."""
    config_of_model: Any = getattr(model, "config", None)
    nested = getattr(config_of_model, "get_text_config", lambda: None)()
    top_k = scale if scale is not True else top_k_of(config_of_model) or top_k_of(nested)
    if top_k is None:
        raise ConfigError(
            "scale_expert_rank=True needs the number of experts that a token goes to, and the "
            f"model's config has none of {', '.join(TOP_K_FIELDS)}; pass the number itself, as in "
            "scale_expert_rank=8."
        )
    names = (r"\d+".join(map(re.escape, name_pattern(name).split("*"))) for name in experts)
    # The caller's entries come first, and so take precedence.
    ranks = dict.fromkeys(names, max(config.r // top_k, 1))
    config.rank_pattern = {**(config.rank_pattern or {}), **ranks}


def blank_packed_model(
    model: str | Path | PretrainedConfig, quantization_config: Any, *, trust_remote_code: bool
) -> tuple[nn.Module, TrainingCodec]:
    """Build a model on meta, packed as by a load; return it and its codec.

    `quantization_config`: None for the one in the checkpoint's own config.json.
    """
    if not isinstance(model, (str, Path, PretrainedConfig)):
        raise ConfigError(
            f"model is a {type(model).__name__}: give a built nn.Module or, of a model that is not "
            "loaded yet, its folder, hub id or configuration."
        )
    source = named.resolve(model, trust_remote_code=trust_remote_code)
    asked = quantization_config or getattr(source.config, "quantization_config", None)
    if asked is None:
        raise ConfigError(
            f"{source.label} is not loaded yet and its configuration has no quantization_config: "
            "pass the BitsAndBytesConfig that it will be loaded with as quantization_config."
        )
    new = partial(named.build, source, trust_remote_code=trust_remote_code)
    with named.quiet():
        packed = training_codec.from_config(new(), asked)
    names: Collection[str] = packed.experts
    manifest = None
    if not isinstance(model, PretrainedConfig) and Path(model).is_dir():
        manifest = read_manifest(model)
        names = names if manifest is None else manifest.experts
    built: Any = new()  # `from_config` has replaced Linear layers of the first
    built.tie_weights()
    blanks: dict[nn.Parameter, PackedWeight] = {}  # tied weights share one
    for name in names:
        module, leaf = parametrize.owner_of(built, name)
        weight = module._parameters.get(leaf)
        if weight is not None:
            how = packed.settings if manifest is None else manifest.settings_of(name)
            blank = blank_weight(tuple(weight.shape), weight.dtype, how)
            parametrize.attach(module, leaf, blanks.setdefault(weight, blank))
    return built, packed
