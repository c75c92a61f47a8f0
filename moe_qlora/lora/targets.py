"""Which modules and packed parameters a LoraConfig means, and the fields that PEFT gets instead.

`target_modules`, `exclude_modules` and `target_parameters` hold names, each of which matches full
names and their ends after a dot, or one regular expression for `re.fullmatch`. PEFT matches
parameters of a parametrized module by full names alone. It rewrites `target_modules` of 29 model
types into `target_parameters` of the fused experts and the router, so that Linear layers of the
same leaf names lose their LoRA; the rewrite tests `target.endswith(".down_proj")`, which is False
of an `ExactName`.
"""

import copy
import re
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar, cast

import torch
from peft import LoraConfig, PeftConfig, PeftType
from peft.tuners.tuners_utils import (
    BaseTunerLayer,
    _check_lora_target_modules_mamba,
    _maybe_include_all_linear_layers,
    check_target_module_exists,
)
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..checkpoint.adapter import LORA_VARIANTS, Variant, unsupported
from ..detection.detect import detect
from ..detection.tree import join
from ..errors import AdapterError, ConfigError
from ..experts.forward import can_serve
from ..layout import Router, base_model, listed, name_pattern, unwrapped, unwrapped_name
from ..packing.parametrize import is_packed_linear, packed_names
from ..packing.selection import weights_to_pack
from ..packing.settings import CodecSettings

Config = TypeVar("Config", bound=PeftConfig)

FIELDS = ("exclude_modules", "target_modules", "target_parameters")
ALL_LINEAR = "all-linear"
WARNING = "target_modules names .* packed expert weights .* get no LoRA"  # the message, as a regex
# One expert's matrices in transformers v4 and so in most tutorials, besides the model's own names
# of fused ones.
_MATRICES = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
_ADAPTABLE = (BaseTunerLayer, nn.Linear, nn.Embedding, nn.modules.conv._ConvNd)
_SERVED = (*_ADAPTABLE, Conv1D, nn.MultiheadAttention, AuxiliaryTrainingWrapper)
# Settings that LoRA on packed experts cannot have: the field, the values that leave it off, why.
_UNSUPPORTED: tuple[Variant, ...] = (
    *LORA_VARIANTS,
    ("lora_bias", (False,), "an expert weight has no bias for LoRA to add to"),
    ("init_lora_weights", (True, False, "gaussian"), "it reads or changes the unpacked weights"),
    ("fan_in_fan_out", (False, None), "expert weights carry their own orientation"),
)
_RELOAD = (
    "stock PEFT rewrites the target_modules of this adapter for its model type "
    "({0.model_type}) and would load its targets wrong; load it with moe_qlora.load_adapter."
)


# What is refused.


def refusals(
    model: nn.Module, config: Any, experts: Sequence[str], packed: Mapping[str, nn.Module]
) -> Iterator[str]:
    """Yield a sentence on each setting that packed weights, or LoRA on `experts`, cannot have."""
    saved = tuple(getattr(config, "modules_to_save", None) or ())
    linears = [unwrapped_name(n) for n, m in model.named_modules() if saved and is_packed_linear(m)]
    for name in (*packed, *linears):
        paths = list(accumulate(name.split("."), "{}.{}".format))
        for key in saved:
            if any(path.endswith(key) for path in paths):  # as PEFT does, which needs no dot
                yield (
                    f"modules_to_save={key!r} asks to train {name} in full, which is packed and "
                    "stays frozen; train LoRA on it, by target_modules or target_parameters, or "
                    "name it in llm_int8_skip_modules of the BitsAndBytesConfig."
                )
    if experts and (found := unsupported(_UNSUPPORTED, partial(getattr, config))):
        setting, value, reason = found
        shown = value if isinstance(value, (bool, int, str)) else type(value).__name__
        yield (
            f"{setting}={shown!r} does not work for LoRA on packed experts ({experts[0]}): "
            f"{reason}; unset it, or leave the experts out of target_parameters."
        )
    if experts and not is_lora(config):
        kind = type(config).__name__
        yield f"{kind} does not work for packed experts ({experts[0]}); use a LoraConfig for them."
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


def check_adapter_names(model: nn.Module, adapters: Collection[str]) -> None:
    """Raise where one of several adapters has the name of a part of the model."""
    # PEFT leaves tensors out of an adapter's file whose names contain another adapter's name.
    own = {"model", "weight", "bias", *("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")}
    names = (re.split(r"\.(?=lora_|modules_to_save)", n)[0] for n, _ in model.named_modules())
    if len(adapters) > 1 and (taken := own.union(*(n.split(".") for n in names)) & {*adapters}):
        raise AdapterError(
            f"adapter {min(taken)!r} has the name of a part of the model, and PEFT would leave "
            "LoRA there out of the files of other adapters: give it another name."
        )


# Packed parameters, and Linear layers that LoRA cannot serve.


def packed_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield each module that owns packed experts, under the name it has without adapters."""
    for name, module in base_model(model).named_modules():
        if packed_names(module):
            yield unwrapped_name(name), module


def packed_parameters(model: nn.Module) -> dict[str, nn.Module]:
    """Map the full name (without adapters) of each packed parameter to the module that owns it."""
    return {
        join(name, parameter): module
        for name, module in packed_modules(model)
        for parameter in packed_names(module)
    }


def expert_parameters(model: nn.Module, roles: bool | Collection[str] = True) -> list[str]:
    """Return the full names of the packed parameters, or of those with one of these roles."""
    packed = packed_parameters(model)
    if roles is True or not packed:
        return list(packed)
    if not isinstance(roles, Collection):
        raise ConfigError(f"experts is {roles!r}; give True, a list of roles, or one role.")
    wanted = {roles} if isinstance(roles, str) else {*roles}
    role_of = {
        unwrapped_name(name): param.role
        for param in detect(base_model(model))
        for name in param.names
        if unwrapped_name(name) in packed
    }
    known = sorted(set(role_of.values()))
    if unknown := sorted(wanted.difference(known)):
        raise ConfigError(
            f"no packed expert parameter has the role {unknown[0]!r}; this model has {known}."
        )
    return [name for name in packed if role_of.get(name) in wanted]


def check_packed(model: nn.Module, *, unpacked_ok: bool, stacklevel: int) -> None:
    """Warn that no expert is packed, or raise where the model's config asks for it."""
    model = base_model(model)
    if unpacked_ok or packed_parameters(model) or not (layout := detect(model)).experts:
        return
    config = getattr(getattr(model, "config", None), "quantization_config", None)
    unpacked, settings = list(layout.experts), None
    with suppress(ConfigError), warnings.catch_warnings():  # of another quantization method
        warnings.simplefilter("ignore")  # the load has warned of skip patterns
        if config is not None:
            settings = CodecSettings.from_config(config)
            unpacked = weights_to_pack(model, layout, settings)
    if not unpacked:  # llm_int8_skip_modules names them
        return
    asks = f", and the model's quantization_config asks for {settings.kind}" if settings else ""
    said = (
        f"{len(unpacked)} expert weights are not packed ({patterns(p.name for p in unpacked)})"
        f"{asks}: call moe_qlora.quantize_experts(model), or load the model under "
        "moe_qlora.enabled() with a BitsAndBytesConfig; unpacked_ok=True accepts them."
    )
    if settings:
        raise ConfigError(said)
    warnings.warn(said, UserWarning, stacklevel=stacklevel + 1)


def unfit_linears(model: nn.Module) -> list[str]:
    """Return the full names, without adapters, of Linear layers on which LoRA fails."""
    # The model's own code derives their class from `nn.Linear` and gives it a forward (routers,
    # DeepSeek-V4's grouped projection), or PEFT refuses LoRA on them (Nemotron-H's Mamba layers).
    own_code = {type(m).__module__ for m in model.modules() if isinstance(m, PreTrainedModel)}

    def is_unfit(path: str, kind: type[nn.Linear]) -> bool:
        try:
            _check_lora_target_modules_mamba(LoraConfig(), model, path.rpartition(".")[2])
        except ValueError:
            return True
        return kind.forward is not nn.Linear.forward and kind.__module__ in own_code

    kinds = {unwrapped_name(name): type(unwrapped(one)) for name, one in model.named_modules()}
    return [
        path for path, kind in kinds.items() if issubclass(kind, nn.Linear) and is_unfit(path, kind)
    ]


# How PEFT matches names.


class ExactName(str):
    """A module's full name, which PEFT matches as it stands and never rewrites."""

    __slots__ = ()

    def endswith(self, *args: Any) -> bool:
        return False


def names_parameter(target: str, name: str) -> bool:
    """Whether PEFT matches `target` with this parameter: its full name, or the end of it."""
    return name == target or name.endswith(f".{target}")


def is_all_linear(config: Any) -> bool:
    """Whether the caller asked for every Linear layer."""
    return str(getattr(config, "target_modules", None)).lower() == ALL_LINEAR


def is_lora(config: PeftConfig) -> bool:
    """Whether this is LoRA, a host's own class included; AdaLoRA derives from `LoraConfig` too."""
    return isinstance(config, LoraConfig) and config.peft_type == PeftType.LORA


def changed(config: Config, **fields: Any) -> Config:
    """Return a shallow copy of a config with other values of these fields."""
    probe = copy.copy(config)
    for name, value in fields.items():
        setattr(probe, name, value)
    return probe


def rewritten(model: nn.Module, config: Config) -> Config | None:
    """Return the config as PEFT would rewrite it for this model, or None for no change."""
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if config.peft_type != PeftType.LORA or model_type is None:
        return None
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    probe: Any = copy.deepcopy(config)
    try:
        convert_peft_config_for_transformers(probe, model=model, conversions=None)
    except ValueError:  # one of two fused projections named alone: nothing is targeted
        probe.target_modules, probe.target_parameters = set(), []
        return cast(Config, probe)
    return None if same_names(config, probe, FIELDS[1:]) else cast(Config, probe)


def reached_modules(model: nn.Module, config: Any) -> list[str]:
    """Return the names of modules that PEFT matches with the config, without adapters' own."""
    if is_all_linear(config):
        config = _maybe_include_all_linear_layers(copy.copy(config), model)
    if config.target_modules is None:
        return []
    inside_adapter: tuple[str, ...] = ()
    names = []
    for name, module in model.named_modules():
        if not name or name.startswith(inside_adapter):
            continue
        if isinstance(module, BaseTunerLayer):
            inside_adapter += (name + ".",)
        if check_target_module_exists(config, name):
            names.append(name)
    return names


def names_expert(config: Any, name: str) -> bool:
    """Whether module targets name this parameter, its module, or matrices of one expert."""
    owner, _, leaf = name.rpartition(".")
    everything = changed(config, target_modules=".*")
    if not all(check_target_module_exists(everything, path) for path in (owner, name)):
        return False
    owners = (owner, f"{owner}.0")  # an expert of its own, before experts were fused
    paths = [owner, *(f"{path}.{matrix}" for path in owners for matrix in (leaf, *_MATRICES))]
    return any(check_target_module_exists(config, path.lstrip(".")) for path in paths)


def same_names(one: Any, other: Any, fields: Iterable[str]) -> bool:
    """Whether two configs have the same names in these fields: a regex, or names in any order."""
    pairs = [(getattr(one, field), getattr(other, field)) for field in fields]
    return all(
        a == b if str in (type(a), type(b)) else {*(a or ())} == {*(b or ())} for a, b in pairs
    )


def as_names(setting: str, existing: Iterable[str] | None) -> list[str]:
    """Return a new list of the caller's names, each once; a set's names are sorted."""
    if existing is None:
        return []
    if not isinstance(existing, (list, tuple, set, frozenset)):
        said = "expected None, a list, tuple or set of names, or a regex string"
        raise ConfigError(f"{setting} is a {type(existing).__name__}; {said}.")
    for entry in existing:
        if not isinstance(entry, str):
            raise ConfigError(f"{setting} holds {entry!r}, which is no string; pass names only.")
    return _merge(sorted(existing) if isinstance(existing, (set, frozenset)) else existing)


def extend(setting: str, existing: Collection[str] | None, new: Collection[str]) -> list[str] | str:
    """Return the value of a setting with names added: one regex for a string, else a new list."""
    if not isinstance(existing, str):
        return _merge(as_names(setting, existing), new)
    escaped = [re.escape(name) for name in new]
    if not existing or not escaped:
        return existing or "|".join(escaped)
    combined = "|".join([f"(?:{existing})", *escaped])  # `(?i)` is refused there, `(?i:...)` is not
    try:
        re.compile(combined)
    except re.error as error:
        said = f"{setting}={existing!r} is no regular expression ({error})"
        raise ConfigError(f"{said}; pass a valid one, or a list of names.") from error
    return combined


def _merge(*groups: Iterable[str] | None) -> list[str]:
    return list(dict.fromkeys(name for group in groups for name in group or ()))


def patterns(names: Iterable[str]) -> str:
    """Return names for a message, those of all layers as one: `layers.*.mlp.experts.down_proj`."""
    return listed(list(dict.fromkeys(name_pattern(name) for name in names)))


# The fields for PEFT.


@dataclass(frozen=True)
class Targets:
    """Three fields of a LoraConfig for one model, and sentences for the caller."""

    excludes: str | Sequence[str] | None
    modules: str | Collection[str] | None
    parameters: Sequence[str] | None
    experts: tuple[str, ...]  # the packed parameters that get LoRA, in model order
    written: Mapping[str, Any] = field(default_factory=dict)  # the fields in the caller's spelling
    # sentences on targets that LoRA cannot serve, and on what stock PEFT would load wrong
    notes: Sequence[str] = ()


def resolve_targets(
    model: nn.Module,
    config: PeftConfig,
    *,
    experts: bool | Collection[str] = False,
    router: bool = False,
) -> Targets:
    """Resolve a config in the caller's spelling into the fields that PEFT gets for a model."""
    model, asked = base_model(model), cast(Any, changed(config))
    packed, everything = packed_parameters(model), is_all_linear(config)
    added = expert_parameters(model, experts) if experts and packed else []
    if added and getattr(asked, "layers_to_transform", None) not in (None, []):
        added = _in_layers(asked, added)
    # Routers matter only where a target could reach one.
    routers: dict[str, Router] = {}
    if router or everything or rewritten(model, config) is not None:
        routers = {unwrapped_name(one.name): one for one in detect(model).routers}
    # A packed router is a Linear layer as well.
    linear = {name: one.plain_linear or one.packed for name, one in routers.items()}
    if router:
        layers = [ExactName(name) for name in routers if linear[name]]
        owners = dict(model.named_modules())
        bare = [f"{n}.weight" if n in owners else n for n in routers if not linear[n]]
        if layers and not everything:
            names = extend("target_modules", asked.target_modules, layers)
            asked.target_modules = names if isinstance(names, str) else set(names)
        if bare:
            asked.target_parameters = _merge(getattr(asked, "target_parameters", None), bare)

    excludes = asked.exclude_modules
    if packed:
        paths = _inside_experts(model)
        if everything:
            left = [n for n in routers if not (router and linear[n])]
            paths += _not_all_linear(model, left)
        excludes = extend("exclude_modules", excludes, paths)
    modules, weights, left_out, reload = asked.target_modules, list[str](), "", False
    if is_lora(asked) and modules is not None:
        probe = changed(asked, exclude_modules=excludes)
        is_rewritten = rewritten(model, probe) is not None
        bare = [name.removesuffix(".weight") for name in routers] if is_rewritten else []
        exact, weights, left_out = _exactly(model, probe, bare)
        if is_rewritten or left_out:
            modules = exact
        elif everything and packed:  # plain names, which PEFT shortens as those of its own
            modules = set(map(str, exact))
        if is_rewritten:
            # Stock PEFT is right where it adds nothing but weights of these routers.
            written = changed(probe, target_modules=set(map(str, exact))) if everything else probe
            if (stock := rewritten(model, written)) is not None:
                more = {*stock.target_parameters}.difference(written.target_parameters or ())
                right = [any(names_parameter(one, name) for name in weights) for one in more]
                reload = not (right and all(right))
    named = as_names("target_parameters", getattr(asked, "target_parameters", None))
    named = _merge(named, weights, added)
    if named and not isinstance(config, LoraConfig):
        raise ConfigError(f"{type(config).__name__} has no target_parameters; use a LoraConfig.")
    parameters = _full_names(model, named, packed)
    spelled = {name: getattr(asked, name, None) for name in FIELDS}
    if added:
        spelled["target_parameters"] = _merge(spelled["target_parameters"], added)
    if asked.target_modules is None or everything or left_out:
        del spelled["target_modules"]  # PEFT writes the modules' names instead
    return Targets(
        excludes=excludes,
        modules=modules,
        parameters=parameters or getattr(asked, "target_parameters", None),
        experts=tuple(name for name in packed if name in parameters),
        written=spelled,
        notes=[note for note in (left_out, reload and _RELOAD.format(model.config)) if note],
    )


def _in_layers(config: Any, names: list[str]) -> list[str]:
    # PEFT looks at layers for names in `target_modules` only
    owners = {name: name.rpartition(".")[0] for name in names}
    leaves = {owner.rpartition(".")[2] for owner in owners.values()}
    probe = changed(config, target_modules=leaves, exclude_modules=None, modules_to_save=None)
    if not (inside := [name for name in names if check_target_module_exists(probe, owners[name])]):
        raise ConfigError(
            f"layers_to_transform={config.layers_to_transform!r} leaves no layer with packed "
            f"experts, and LoRA on them is asked for: they are in {patterns(names)}."
        )
    return inside


def _inside_experts(model: nn.Module) -> list[str]:
    return [
        unwrapped_name(path)
        for name, module in packed_modules(model)
        for path, _ in module.named_modules(prefix=name)
        if path
    ]


def _not_all_linear(model: nn.Module, routers: Collection[str]) -> list[str]:
    """Return routers that are Linear layers, layers that LoRA cannot serve, and ties of these."""
    linears = {unwrapped_name(n): m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    names = [*(name for name in routers if name in linears), *unfit_linears(model)]
    weights = {id(getattr(linears.get(name), "weight", None)) for name in names}
    return _merge(names, (name for name, module in linears.items() if id(module.weight) in weights))


def _exactly(
    model: nn.Module, config: Any, bare_routers: Collection[str]
) -> tuple[set[ExactName], list[str], str]:
    """Return the modules that targets reach, weights of bare routers, and one sentence or ""."""
    # transformers v5 keeps most routers as a module with a bare `weight`. The sentence is on
    # modules around a Linear layer, which PEFT refuses (Gemma4ClippableLinear of Gemma-4's towers).
    served = (*_SERVED, *(getattr(config, "_custom_modules", None) or ()))
    exact, weights, around = set[ExactName](), list[str](), dict[str, tuple[str, str]]()
    for name in reached_modules(model, config):
        module, path = model.get_submodule(name), unwrapped_name(name)
        weight = None if isinstance(module, _ADAPTABLE) else getattr(module, "weight", None)
        if path in bare_routers and isinstance(weight, torch.Tensor):
            weights.append(f"{path}.weight")
            continue
        parts = () if isinstance(module, served) else module.named_modules()
        inner = next((part for part, one in parts if isinstance(one, nn.Linear)), None)
        if inner is None:
            exact.add(ExactName(name))
        else:
            around[path] = type(module).__name__, unwrapped_name(inner)
    if not around:
        return exact, weights, ""
    name, (_, inner) = next(iter(around.items()))
    example = repr(f"{name.rpartition('.')[2]}.{inner}")
    said = (
        f"target_modules names {patterns(around)} ({listed(_merge(k for k, _ in around.values()))})"
        ", and PEFT adapts Linear layers, not modules around them"
    )
    if not exact:
        raise ConfigError(f"{said}: name the layers inside, as in {example}.")
    said += (
        f": these are left out, all else gets LoRA; name the layers inside, as in {example}, to "
        "train them, or name these in exclude_modules to get no warning."
    )
    return exact, weights, said


def _full_names(model: nn.Module, named: list[str], packed: Collection[str]) -> list[str]:
    # With one packed parameter PEFT treats the whole module as parametrized, so that its plain
    # parameters need full names too.
    plain = [
        join(name, parameter)
        for name, module in packed_modules(model)
        for parameter, _ in module.named_parameters(recurse=False)
    ]
    known = _merge(packed, plain)
    full = [name for name in known if any(names_parameter(target, name) for target in named)]
    every = {
        unwrapped_name(n) for n, _ in model.named_parameters() if ".parametrizations." not in n
    }
    others = []
    for target in named:
        if any(names_parameter(target, name) for name in every.difference(known)):
            others.append(target)
        elif not any(names_parameter(target, name) for name in full):
            raise ConfigError(
                f"target_parameters names {target!r}, which is no parameter of this model: the "
                "experts' names are what moe_qlora.target_parameters(model) returns."
            )
    return _merge(full, others)


def exclude_modules(model: nn.Module, existing: str | Collection[str] | None = None) -> Any:
    """Return an `exclude_modules` that keeps module targets off packed experts.

    It adds the path of each packed experts module and of every module inside it, in full, so that
    `mlp.shared_expert.down_proj` keeps its LoRA. `existing`, the caller's own, is never changed.
    Returns a new list for None, a list, a tuple or a set; one regex for `re.fullmatch` for a
    string. A `ConfigError` where `existing` is no regex, or holds something else than names.
    """
    return extend("exclude_modules", existing, _inside_experts(model))


def target_parameters(
    model: nn.Module,
    existing: str | Collection[str] | None = None,
    *,
    roles: Collection[str] | None = None,
    unpacked_ok: bool = False,
) -> Any:
    """Return the `target_parameters` for LoRA on every packed expert parameter.

    PEFT matches full names (`model.layers.0.mlp.experts.gate_up_proj`) on packed and on unpacked
    models alike, shorter endings on unpacked ones only.

    Args:
        model: Any model, a `PeftModel` included.
        existing: The caller's own targets; never changed.
        roles: Only parameters with one of these roles ("gate_up", "gate", "up", "down", ...).
        unpacked_ok: Accept experts that are not packed, without a warning or an error.

    Returns a new list for None, a list, a tuple or a set; one regex for a string. On a model whose
    experts are not packed nothing is added, with a warning.

    Raises a `ConfigError` where `existing` is no regex or holds something else than names, no
    parameter has the role, or no expert is packed although the model's config asks for it.
    """
    check_packed(model, unpacked_ok=unpacked_ok, stacklevel=2)
    names = expert_parameters(model, True if roles is None else roles)
    return extend("target_parameters", existing, names)


# Notes before training.


def notes_on(
    model: nn.Module, config: PeftConfig, targets: Targets, packed: Collection[str]
) -> Iterator[str]:
    """Yield a sentence on each target without LoRA; raise where that is every target."""
    asked: Any = config
    probe = changed(asked, exclude_modules=targets.excludes, target_modules=targets.modules)
    reached = reached_modules(model, probe)
    # The caller's own excludes of experts are on purpose, and None is PEFT's own choice.
    means = isinstance(asked, LoraConfig) and asked.target_modules is not None
    means = means and not (targets.experts or is_all_linear(asked))
    if names := [name for name in packed if means and names_expert(asked, name)]:
        words = repr(asked.target_modules)
        if not isinstance(asked.target_modules, str):
            each = {w: changed(asked, target_modules={w}) for w in sorted(asked.target_modules)}
            words = ", ".join(
                w for w, probe in each.items() if any(names_expert(probe, name) for name in names)
            )
        said = (
            f"target_modules names {words}, and it reaches modules only, so that {len(names)} "
            f"packed expert weights ({patterns(names)}) get no LoRA"
        )
        how = (
            ": pass experts=True, or target_parameters=moe_qlora.target_parameters(model) in the "
            'config, or name experts among the targets of a plan, as in "attention,experts"'
        )
        if not targets.parameters and not reached:
            raise ConfigError(f"{said}, and nothing else does{how}.")
        yield (
            f"{said}{how}, to train them, or exclude_modules=moe_qlora.exclude_modules(model) to "
            "leave them out without this warning."
        )
    named = [*(targets.parameters or ()), *map(unwrapped_name, reached)]
    for setting in ("rank_pattern", "alpha_pattern"):
        keys = getattr(asked, setting, None) or ()
        idle = [k for k in keys if not any(re.match(rf"(.*\.)?({k})$", name) for name in named)]
        if idle and targets.parameters:
            yield f"{setting} names {', '.join(sorted(idle))}, and nothing that gets LoRA; mend it."
    yield from targets.notes
