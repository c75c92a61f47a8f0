"""Names of packed experts, and the two kinds of values that PEFT matches names with.

`target_modules`, `exclude_modules` and `target_parameters` hold either names, each of which matches
full names and their ends after a dot, or one regular expression for `re.fullmatch`.

PEFT 0.21 knows Mixture-of-Experts checkpoints of transformers v4, where experts were
Linear layers. For 29 model types it rewrites `target_modules` such as "all-linear", `down_proj` or
any regex into `target_parameters` for the fused experts and the router, and the Linear layers of
shared experts and dense blocks, which have the same leaf names, lose their LoRA. The rewrite tests
`target.endswith(".down_proj")`: an `ExactName` is a Linear layer's full name for which that is
False, so that PEFT matches it without a rewrite. PEFT itself is not patched.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

import torch
from peft import PeftConfig, PeftType
from peft.tuners.tuners_utils import (
    BaseTunerLayer,
    _maybe_include_all_linear_layers,
    check_target_module_exists,
)
from torch import nn

from ..checkpoint import training_codec
from ..detection.detect import detect
from ..detection.tree import join
from ..errors import AdapterError, ConfigError
from ..layout import ExpertParam, ModelLayout, human_bytes, listed, name_pattern, unwrapped_name
from ..packing.parametrize import packed_names
from ..packing.selection import weights_to_pack
from ..packing.settings import CodecSettings, packed_nbytes

Names: TypeAlias = "list[str] | tuple[str, ...] | set[str] | frozenset[str]"

ALL_LINEAR = "all-linear"

# Where adapters' names begin in a full name, and other parts that PEFT adds to one.
_ADAPTERS_OWN = re.compile(r"\.(?=lora_|modules_to_save|original_module)")
_PARTS_OF_KEYS = (
    *("model", "weight", "bias", "base_layer", "modules_to_save", "original_module"),
    *("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B"),
)

_LEADING_FLAGS = re.compile(r"\(\?([aimsux]+)\)")
Config = TypeVar("Config", bound=PeftConfig)

ADAPTABLE = (BaseTunerLayer, nn.Linear, nn.Embedding, nn.modules.conv._ConvNd)


def base_model(model: nn.Module) -> nn.Module:
    """Return the model inside a `PeftModel`, and any other model as it is."""
    unwrap = getattr(model, "get_base_model", None)
    return unwrap() if callable(unwrap) and hasattr(model, "base_model") else model


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
    if roles is True:
        return list(packed)
    asked: object = roles
    if not isinstance(asked, (bool, Collection)):
        raise ConfigError(f"experts is {roles!r}; give True, a list of roles, or one role.")
    wanted = {roles} if isinstance(roles, str) else set(roles or ())
    role_of = {
        unwrapped_name(name): param.role
        for param in detect(base_model(model))
        for name in param.names
        if unwrapped_name(name) in packed
    }
    unknown = sorted(wanted - set(role_of.values()))
    if unknown:
        raise ConfigError(
            f"no packed expert parameter has the role {unknown[0]!r}; this model has "
            f"{sorted(set(role_of.values()))}."
        )
    return [name for name in packed if role_of.get(name) in wanted]


def check_adapter_names(model: nn.Module, adapters: Collection[str]) -> None:
    """Raise where one of several adapters has the name of a part of the model.

    PEFT leaves tensors out of an adapter's file whose names contain another adapter's name.
    """
    if len(adapters) < 2:
        return
    parts = dict.fromkeys(_PARTS_OF_KEYS, "what PEFT puts into every name")
    for full in (name for name, _ in model.named_modules()):
        path = _ADAPTERS_OWN.split(full)[0]
        parts.setdefault(path.rpartition(".")[2], path)
    for name in adapters:
        if name in parts:
            raise AdapterError(
                f"adapter {name!r} has the name of {parts[name]}, and PEFT would leave LoRA there "
                "out of the files of other adapters: give it another name, which a saved adapter "
                "gets as it is loaded."
            )


def names_parameter(target: str, name: str) -> bool:
    """Whether PEFT matches `target` with this parameter: its full name, or the end of it."""
    return name == target or name.endswith(f".{target}")


def is_all_linear(config: Any) -> bool:
    """Whether the caller asked for every Linear layer."""
    target_modules = getattr(config, "target_modules", None)
    return isinstance(target_modules, str) and target_modules.lower() == ALL_LINEAR


def as_set(value: Any) -> Any:
    """Return names as a set; a regex as it is, None as no names."""
    return value if isinstance(value, str) else set(value or ())


def extend(setting: str, existing: str | Names | None, names: Collection[str]) -> list[str] | str:
    """Return the value of a setting with names added: one regex for a string, else a new list."""
    patterns = [re.escape(name) for name in names]
    if not isinstance(existing, str):
        return list(dict.fromkeys([*as_names(setting, existing), *names]))
    if not existing or not patterns:
        return existing or "|".join(patterns)
    group = f"(?:{existing})"
    if flags := _LEADING_FLAGS.match(existing):
        # `(?i)` may stand at the start of an expression only, `(?i:...)` anywhere; in verbose mode
        # a comment on the last line would swallow the bracket.
        end = "\n)" if "x" in flags[1] else ")"
        group = f"(?{flags[1]}:{existing[flags.end() :]}{end}"
    combined = "|".join([group, *patterns])
    try:
        re.compile(combined)
    except re.error as error:
        raise ConfigError(
            f"{setting}={existing!r} is no regular expression ({error}); pass a valid one, or a "
            "list of names."
        ) from error
    return combined


def as_names(setting: str, existing: Iterable[str] | None) -> list[str]:
    """Return a new list of the caller's names, each once; a set's names are sorted."""
    if existing is None:
        return []
    if not isinstance(existing, (list, tuple, set, frozenset)):
        raise ConfigError(
            f"{setting} is a {type(existing).__name__}; expected None, a list, tuple or set of "
            "names, or a regex string."
        )
    for entry in existing:
        if not isinstance(entry, str):
            raise ConfigError(f"{setting} holds {entry!r}, which is no string; pass names only.")
    names = sorted(existing) if isinstance(existing, (set, frozenset)) else existing
    return list(dict.fromkeys(names))


def check_packed(model: nn.Module, *, unpacked_ok: bool, stacklevel: int) -> list[ExpertParam]:
    """Warn that experts are not packed, where none is, or raise where a config asks for it.

    A model config that names them in `llm_int8_skip_modules` leaves them in 16 bit on purpose.
    Returns all expert weights of the model, warned of or not.
    """
    model = base_model(model)
    layout = detect(model)
    config = getattr(getattr(model, "config", None), "quantization_config", None)
    try:
        settings = None if config is None else CodecSettings.from_config(config)
    except ConfigError:  # another quantization method
        settings = None
    experts = list(layout.experts)
    if unpacked_ok or not experts:
        return experts
    unpacked = experts
    if settings is not None:
        with warnings.catch_warnings():  # the load has warned of skip patterns
            warnings.simplefilter("ignore")
            unpacked = weights_to_pack(model, layout, config, settings)
    if not unpacked:
        return experts
    message = (
        f"{len(unpacked)} expert weights are not packed ({patterns(p.name for p in unpacked)})"
    )
    how = "call moe_qlora.quantize_experts(model), or load the model under moe_qlora.enabled()"
    meant = "pass unpacked_ok=True where they are to stay as they are"
    if settings is not None:
        raise ConfigError(
            f"{message}, and the model's quantization_config asks for {settings.kind}: {how}; or "
            f"{meant}."
        )
    advice = f"{how} with a BitsAndBytesConfig; {meant}."
    warnings.warn(f"{message}: {advice}", UserWarning, stacklevel=stacklevel + 1)
    return experts


def warn_of_unpacked(model: nn.Module, adapter: Path, *, stacklevel: int) -> None:
    """Warn where experts are plain, and the adapter's note says that it was trained on packed."""
    noted = training_codec.from_note(adapter)
    if noted is None:
        return
    plain = {
        unwrapped_name(name): weight
        for name, weight in model.named_parameters()
        if unwrapped_name(name) in noted.experts
    }
    if not plain:
        return
    now = human_bytes(sum(weight.nbytes for weight in plain.values()))
    then = sum(packed_nbytes(tuple(weight.shape), noted.settings) for weight in plain.values())
    warnings.warn(
        f"{len(plain)} expert weights ({patterns(plain)}) are not packed and take {now}, and "
        f"{adapter} was trained on packed ones ({noted.settings.describe()}, {human_bytes(then)}): "
        "load the model under moe_qlora.enabled() with a BitsAndBytesConfig, or call "
        "moe_qlora.quantize_experts(model, config) first; pass unpacked_ok=True where they are to "
        "stay as they are.",
        UserWarning,
        stacklevel=stacklevel + 1,
    )


def patterns(names: Iterable[str]) -> str:
    """Return names for a message, those of all layers as one: `layers.*.mlp.experts.down_proj`."""
    return listed(list(dict.fromkeys(name_pattern(name) for name in names)))


class ExactName(str):
    """A module's full name, which PEFT matches as it stands and never rewrites."""

    __slots__ = ()

    def endswith(self, *args: Any) -> bool:
        return False


def exact_targets(
    model: nn.Module, config: PeftConfig, layout: ModelLayout
) -> tuple[set[ExactName], list[str], str] | None:
    """Resolve the config's `target_modules`; None where PEFT would not rewrite them.

    Returns the modules' names, names of router weights, and a sentence where stock PEFT, given the
    saved config, would adapt others, else "".
    """
    if rewritten(model, config) is None:
        return None
    routers = {router.name.removesuffix(".weight") for router in layout.routers}
    modules: set[ExactName] = set()
    router_weights = []
    for name in reached_modules(model, config):
        module = model.get_submodule(name)
        # transformers v5 keeps most routers as a module with a bare `weight`.
        bare = not isinstance(module, ADAPTABLE)
        bare = bare and isinstance(getattr(module, "weight", None), torch.Tensor)
        if bare and unwrapped_name(name) in routers:
            router_weights.append(f"{unwrapped_name(name)}.weight")
        else:
            modules.add(ExactName(name))
    written = config
    if is_all_linear(config):  # PEFT writes the names of these modules instead of the word
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
    lost = listed(sorted({name_pattern(str(name)) for name in modules - reached}))
    return (
        "stock PEFT rewrites the target_modules of this adapter for its model type "
        f"({cast(Any, model.config).model_type}) and would load {lost or 'its targets'} wrong; "
        "load it with moe_qlora.load_adapter."
    )
