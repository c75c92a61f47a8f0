"""Experts that `target_modules` seems to mean and does not reach: said by name before training."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from peft import LoraConfig, PeftConfig
from peft.tuners.tuners_utils import check_target_module_exists
from torch import nn

from ..errors import ConfigError
from .names import as_names, is_all_linear
from .packed import patterns
from .rewrite import changed, reached_modules
from .targets import Targets

WARNING = "target_modules names .* packed expert weights .* get no LoRA"  # the message, as a regex

_HOW = ": pass experts=True"

# What transformers v4, and so most tutorials, call the matrices of one expert; the model's own
# names of fused ones come beside them.
_MATRICES = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")


def check_named(
    model: nn.Module, config: PeftConfig, targets: Targets, packed: Collection[str]
) -> str:
    """Return one sentence where `target_modules` names experts that get no LoRA, or "".

    `config` is in the caller's spelling. Where nothing else gets LoRA either, that is an error.
    Excludes of the caller that name the experts leave them out on purpose.
    """
    asked: Any = config
    if not isinstance(config, LoraConfig) or targets.experts or is_all_linear(config):
        return ""
    if config.target_modules is None:  # PEFT's own choice for the model type, or its own error
        return ""
    names = [name for name in packed if names_expert(asked, name)]
    if not names:
        return ""
    words = repr(asked.target_modules)
    if not isinstance(asked.target_modules, str):
        singles = as_names("target_modules", asked.target_modules)
        words = ", ".join(
            word
            for word in singles
            if any(names_expert(changed(asked, target_modules={word}), name) for name in names)
        )
    message = (
        f"target_modules names {words}, and it reaches modules only, so that {len(names)} packed "
        f"expert weights ({patterns(names)}) get no LoRA"
    )
    how = f"{_HOW}, or target_parameters=moe_qlora.target_parameters(model) in the config"
    probe = changed(asked, exclude_modules=targets.excludes, target_modules=targets.modules)
    if not targets.parameters and not reached_modules(model, probe):
        raise ConfigError(f"{message}, and nothing else does{how}.")
    return (
        f"{message}{how}, to train them, or exclude_modules=moe_qlora.exclude_modules(model) to "
        "leave them out without this warning."
    )


def for_target_names(message: str) -> str:
    """Return what `check_named` says, for whoever names targets by comma as `plan` takes them."""
    head, found, _ = message.partition(_HOW)
    cure = ': name experts among the targets, as in "attention,experts".'
    return head + cure if found else message


def names_expert(config: Any, name: str) -> bool:
    """Tell whether module targets name this parameter, its module, or matrices of one expert."""
    owner, _, leaf = name.rpartition(".")
    everything = changed(config, target_modules=".*")
    if not all(check_target_module_exists(everything, path) for path in (owner, name)):
        return False
    owners = (owner, f"{owner}.0")  # an expert of its own, before experts were fused
    paths = [owner, *(f"{path}.{matrix}" for path in owners for matrix in (leaf, *_MATRICES))]
    return any(check_target_module_exists(config, path.lstrip(".")) for path in paths)
