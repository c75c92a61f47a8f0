"""Values of a LoraConfig's fields for a model with packed experts, and two lists for hosts.

`resolve_targets` returns three fields; neither the config nor the model is changed.
`check_supported` refuses settings that packed experts do not support, before PEFT reads them.

    exclude_modules    + every packed experts module and the modules inside it, which leaf names
                       would reach; with "all-linear" also routers that are Linear layers, and
                       layers that LoRA cannot serve (unfit.py)
    target_modules     full names, where PEFT would rewrite the caller's spelling (names.py)
    target_parameters  full names of packed parameters: the only spelling that PEFT matches on a
                       parametrized module
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from typing import Any, cast, overload

from peft import LoraConfig, PeftConfig, PeftType
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn
from transformers.pytorch_utils import Conv1D

from ..checkpoint.adapter import LORA_VARIANTS, Variant, unsupported
from ..detection.detect import detect
from ..detection.tree import join
from ..errors import ConfigError
from ..experts.forward import can_serve
from ..layout import ModelLayout, Router, listed, unwrapped_name
from ..packing.parametrize import is_packed_linear, read_packed
from .names import (
    ADAPTABLE,
    ExactName,
    Names,
    as_names,
    base_model,
    changed,
    check_packed,
    exact_targets,
    expert_parameters,
    extend,
    is_all_linear,
    names_parameter,
    packed_modules,
    packed_parameters,
    patterns,
    reached_modules,
    rewritten,
)
from .unfit import unfit_linears

WARNING = "target_modules names .* packed expert weights .* get no LoRA"  # the message, as a regex

_HOW = ": pass experts=True"

# One expert's matrices in transformers v4 and so in most tutorials, besides the model's own names
# of fused ones.
_MATRICES = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
_UNSUPPORTED: tuple[Variant, ...] = (
    *LORA_VARIANTS,
    ("lora_bias", (False,), "an expert weight has no bias for LoRA to add to"),
    ("init_lora_weights", (True, False, "gaussian"), "it reads or changes the unpacked weights"),
    ("fan_in_fan_out", (False, None), "expert weights carry their own orientation"),
)


@dataclass(frozen=True)
class Targets:
    """Values of three fields of a LoraConfig, for one model and one config."""

    excludes: str | Sequence[str] | None = None
    modules: str | Collection[str] | None = None
    parameters: Sequence[str] | None = None
    notes: tuple[str, ...] = ()  # warnings for when the adapter is saved
    experts: tuple[str, ...] = ()  # the packed parameters that get LoRA, in model order
    written: Mapping[str, Any] = field(default_factory=dict)  # the fields in the caller's spelling
    left_out: str = ""  # one sentence on modules that targets name and LoRA cannot serve


def resolve_targets(
    model: nn.Module,
    config: PeftConfig | None = None,
    *,
    experts: bool | Collection[str] = False,
    router: bool = False,
) -> Targets:
    """Return the fields of PEFT's config for this model, which may be a `PeftModel`.

    `config` is in the caller's own spelling; None targets nothing.
    """
    model = base_model(model)
    packed = packed_parameters(model)
    added = expert_parameters(model, experts) if experts and packed else []
    paths = [
        unwrapped_name(path)
        for name, module in packed_modules(model)
        for path, _ in module.named_modules(prefix=name)
        if path
    ]
    if config is None:
        return Targets(excludes=paths, parameters=added, experts=tuple(added))
    added = _in_layers(config, added) if added else added

    # Routers matter only where a target could reach one.
    matter = router or is_all_linear(config) or rewritten(model, config) is not None
    layout = detect(model) if matter else ModelLayout()
    named_routers = (  # by their names before an adapter; a packed one is a Linear layer as well
        replace(one, name=unwrapped_name(one.name), plain_linear=one.plain_linear or one.packed)
        for one in layout.routers
    )
    layout = replace(layout, routers=tuple(named_routers))
    asked: Any = _with_routers(model, config, layout.routers) if router else config
    excludes = asked.exclude_modules
    if packed:
        if is_all_linear(asked):
            paths += _not_all_linear(model, layout.routers, router)
        excludes = extend("exclude_modules", excludes, paths)
    modules, router_weights, notes = _resolve_modules(model, asked, excludes, layout)
    modules, left_out = _leave_out_unserved(model, asked, excludes, modules)
    named = as_names("target_parameters", getattr(asked, "target_parameters", None))
    named = _merge(named, router_weights, added)
    if named and not isinstance(config, LoraConfig):
        raise ConfigError(
            f"{type(config).__name__} cannot adapt parameters; use a LoraConfig for "
            "target_parameters."
        )
    parameters = _full_names(model, named, packed)
    fields = ("exclude_modules", "target_modules", "target_parameters")
    written = {field: getattr(asked, field, None) for field in fields}
    if added:
        written["target_parameters"] = _merge(written["target_parameters"], added)
    if asked.target_modules is None or is_all_linear(asked) or left_out:
        del written["target_modules"]  # PEFT writes the modules' names instead
    return Targets(
        excludes=excludes,
        modules=modules,
        parameters=parameters or getattr(asked, "target_parameters", None),
        notes=notes,
        experts=tuple(name for name in packed if name in parameters),
        written=written,
        left_out=left_out,
    )


def _in_layers(config: Any, names: list[str]) -> list[str]:
    if getattr(config, "layers_to_transform", None) in (None, []):
        return names
    # PEFT looks at layers for names in `target_modules` only
    fields: dict[str, Any] = {"exclude_modules": None, "modules_to_save": None}
    owners = {name: name.rpartition(".")[0] for name in names}
    leaves = {owner.rpartition(".")[2] for owner in owners.values()}
    probe = changed(config, target_modules=leaves, **fields)
    kept = [name for name in names if check_target_module_exists(probe, owners[name])]
    if not kept:
        raise ConfigError(
            f"layers_to_transform={config.layers_to_transform!r} leaves no layer with packed "
            f"experts, and LoRA on them is asked for: they are in {patterns(names)}."
        )
    return kept


def _with_routers(model: nn.Module, config: PeftConfig, routers: Sequence[Router]) -> PeftConfig:
    asked: Any = changed(config)
    owners = dict(model.named_modules())
    modules = [ExactName(router.name) for router in routers if router.plain_linear]
    weights = [
        f"{router.name}.weight" if router.name in owners else router.name
        for router in routers
        if not router.plain_linear
    ]
    if modules and not is_all_linear(config):
        targets = extend("target_modules", asked.target_modules, modules)
        asked.target_modules = targets if isinstance(targets, str) else set(targets)
    if weights:
        asked.target_parameters = _merge(getattr(asked, "target_parameters", None), weights)
    return cast(PeftConfig, asked)


def _not_all_linear(model: nn.Module, routers: Sequence[Router], router: bool) -> list[str]:
    """Return what PEFT's "all-linear" reaches and ours does not.

    These are routers that are Linear layers, but for plain ones where `router` asks for LoRA on
    them, layers that LoRA cannot serve, and others that share a weight with one of these, as
    diffusion_gemma's do.
    """
    linears = {unwrapped_name(n): m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    names = [
        one.name for one in routers if (not router if one.plain_linear else one.name in linears)
    ]
    names += unfit_linears(model)
    weights = {id(getattr(model.get_submodule(name), "weight", None)) for name in names}
    tied = [name for name, module in linears.items() if id(module.weight) in weights]
    return _merge(names, tied)


def _resolve_modules(
    model: nn.Module, asked: Any, excludes: Any, layout: ModelLayout
) -> tuple[str | Collection[str] | None, Sequence[str], tuple[str, ...]]:
    if not isinstance(asked, LoraConfig):
        return asked.target_modules, (), ()
    probe = changed(asked, exclude_modules=excludes)
    if exact := exact_targets(model, probe, layout):
        names, router_weights, note = exact
        return names, router_weights, (note,) if note else ()
    if is_all_linear(asked):
        # PEFT writes the modules' names instead of the word, with the caller's excludes: routers
        # that are Linear by class (phimoe, llama4, dbrx, ...) would get LoRA when the file is
        # loaded. The word stays where our excludes change nothing.
        reached = set(reached_modules(model, probe))
        if reached != set(reached_modules(model, asked)):
            return reached, (), ()
    return asked.target_modules, (), ()


def _leave_out_unserved(
    model: nn.Module, asked: Any, excludes: Any, modules: Any
) -> tuple[str | Collection[str] | None, str]:
    """Return `target_modules` without modules of a class around a Linear layer, and a sentence.

    PEFT refuses such a class, as Gemma4ClippableLinear of Gemma-4's towers, whose layers have the
    names of the language model's. Where nothing else is named, that is an error.
    """
    if not is_lora(asked) or modules is None or is_all_linear(asked):
        return modules, ""
    own: Any = getattr(asked, "_custom_modules", None) or ()
    served = (*ADAPTABLE, Conv1D, nn.MultiheadAttention, AuxiliaryTrainingWrapper, *own)
    reached, around = [], {}
    probe = changed(asked, exclude_modules=excludes, target_modules=modules)
    for name in reached_modules(model, probe):
        module = model.get_submodule(name)
        parts = () if isinstance(module, served) else module.named_modules()
        inner = next((path for path, part in parts if isinstance(part, nn.Linear)), None)
        if inner is None:
            reached.append(ExactName(name))
        else:
            around[unwrapped_name(name)] = type(module).__name__, unwrapped_name(inner)
    if not around:
        return modules, ""
    name, (_, inner) = next(iter(around.items()))
    message = (
        f"target_modules names {patterns(around)} ({listed(_merge(k for k, _ in around.values()))})"
        ", and PEFT adapts Linear layers, not modules around them"
    )
    example = repr(f"{name.rpartition('.')[2]}.{inner}")
    if not reached:
        raise ConfigError(f"{message}: name the layers inside, as in {example}.")
    return set(reached), (
        f"{message}: these are left out, all else gets LoRA; name the layers inside, as in "
        f"{example}, to train them, or name these in exclude_modules to get no warning."
    )


def linear_experts(model: nn.Module) -> dict[str, str]:
    """Return the Linear layers of experts that are lists of them: full name -> name for a target.

    The latter is the same in all layers of a model, unless another module's name ends so. Empty for
    a model with fused experts that are not packed, which has to be said first.
    """
    layout = detect(model)
    if layout.experts and not packed_parameters(model):
        return {}
    found: dict[str, str] = {}
    for experts in layout.linear_experts:
        owner = unwrapped_name(experts.name)
        for item, expert in model.get_submodule(experts.name).named_children():
            parts = {unwrapped_name(path) for path, _ in expert.named_modules()}
            for linear in parts.intersection(map(unwrapped_name, experts.linear_names)):
                found[f"{owner}.{item}.{linear}"] = f"{owner.rpartition('.')[2]}.{item}.{linear}"
    ends = set(found.values())
    depths = {end.count(".") + 1 for end in ends}
    others = {unwrapped_name(name) for name, _ in model.named_modules()}.difference(found)
    if any(".".join(name.split(".")[-depth:]) in ends for name in others for depth in depths):
        return {name: name for name in found}
    return found


def add_targets(config: PeftConfig, layers: Mapping[str, str]) -> None:
    """Add these layers, as `linear_experts` returns them, to the config's `target_modules`."""
    asked: Any = config
    if not is_all_linear(asked):
        regex = isinstance(asked.target_modules, str)
        names = list(layers) if regex else _merge(layers.values())
        targets = extend("target_modules", asked.target_modules, names)
        asked.target_modules = targets if regex else set(targets)


def _full_names(model: nn.Module, named: list[str], packed: Collection[str]) -> list[str]:
    # With one packed parameter PEFT treats the whole module as parametrized, so that its plain
    # parameters need full names too.
    beside = [
        join(name, parameter)
        for name, module in packed_modules(model)
        for parameter, _ in module.named_parameters(recurse=False)
    ]
    known = _merge(packed, beside)
    full = [name for name in known if any(names_parameter(target, name) for target in named)]
    elsewhere = {
        unwrapped_name(name)
        for name, _ in model.named_parameters()
        if ".parametrizations." not in name
    }.difference(known)
    kept = []
    for target in named:
        if any(names_parameter(target, name) for name in elsewhere):
            kept.append(target)
        elif not any(names_parameter(target, name) for name in full):
            near = _nearest(target, [*known, *sorted(elsewhere)])
            say = f"did you mean {near}; " if near else ""
            raise ConfigError(
                f"target_parameters names {target!r}, which is no parameter of this model: {say}"
                "the experts' names are what moe_qlora.target_parameters(model) returns."
            )
    return _merge(full, kept)


def _merge(*groups: Iterable[str] | None) -> list[str]:
    return list(dict.fromkeys(name for group in groups for name in group or ()))


@overload
def exclude_modules(model: nn.Module, existing: str, *, routers: bool = False) -> str: ...
@overload
def exclude_modules(
    model: nn.Module, existing: Names | None = None, *, routers: bool = False
) -> list[str]: ...
def exclude_modules(
    model: nn.Module, existing: str | Names | None = None, *, routers: bool = False
) -> list[str] | str:
    """Return the `exclude_modules` with which no module target hits packed experts.

    For each packed experts module that is its own path and the path of every module inside it, in
    full, so that `mlp.shared_expert.down_proj` keeps its LoRA while
    `mlp.experts.parametrizations.down_proj` gets none.

    Args:
        model: Any model, a `PeftModel` included; names are those of the model without adapters.
        existing: The caller's own excludes; never changed.
        routers: Exclude the routers that are plain Linear layers too.

    Returns:
        A new list for None, a list, a tuple or a set; for a string, a regex in PEFT, one regex for
        `re.fullmatch`. Where no expert is packed, nothing is added.

    Raises:
        ConfigError: `existing` is no regex, or holds something else than names.
    """
    paths = list(resolve_targets(model).excludes or ())
    if paths and routers:
        paths += [one.name for one in detect(base_model(model)).routers if one.plain_linear]
    return extend("exclude_modules", existing, paths)


@overload
def target_parameters(
    model: nn.Module,
    existing: str,
    *,
    roles: Collection[str] | None = None,
    unpacked_ok: bool = False,
) -> str: ...
@overload
def target_parameters(
    model: nn.Module,
    existing: Names | None = None,
    *,
    roles: Collection[str] | None = None,
    unpacked_ok: bool = False,
) -> list[str]: ...
def target_parameters(
    model: nn.Module,
    existing: str | Names | None = None,
    *,
    roles: Collection[str] | None = None,
    unpacked_ok: bool = False,
) -> list[str] | str:
    """Return the `target_parameters` for LoRA on every packed expert parameter.

    These are full dotted names, as in `model.layers.0.mlp.experts.gate_up_proj`: PEFT matches them
    on packed and on unpacked models alike, whereas it finds a shorter ending on unpacked ones only.

    Args:
        model: Any model, a `PeftModel` included; names are those of the model without adapters.
        existing: The caller's own targets; never changed.
        roles: Only parameters with one of these roles ("gate_up", "gate", "up", "down", ...).
        unpacked_ok: The model's experts are there and are not packed on purpose: no warning, and no
            error.

    Returns:
        A new list for None, a list, a tuple or a set; one regex for a string. Where no expert is
        packed, nothing is added, and a warning says so if the model has experts.

    Raises:
        ConfigError: `existing` is no regex or holds something else than names, no parameter has the
            role, or no expert is packed although the model's quantization_config asks for it.
    """
    if not packed_parameters(model):
        check_packed(model, unpacked_ok=unpacked_ok, stacklevel=2)
    targets = resolve_targets(model, experts=True if roles is None else roles)
    return extend("target_parameters", existing, targets.experts)


def check_named(
    model: nn.Module, config: PeftConfig, targets: Targets, packed: Collection[str]
) -> str:
    """Return one sentence where `target_modules` names experts that get no LoRA, or "".

    `config` is in the caller's spelling. Where nothing else gets LoRA either, that is an error.
    The caller's own excludes of experts are on purpose.
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


def check_fit(model: nn.Module, config: PeftConfig, targets: Targets) -> str:
    """Return one sentence where targets reach Linear layers that LoRA cannot serve, or ""."""
    probe: Any = changed(config, exclude_modules=targets.excludes)
    probe.target_modules = targets.modules
    if not (unfit := unfit_linears(model)):
        return ""
    reached = [name for name in reached_modules(model, probe) if unwrapped_name(name) in unfit]
    if not reached:
        return ""
    reasons = dict.fromkeys(unfit[unwrapped_name(name)] for name in reached)
    return (
        f"target_modules reaches {patterns(reached)}, and {' and '.join(reasons)}: LoRA there "
        "fails; leave it out."
    )


def check_spelling(model: nn.Module, config: PeftConfig, packed: Collection[str]) -> str:
    """Return one sentence where entries of `target_modules` name no module beside others, or ""."""
    asked: Any = config
    if isinstance(asked.target_modules, str) or not asked.target_modules:
        return ""
    anywhere: dict[str, Any] = {"exclude_modules": None, "modules_to_save": None}
    if getattr(asked, "layers_to_transform", None) is not None:
        anywhere |= {"layers_to_transform": None, "layers_pattern": None}
    names = [unwrapped_name(name) for name, _ in model.named_modules()]
    # A list for many architectures has names of others, spelled right.
    of_others = {*_MATRICES}.union(*TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.values())
    lost = []
    for word in set(as_names("target_modules", asked.target_modules)) - of_others:
        probe = changed(asked, target_modules={word}, **anywhere)
        reaches = any(check_target_module_exists(probe, name) for name in names if name)
        if not reaches and not any(names_expert(probe, name) for name in packed):
            near = _nearest(word, names, asked.target_modules)
            lost.append(f"{word!r}" + (f" (did you mean {near}?)" if near else ""))
    if not lost or len(lost) == len(asked.target_modules):  # PEFT raises where none is left
        return ""
    return (
        f"target_modules names {', '.join(sorted(lost))}, and no module of this model is called "
        "so: all else gets LoRA; mend the name or leave it out."
    )


def _nearest(target: str, names: Iterable[str], others: Collection[str] = ()) -> str:
    depth = target.count(".") + 1
    ends = _merge(".".join(name.split(".")[-depth:]) for name in names)
    near = get_close_matches(target, [end for end in ends if end not in others], n=3)
    return " or ".join(map(repr, near))


def for_target_names(message: str) -> str:
    """Return the message of `check_named` for targets separated by commas, as `plan` has them."""
    head, found, _ = message.partition(_HOW)
    cure = ': name experts among the targets, as in "attention,experts".'
    return head + cure if found else message


def names_expert(config: Any, name: str) -> bool:
    """Whether module targets name this parameter, its module, or matrices of one expert."""
    owner, _, leaf = name.rpartition(".")
    everything = changed(config, target_modules=".*")
    if not all(check_target_module_exists(everything, path) for path in (owner, name)):
        return False
    owners = (owner, f"{owner}.0")  # an expert of its own, before experts were fused
    paths = [owner, *(f"{path}.{matrix}" for path in owners for matrix in (leaf, *_MATRICES))]
    return any(check_target_module_exists(config, path.lstrip(".")) for path in paths)


def is_lora(config: PeftConfig) -> bool:
    """Tell whether this is LoRA, a host's own class included; AdaLoRA is so by class alone."""
    return isinstance(config, LoraConfig) and config.peft_type == PeftType.LORA


def check_modules_to_save(model: nn.Module, config: PeftConfig, packed: Collection[str]) -> None:
    """Refuse to train packed weights in full: their weight, their module, or one around it."""
    advice = dict.fromkeys(packed, "use target_parameters to train LoRA on it")
    for name, module in model.named_modules():
        if is_packed_linear(module):
            advice[unwrapped_name(name)] = (
                "name it in llm_int8_skip_modules of the BitsAndBytesConfig, or in target_modules "
                "to train LoRA on it"
            )
    for name, instead in advice.items():
        parts = name.split(".")
        paths = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
        for key in getattr(config, "modules_to_save", None) or ():
            if any(path.endswith(key) for path in paths):  # as PEFT does, which needs no dot
                raise ConfigError(
                    f"modules_to_save={key!r} asks to train {name} in full, which is packed and "
                    f"stays frozen; leave it out, or {instead}."
                )


def check_supported(
    config: PeftConfig, experts: Collection[str], packed: Mapping[str, nn.Module]
) -> None:
    """Refuse settings, and shapes of weights, that LoRA on packed parameters cannot have."""
    if not experts:
        return
    first, *_ = experts
    for name in experts:
        shape = tuple(read_packed(packed[name], name.rpartition(".")[2]).shape)
        if len(shape) > 3:
            raise ConfigError(
                f"target_parameters names {name}, a weight of shape {shape}: PEFT adapts "
                "parameters of two or three dimensions; leave it out."
            )
    if found := unsupported(_UNSUPPORTED, partial(getattr, config)):
        field, value, reason = found
        shown = value if isinstance(value, (bool, int, str)) else type(value).__name__
        raise ConfigError(
            f"{field}={shown!r} does not work for LoRA on packed experts ({first}): {reason}; "
            "unset it, or leave the experts out of target_parameters."
        )
    if not is_lora(config):
        raise ConfigError(
            f"{type(config).__name__} does not work for packed experts ({first}); use a LoraConfig "
            "for them."
        )
    for name in experts:
        check_dropout(name, packed[name], getattr(config, "lora_dropout", 0.0))


def check_dropout(name: str, module: nn.Module, probability: float) -> None:
    """Refuse dropout where only the module's own forward runs, which reads the sum W + s B A."""
    if probability and not can_serve(module):
        raise ConfigError(
            f"lora_dropout={probability} does not work for {name} of {type(module).__name__}, "
            "whose forward multiplies by the weight itself; set lora_dropout=0, or leave these "
            "experts out of target_parameters."
        )
