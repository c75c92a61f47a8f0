"""PEFT's rewrite of target names, and a spelling of them that it leaves alone.

PEFT 0.20 to 0.21.2 knows Mixture-of-Experts checkpoints of transformers v4, where experts were
Linear layers. For 29 model types it rewrites `target_modules` such as "all-linear", `down_proj` or
any regex into `target_parameters` for the fused experts and the router, and the Linear layers of
shared experts and dense blocks, which have the same leaf names, lose their LoRA. The rewrite asks
each target `target.endswith(".down_proj")`: `ExactName`, a string that answers no, spells the full
name of a Linear layer in a way that PEFT matches and does not rewrite. PEFT itself is not patched.
"""

from __future__ import annotations

import copy
from typing import Any, TypeVar, cast

import torch
from peft import PeftConfig, PeftType
from peft.tuners.tuners_utils import (
    BaseTunerLayer,
    _maybe_include_all_linear_layers,
    check_target_module_exists,
)
from torch import nn

from ..layout import ModelLayout, name_pattern, unwrapped_name
from .names import as_set, is_all_linear, names_parameter

Config = TypeVar("Config", bound=PeftConfig)

_ADAPTABLE = (BaseTunerLayer, nn.Linear, nn.Embedding, nn.modules.conv._ConvNd)


class ExactName(str):
    """A module's full name, which PEFT matches as it stands and never rewrites."""

    __slots__ = ()

    def endswith(self, *args: Any) -> bool:
        return False


def exact_targets(
    model: nn.Module, config: PeftConfig, layout: ModelLayout
) -> tuple[set[ExactName], list[str], str] | None:
    """Return what the config's `target_modules` reach; None where PEFT would not rewrite them.

    These are names of modules and of router weights, and one sentence where stock PEFT, given the
    saved config, would adapt something else, or "".
    """
    if rewritten(model, config) is None:
        return None
    routers = {router.name.removesuffix(".weight") for router in layout.routers}
    modules: set[ExactName] = set()
    router_weights = []
    for name in reached_modules(model, config):
        module = model.get_submodule(name)
        # transformers v5 keeps most routers as a module with a bare `weight`.
        bare = not isinstance(module, _ADAPTABLE)
        bare = bare and isinstance(getattr(module, "weight", None), torch.Tensor)
        if bare and unwrapped_name(name) in routers:
            router_weights.append(f"{unwrapped_name(name)}.weight")
        else:
            modules.add(ExactName(name))
    written = config
    if is_all_linear(config):  # PEFT writes the names that the word stands for
        written = changed(config, target_modules={str(name) for name in modules})
    return modules, router_weights, _reload_note(model, written, modules, router_weights)


def rewritten(model: nn.Module, config: Config) -> Config | None:
    """Return the config as PEFT would rewrite it for this model; None where no target changes."""
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if config.peft_type != PeftType.LORA or model_type is None:
        return None
    try:
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError:  # a PEFT without the rewrite
        return None
    probe: Any = copy.deepcopy(config)
    try:
        convert_peft_config_for_transformers(probe, model=model, conversions=None)
    except ValueError:  # one of two fused projections named alone: nothing is targeted
        probe.target_modules, probe.target_parameters = set(), []
        return cast(Config, probe)
    same = all(
        as_set(getattr(config, field)) == as_set(getattr(probe, field))
        for field in ("target_modules", "target_parameters")
    )
    return None if same else cast(Config, probe)


def reached_modules(model: nn.Module, config: Any) -> list[str]:
    """Return the modules that PEFT matches with the config as it stands, adapters' own excepted."""
    if is_all_linear(config):
        config = _maybe_include_all_linear_layers(copy.copy(config), model)
    if config.target_modules is None:
        return []
    inside_adapter: tuple[str, ...] = ()
    names = []
    for name, module in model.named_modules():
        if not name or name.startswith(inside_adapter or "\0"):
            continue
        if isinstance(module, BaseTunerLayer):
            inside_adapter += (name + ".",)
        if check_target_module_exists(config, name):
            names.append(name)
    return names


def changed(config: Config, **fields: Any) -> Config:
    """Return a shallow copy of a config with other values of these fields."""
    probe = copy.copy(config)
    for field, value in fields.items():
        setattr(probe, field, value)
    return probe


def _reload_note(
    model: nn.Module, written: PeftConfig, modules: set[ExactName], router_weights: list[str]
) -> str:
    stock: Any = rewritten(model, written)
    if stock is None:
        return ""
    added = set(stock.target_parameters or ()) - set(cast(Any, written).target_parameters or ())
    right = all(any(names_parameter(one, name) for name in router_weights) for one in added)
    reached = set(reached_modules(model, stock))
    if right and reached == modules:
        return ""
    lost = ", ".join(sorted({name_pattern(str(name)) for name in modules - reached}))
    return (
        "stock PEFT rewrites the target_modules of this adapter for its model type "
        f"({cast(Any, model.config).model_type}) and would load {lost or 'its targets'} wrong; "
        "load it with moe_qlora.load_adapter."
    )
