"""A LoraConfig adapted to packed experts; its file is stock PEFT's for unpacked ones."""

import copy
import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

from peft import LoraConfig, PeftConfig
from torch import nn

from ..checkpoint import training_codec
from ..checkpoint.training_codec import TOP_K_FIELDS, TrainingCodec, write_card
from ..errors import ConfigError
from ..layout import base_model, name_pattern
from .layer import wrap_parameter
from .targets import (
    Targets,
    is_lora,
    notes_on,
    packed_parameters,
    refusals,
    resolve_targets,
    rewritten,
)


def adapt_lora_config(
    model: nn.Module,
    lora_config: PeftConfig,
    *,
    experts: bool | Collection[str] = False,
    router: bool = False,
    scale_expert_rank: bool | int = False,
) -> PeftConfig:
    """Return a new config, adapted to a model with packed experts; the caller's is not touched.

    The result can be given to `get_peft_model` of this package or of stock PEFT. Saved, it writes
    the caller's own targets and excludes. On a model without packed experts it is an equal copy.

    Args:
        model: The model that the adapter is for.
        lora_config: A `peft.LoraConfig`, or any other PEFT config with target_modules, where
            experts are left alone.
        experts: True adds LoRA on every packed expert parameter, a collection of roles ("gate_up",
            "down") on those; of the layers in `layers_to_transform`, where it is set.
        router: Adds LoRA on the routers, which have it otherwise only where they are named.
        scale_expert_rank: True gives experts the rank r // top_k (at least 1) with the model's own
            top-k, an int with that number. The caller's `rank_pattern` goes before it, and
            `lora_alpha` stays, so the scaling alpha / rank grows.

    Raises a `ConfigError` where the config asks for DoRA, lora_bias, PiSSA or another setting that
    packed experts do not support, or for full training of packed weights (modules_to_save), or an
    option needs packed experts and the model has none.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is a {type(model).__name__}: give a model that is loaded.")
    if not isinstance(lora_config, PeftConfig):
        raise ConfigError(f"lora_config is a {type(lora_config).__name__}: give a LoraConfig.")
    warn = not isinstance(lora_config, AdaptedLoraConfig) and not lora_config.inference_mode
    options = experts, router, scale_expert_rank
    return adapt(model, lora_config, *options, warn=warn)


class AdaptedLoraConfig(LoraConfig):
    """A LoraConfig adapted to a model with packed experts; its file keeps the caller's spelling."""

    _callers: Mapping[str, Any] = {}  # fields that have another value here, in their spelling
    _packed: TrainingCodec | None = None  # of the model that it was adapted to, or that has it

    def to_dict(self) -> dict[str, Any]:
        written: dict[str, Any] = super().to_dict()
        written.update(copy.deepcopy(dict(self._callers)))
        if written.get("target_parameters"):
            # Dropout is for training, and stock PEFT refuses to load parameters with it.
            written["lora_dropout"] = 0.0
        return written

    def save_pretrained(self, save_directory: str, **kwargs: Any) -> None:
        with patch.dict(vars(self), self._callers):  # a host's class may bypass `to_dict`
            super().save_pretrained(save_directory, **kwargs)
        if self._packed is not None:
            folder = Path(save_directory)
            training_codec.write_note(folder, self._packed)
            mapping = {"auto_mapping": kwargs.get("auto_mapping_dict")}
            write_card(folder, self.to_dict() | mapping, self._packed)


def adapt(
    model: nn.Module, config: PeftConfig, experts: Any = False, router: bool = False,
    scale_expert_rank: bool | int = False, *, warn: bool = False,
) -> PeftConfig:  # fmt: skip
    """Return the config adapted to a model; `warn` of targets without LoRA, before training."""
    model = base_model(model)
    packed = packed_parameters(model)
    options = {"experts": experts, "router": router, "scale_expert_rank": scale_expert_rank}
    for option, value in options.items():
        if value and not packed:
            raise ConfigError(
                f"{option}={value!r} is for models with packed experts, and this model has none: "
                "load it under moe_qlora.enabled(), or call moe_qlora.quantize_experts; name "
                "16-bit experts in target_parameters, Linear ones in target_modules."
            )
    if not packed or config.is_prompt_learning:  # which touches no module
        return copy.deepcopy(config)
    asked: Any = _as_asked(config)
    targets = resolve_targets(model, asked, experts=experts, router=router)
    for refusal in refusals(model, asked, targets.experts, packed):
        raise ConfigError(refusal)
    if warn:
        for note in notes_on(model, asked, targets, packed):
            warnings.warn(note, UserWarning, stacklevel=3)
    if scale_expert_rank and targets.experts:
        _scale_rank(model, asked, targets.experts, scale_expert_rank)
    return make_adapted(asked, targets, training_codec.from_packed(model))


def top_k_of(model: Any) -> int | None:
    """Return the number of experts that a token goes to, by the model's configuration, or None."""
    config: Any = getattr(model, "config", None)
    text = getattr(config, "get_text_config", lambda: None)()
    values = (getattr(part, name, None) for part in (config, text) for name in TOP_K_FIELDS)
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
    adapted.__class__ = _adapted_class(cast(Any, type(adapted)))
    adapted._callers = copy.deepcopy(dict(targets.written))
    adapted._packed = packed
    if targets.experts:
        # PEFT's own table of layer classes, of this config only: stock PEFT uses it too.
        adapted._register_custom_module({nn.Module: wrap_parameter})
    return cast(PeftConfig, adapted)


def record_base(model: nn.Module, config: PeftConfig) -> None:
    """Note in an adapter's config the model that has it, as it is before training."""
    if isinstance(config, AdaptedLoraConfig):
        config._packed = training_codec.from_packed(model)


@cache
def _adapted_class(base: Any) -> Any:
    """Return the class for adapted configs of a class, which may be a host's own."""
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
        said = f"{type(config).__name__} has no target_modules and exclude_modules"
        raise ConfigError(f"{said}, which models with packed experts need; pass a LoraConfig.")
    return asked


def _scale_rank(
    model: nn.Module, config: LoraConfig, experts: Sequence[str], scale: bool | int
) -> None:
    """Give the experts the rank r // top_k: to a token, together the rank of a dense layer."""
    top_k = scale if scale is not True else top_k_of(model)
    if top_k is None:
        raise ConfigError(
            "scale_expert_rank=True needs the model's top-k, and its config has none of "
            f"{', '.join(TOP_K_FIELDS)}; pass the number itself, as in scale_expert_rank=8."
        )
    names = (r"\d+".join(map(re.escape, name_pattern(name).split("*"))) for name in experts)
    # The caller's entries come first, and so take precedence.
    ranks = dict.fromkeys(names, max(config.r // top_k, 1))
    config.rank_pattern = {**(config.rank_pattern or {}), **ranks}
