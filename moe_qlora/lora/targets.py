"""Names and patterns for PEFT, and its rewrite of old spellings.

PEFT 0.20-0.21.2 knows Mixture-of-Experts checkpoints of transformers v4, where experts were Linear
layers. For 29 model types it rewrites `target_modules` such as "all-linear", `down_proj` or any
regex into `target_parameters` for the fused experts and the router, and the Linear layers of shared
experts and dense blocks, which have the same leaf names, lose their LoRA. The rewrite asks each
target `target.endswith(".down_proj")`: `ExactName`, a string that answers no, spells the full name
of a Linear layer in a way that it leaves alone. Nothing of PEFT is patched for it.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias, overload

import torch
from peft import PeftConfig, PeftType
from peft.tuners.tuners_utils import (
    BaseTunerLayer,
    _maybe_include_all_linear_layers,
    check_target_module_exists,
)
from torch import nn

from ..detection.detect import detect
from ..errors import ConfigError
from ..layout import ModelLayout
from ..packing.parametrize import packed_names

if TYPE_CHECKING:
    from peft import PeftConfig


def exclude_paths(model: nn.Module) -> list[str]:
    """Each packed experts module's own path and those of all modules inside it."""
    return [path for name, inner in excluded_paths(model) for path in (name, *inner) if path]


def expert_parameters(model: nn.Module, roles: bool | Collection[str] = True) -> list[str]:
    """Full names of the packed expert parameters, or of those with one of these roles.

    Raises:
        ConfigError: a role that no packed parameter of this model has.
    """
    packed = packed_parameters(model)
    if roles is True:
        return list(packed)
    wanted = {roles} if isinstance(roles, str) else set(roles or ())
    found = {
        plain_name(name): param.role
        for param in detect(base_model(model))
        for name in param.names
        if plain_name(name) in packed
    }
    unknown = sorted(wanted - set(found.values()))
    if unknown:
        raise ConfigError(
            f"no packed expert parameter has the role {unknown[0]!r}; this model has "
            f"{sorted(set(found.values()))}."
        )
    return [name for name in packed if found.get(name) in wanted]


ALL_LINEAR = "all-linear"

_BASE_LAYER = ".base_layer"
_LEADING_FLAGS = re.compile(r"\(\?([aimsux]+)\)")


class ExactName(str):
    """A module's full name, which PEFT matches as it stands and never rewrites."""

    __slots__ = ()

    def endswith(self, *args: Any) -> bool:
        return False


def base_model(model: nn.Module) -> nn.Module:
    """The model inside a `PeftModel`, any other model as it is."""
    unwrap = getattr(model, "get_base_model", None)
    return unwrap() if callable(unwrap) and hasattr(model, "base_model") else model


def plain_name(name: str) -> str:
    """The name that a module had before PEFT wrapped it."""
    return name.replace(_BASE_LAYER, "")


def packed_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Each module that owns packed experts, under the name it has without adapters."""
    for name, module in base_model(model).named_modules():
        if packed_names(module):
            yield plain_name(name), module


def packed_parameters(model: nn.Module) -> dict[str, nn.Module]:
    """Full name of each packed expert parameter (without adapters) and the module that owns it."""
    return {
        f"{name}.{parameter}" if name else parameter: module
        for name, module in packed_modules(model)
        for parameter in packed_names(module)
    }


def excluded_paths(model: nn.Module) -> list[tuple[str, list[str]]]:
    """For each module with packed experts its own path, and those of all modules inside it."""
    paths = []
    for name, module in packed_modules(model):
        inner = [
            plain_name(path)
            for path, _ in module.named_modules(prefix=name)
            if path not in ("", name)
        ]
        paths.append((name, inner))
    return paths


def combine_patterns(setting: str, existing: str, additions: Iterable[str]) -> str:
    """One regex for `re.fullmatch`: what `existing` or any of `additions` matches."""
    alternatives = list(additions)
    if not existing:
        return "|".join(alternatives)
    flags = _LEADING_FLAGS.match(existing)
    group = f"(?:{existing})"
    if (
        flags is not None
    ):  # `(?i)` may stand at the start of an expression only, `(?i:...)` anywhere
        # in verbose mode a comment on the last line would swallow the bracket
        end = "\n)" if "x" in flags[1] else ")"
        group = f"(?{flags[1]}:{existing[flags.end() :]}{end}"
    combined = "|".join([group, *alternatives])
    try:
        re.compile(combined)
    except re.error as error:
        raise ConfigError(
            f"{setting}={existing!r} is no regular expression ({error}); pass a valid one, or a "
            f"list of names."
        ) from error
    return combined


def as_names(setting: str, existing: Iterable[str] | None) -> list[str]:
    """A new list of the caller's names: sorted where the caller gave a set, each once.

    Raises:
        ConfigError: an entry is no string, or `existing` is no list, tuple or set.
    """
    if existing is None:
        return []
    if not isinstance(existing, (list, tuple, set, frozenset)):
        raise ConfigError(
            f"{setting} is a {type(existing).__name__}; expected None, a list, tuple or set of "
            f"names, or a regex string."
        )
    for entry in existing:
        if not isinstance(entry, str):
            raise ConfigError(f"{setting} holds {entry!r}, which is no string; pass names only.")
    names = sorted(existing) if isinstance(existing, (set, frozenset)) else existing
    return list(dict.fromkeys(names))


def names_parameter(target: str, name: str) -> bool:
    """Whether PEFT takes `target` for the parameter `name`: in full, or its end after a dot."""
    return name == target or name.endswith(f".{target}")


def is_all_linear(config: PeftConfig) -> bool:
    """Whether the caller asked for every Linear layer."""
    targets = getattr(config, "target_modules", None)
    return isinstance(targets, str) and targets.lower() == ALL_LINEAR


def reached_modules(model: nn.Module, config: PeftConfig) -> list[str]:
    """Modules that PEFT matches with the config as it stands, those of adapters excepted."""
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


def rewritten(model: nn.Module, config: PeftConfig) -> PeftConfig | None:
    """The config as PEFT would rewrite it for this model type; None where it changes no target.

    A rewrite that raises (one of two fused projections named alone) counts as one that targets
    nothing.
    """
    if config.peft_type != PeftType.LORA or not hasattr(
        getattr(model, "config", None), "model_type"
    ):
        return None
    try:
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError:  # a PEFT without the rewrite
        return None
    probe = copy.deepcopy(config)
    try:
        convert_peft_config_for_transformers(probe, model=model, conversions=None)
    except ValueError:
        probe.target_modules, probe.target_parameters = set(), []
        return probe
    before = _as_comparable(config.target_modules), _as_comparable(config.target_parameters)
    after = _as_comparable(probe.target_modules), _as_comparable(probe.target_parameters)
    return None if before == after else probe


def _as_comparable(targets: Any) -> Any:
    return targets if isinstance(targets, str) else set(targets or ())


def exact_targets(
    model: nn.Module, config: PeftConfig, layout: ModelLayout
) -> tuple[set[ExactName], list[str]]:
    """What the caller's `target_modules` reach: modules by exact name, and router weights.

    transformers v5 keeps most routers as a module with a bare `weight`, which PEFT adapts as a
    parameter: the second value names those weights.
    """
    routers = {router.name for router in layout.routers}
    modules: set[ExactName] = set()
    parameters = []
    for name in reached_modules(model, config):
        module = model.get_submodule(name)
        weight = getattr(module, "weight", None)
        if (
            plain_name(name) in routers
            and not _is_adaptable(module)
            and isinstance(weight, torch.Tensor)
        ):
            parameters.append(f"{plain_name(name)}.weight")
        else:
            modules.add(ExactName(name))
    return modules, parameters


def _is_adaptable(module: nn.Module) -> bool:
    return isinstance(module, (BaseTunerLayer, nn.Linear, nn.Embedding, nn.modules.conv._ConvNd))


Names: TypeAlias = "list[str] | tuple[str, ...] | set[str] | frozenset[str]"


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
    paths = exclude_paths(model)
    if paths and routers:
        from ..detection.detect import detect

        paths += [found.name for found in detect(base_model(model)).routers if found.plain_linear]
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
    names = []
    if packed_parameters(model):
        names = expert_parameters(model, True if roles is None else roles)
    return _extend("target_parameters", existing, names)


def _extend(setting: str, existing: str | Names | None, names: list[str]) -> list[str] | str:

    if isinstance(existing, str):
        if not names:
            return existing
        return combine_patterns(setting, existing, [re.escape(name) for name in names])
    return list(dict.fromkeys([*as_names(setting, existing), *names]))


__all__ = [
    "exclude_modules",
    "target_parameters",
]
