"""PEFT on models with packed experts: what to exclude, what to target, and adapters that are right.

    adapt_lora_config(model, config)     a config for a host that calls peft.get_peft_model itself;
                                         of a model's folder, where the host loads the model too
    get_peft_model(model, config)        the same, and every later add_adapter, load_adapter, merge
    load_adapter(model, folder)          an adapter of ours, or of stock PEFT on the unpacked model

LoRA goes to Linear layers through `target_modules` ("all-linear" means just that: no experts, no
routers) and to experts only through `target_parameters` that the caller names, or with
`experts=True`. The caller's config is never changed.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection
from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, TypeAlias, overload

from .errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from peft import PeftConfig, PeftModel
    from torch import nn
    from transformers import PretrainedConfig

Names: TypeAlias = "list[str] | tuple[str, ...] | set[str] | frozenset[str]"

_TESTED = {"peft": ((0, 20), (0, 21)), "transformers": ((5, 20), (5, 23))}


@overload
def exclude_modules(model: nn.Module, existing: str, *, routers: bool = False) -> str: ...
@overload
def exclude_modules(
    model: nn.Module, existing: Names | None = None, *, routers: bool = False
) -> list[str]: ...
def exclude_modules(
    model: nn.Module, existing: str | Names | None = None, *, routers: bool = False
) -> list[str] | str:
    """What PEFT's `exclude_modules` must name so that no module target hits packed experts.

    For each packed experts module that is its own path and the path of every module inside it, in
    full, so that `mlp.shared_expert.down_proj` keeps its LoRA while
    `mlp.experts.parametrizations.down_proj` gets none.

    Args:
        model: Any model, a `PeftModel` included; names are those of the model without adapters.
        existing: The caller's own excludes; never changed.
        routers: Exclude the routers that are plain Linear layers too.

    Returns:
        A new list for None, a list, a tuple or a set; for a string, which PEFT takes as a regex,
        one regex for `re.fullmatch`. Where no expert is packed, nothing is added.

    Raises:
        ConfigError: `existing` is no regex, or holds something else than names.
    """
    from . import peft_config, peft_targets

    paths = peft_config.exclude_paths(model)
    if paths and routers:
        from .detect import detect

        paths += [
            found.name
            for found in detect(peft_targets.base_model(model)).routers
            if found.plain_linear
        ]
    return _extend("exclude_modules", existing, paths)


@overload
def target_parameters(
    model: nn.Module, existing: str, *, roles: Collection[str] | None = None
) -> str: ...
@overload
def target_parameters(
    model: nn.Module, existing: Names | None = None, *, roles: Collection[str] | None = None
) -> list[str]: ...
def target_parameters(
    model: nn.Module,
    existing: str | Names | None = None,
    *,
    roles: Collection[str] | None = None,
) -> list[str] | str:
    """What PEFT's `target_parameters` must name to put LoRA on every packed expert parameter.

    These are full dotted names, as in `model.layers.0.mlp.experts.gate_up_proj`: PEFT matches them
    on packed and on unpacked models alike, whereas it finds a shorter ending on unpacked ones only.

    Args:
        model: Any model, a `PeftModel` included; names are those of the model without adapters.
        existing: The caller's own targets; never changed.
        roles: Only parameters with one of these roles ("gate_up", "gate", "up", "down", ...).

    Returns:
        A new list for None, a list, a tuple or a set; one regex for a string. Where no expert is
        packed, nothing is added.

    Raises:
        ConfigError: `existing` is no regex or holds something else than names, or no parameter has
        the role.
    """
    from . import peft_config, peft_targets

    names = []
    if peft_targets.packed_parameters(model):
        names = peft_config.expert_parameters(model, True if roles is None else roles)
    return _extend("target_parameters", existing, names)


def _extend(setting: str, existing: str | Names | None, names: list[str]) -> list[str] | str:
    from . import peft_targets

    if isinstance(existing, str):
        if not names:
            return existing
        return peft_targets.combine_patterns(setting, existing, [re.escape(name) for name in names])
    return list(dict.fromkeys([*peft_targets.as_names(setting, existing), *names]))


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
    """A new config, fitted to a model with packed experts; the caller's is not touched.

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
            "down") on those.
        router: Adds LoRA on the routers, which are left alone otherwise, unless `target_modules` or
            `target_parameters` names them.
        scale_expert_rank: True gives experts the rank r // top_k (at least 1) with the model's own
            number of experts per token, an int with that number. Entries of the caller's
            `rank_pattern` go before it, and `lora_alpha` stays, so the scaling alpha / rank grows.
        quantization_config: For a model that is not loaded yet: the `BitsAndBytesConfig` that it
            will be loaded with, or its dict; None where the checkpoint's config.json has one.
        trust_remote_code: For a model that is not loaded yet: run code that the checkpoint brings.

    Raises:
        ConfigError: the config asks for something that packed experts cannot have (DoRA, lora_bias,
            PiSSA, full training through modules_to_save, ...), an option needs packed experts and
            there are none, or nothing says how a model that is not loaded yet will be packed.
        CheckpointError: there is no model of this name, or transformers cannot build it.
    """
    from torch import nn

    from . import peft_config

    options: dict[str, Any] = {
        "experts": experts,
        "router": router,
        "scale_expert_rank": scale_expert_rank,
    }
    if isinstance(model, nn.Module):
        if quantization_config is not None:
            raise ConfigError(
                f"quantization_config is for a model that is not loaded yet, and a "
                f"{type(model).__name__} was given: leave it out, or name the model's folder."
            )
        return peft_config.adapt(model, lora_config, **options)
    return peft_config.adapt_unloaded(
        model,
        lora_config,
        quantization_config,
        trust_remote_code=trust_remote_code,
        **options,
    )


def get_peft_model(
    model: nn.Module,
    lora_config: PeftConfig,
    adapter_name: str = "default",
    *,
    experts: bool | Collection[str] = False,
    router: bool = False,
    scale_expert_rank: bool | int = False,
    **peft_kwargs: Any,
) -> PeftModel:
    """`peft.get_peft_model` for a model with packed experts.

    Names, shapes and files are those of stock PEFT on the unpacked model. On a model without packed
    experts this is stock PEFT with a copy of the config.

    Args:
        model: The model, changed in place as PEFT does.
        lora_config: The caller's config; never changed.
        adapter_name: Name of the first adapter.
        experts: As for `adapt_lora_config`.
        router: As for `adapt_lora_config`.
        scale_expert_rank: As for `adapt_lora_config`.
        **peft_kwargs: Passed on to `peft.get_peft_model` (low_cpu_mem_usage,
            autocast_adapter_dtype, ...).

    Raises:
        ConfigError: see `adapt_lora_config`; also `mixed=True`, and a `PeftModel`.
        AdapterError: LoRA on an expert parameter did not get connected.
    """
    import peft

    from . import peft_model, peft_targets

    _warn_untested()
    config = adapt_lora_config(
        model, lora_config, experts=experts, router=router, scale_expert_rank=scale_expert_rank
    )
    if not peft_targets.packed_parameters(model):
        return peft.get_peft_model(model, config, adapter_name=adapter_name, **peft_kwargs)
    if isinstance(model, peft.PeftModel):
        raise ConfigError(
            f"model is a PeftModel with adapters ({', '.join(model.peft_config)}); for one more "
            "call model.add_adapter(name, lora_config)."
        )
    if peft_kwargs.get("mixed"):
        raise ConfigError(
            "mixed=True combines adapter types, which packed experts cannot take; leave it out."
        )
    with peft_model.without_false_warning(config):
        wrapped = peft.get_peft_model(model, config, adapter_name=adapter_name, **peft_kwargs)
    peft_model.take_over(wrapped)
    return wrapped


def load_adapter(
    model: nn.Module,
    adapter: str,
    adapter_name: str = "default",
    *,
    is_trainable: bool = False,
    **peft_kwargs: Any,
) -> PeftModel:
    """Load a saved adapter: `PeftModel.from_pretrained` for packed experts.

    Reads adapters that this package, or stock PEFT on the unpacked model, has saved, those from
    transformers v4 with one LoRA for each expert included. Files of adapters on experts carry no
    `lora_dropout`, which stock PEFT would refuse to load.

    Args:
        model: A model with packed experts, or a `PeftModel` of it, which gets one more adapter.
        adapter: The folder, or the repository id.
        adapter_name: Name of the adapter in the model.
        is_trainable: False freezes the adapter and puts the model in evaluation mode, as PEFT does.
        **peft_kwargs: Passed on to `PeftModel.from_pretrained` or `PeftModel.load_adapter`.

    Raises:
        AdapterError: tensors of the file have no place in the model, or places got no tensor.
        ConfigError: see `adapt_lora_config`.
    """
    from . import peft_model

    _warn_untested()
    return peft_model.load(model, adapter, adapter_name, is_trainable=is_trainable, **peft_kwargs)


def connect_adapters(model: PeftModel) -> PeftModel:
    """Make right what a host has created with stock PEFT over packed experts, in place.

    For hosts that build the `LoraConfig` and the `PeftModel` themselves, given the names from
    `target_parameters` and `exclude_modules`. Parameters, optimizer state and weights stay; the
    order of nested wrappers, and with it the names in files, becomes that of the unpacked model.

    Args:
        model: A `PeftModel` over a model with packed experts; any other is returned as it is.

    Raises:
        AdapterError: An adapter targets a packed parameter and has no layer for it.
    """
    from . import peft_model, peft_targets

    if peft_targets.packed_parameters(model):
        peft_model.take_over(model)
    return model


@cache
def _warn_untested() -> None:
    for package, (low, high) in _TESTED.items():
        found = version(package)
        release = tuple(int(part) for part in re.findall(r"\d+", found)[:2])
        if not low <= release <= high:
            tested = f"{low[0]}.{low[1]} to {high[0]}.{high[1]}"
            warnings.warn(
                f"{package} {found} is not one of the versions this package was tested with "
                f"({tested}); every adapter "
                "is still checked after it is created.",
                UserWarning,
                stacklevel=3,
            )


__all__ = [
    "adapt_lora_config",
    "connect_adapters",
    "exclude_modules",
    "get_peft_model",
    "load_adapter",
    "target_parameters",
]
