"""What a plan's `targets` name in a model on meta: a `LoraConfig`, or an error for each other word.

A target is "attention" (Linear layers of attention), "experts" (packed expert weights),
"all-linear" (as PEFT reads it), or the name of a module as PEFT's `target_modules` takes it: in
full, or its last parts ("q_proj", "self_attn.q_proj").
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import peft
from torch import nn

from ..errors import ConfigError, did_you_mean
from ..lora import left_out
from .blocks import PackedPart

ATTENTION, EXPERTS, ALL_LINEAR = "attention", "experts", "all-linear"

_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)
_LISTED = 12  # names of Linear layers in an error, at most


def words_of(targets: str) -> list[str]:
    """Return the targets that are named by comma."""
    return [word for each in targets.split(",") if (word := each.strip())]


def lora_config_of(
    model: nn.Module, parts: Sequence[PackedPart], targets: str, rank: int
) -> peft.LoraConfig:
    """Return the config of LoRA on these targets of a packed model.

    Raises:
        ConfigError: A target names nothing in this model, or there are none.
    """
    experts = [f"{part.module}.{part.leaf}".lstrip(".") for part in parts if not part.linear]
    words = words_of(targets)
    modules: str | list[str] = []
    for word in words:
        if word == ALL_LINEAR:
            modules = word
        elif word == ATTENTION and isinstance(modules, list):
            modules += _attention_linears(model)
        elif word not in (ATTENTION, EXPERTS):
            _check_name(word, model, experts)
            if isinstance(modules, list):
                modules.append(word)
    parameters = experts if EXPERTS in words else None
    if not modules and not parameters:
        raise ConfigError(f"targets={targets!r} names nothing in this model; {_allowed(model)}.")
    return peft.LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules=modules, target_parameters=parameters
    )


def _check_name(word: str, model: nn.Module, experts: Sequence[str]) -> None:
    """Raise a `ConfigError` where a target names no module of a model.

    What names experts by a matrix of one of them is told apart: `left_out` says how to reach them.
    """
    names = [name for name, _ in model.named_modules() if name]
    if any(name == word or name.endswith(f".{word}") for name in names):
        return
    probe = peft.LoraConfig(target_modules=[word])
    if any(left_out.names_expert(probe, name) for name in experts):
        return
    leaves = {name.rpartition(".")[2] for name in names}
    near = did_you_mean(word, [ATTENTION, EXPERTS, ALL_LINEAR, *sorted(leaves)])
    raise ConfigError(
        f"targets names {word!r}, which is no target and no module of this model{near}; "
        f"{_allowed(model)}."
    )


def _allowed(model: nn.Module) -> str:
    linears = (name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    leaves = list(dict.fromkeys(name.rpartition(".")[2] for name in linears))
    named = [leaf for leaf in leaves if leaf and not leaf.isdigit()][:_LISTED]
    listed = f", such as {', '.join(named)}" if named else ""
    return f"give {ATTENTION}, {EXPERTS}, {ALL_LINEAR}, or names of modules{listed}"


def _attention_linears(model: nn.Module) -> list[str]:
    """Return the Linear layers inside modules that are attention by their class or by name."""
    names = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            parent = name.rpartition(".")[0]
            owners = [owner for owner in (parent, parent.rpartition(".")[0]) if owner]
            classes = [type(model.get_submodule(owner)).__name__ for owner in owners]
            if any(map(_ATTENTION.search, (parent, *classes))):
                names.append(name)
    return names
