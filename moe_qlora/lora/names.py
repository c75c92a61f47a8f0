"""Names of packed experts, and the two kinds of values that PEFT matches names with.

`target_modules`, `exclude_modules` and `target_parameters` hold either names, each of which matches
full names and their ends after a dot, or one regular expression for `re.fullmatch`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from torch import nn

from ..detection.detect import detect
from ..detection.tree import join
from ..errors import AdapterError, ConfigError
from ..layout import unwrapped_name
from ..packing.parametrize import packed_names

Names: TypeAlias = "list[str] | tuple[str, ...] | set[str] | frozenset[str]"

ALL_LINEAR = "all-linear"

# Where the names of adapters begin in a full name, and what else PEFT puts into one.
_ADAPTERS_OWN = re.compile(r"\.(?=lora_|modules_to_save|original_module)")
_PARTS_OF_KEYS = (
    *("model", "weight", "bias", "base_layer", "modules_to_save", "original_module"),
    *("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B"),
)

_LEADING_FLAGS = re.compile(r"\(\?([aimsux]+)\)")


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


def expert_parameters(
    model: nn.Module, roles: bool | Collection[str] | Mapping[str, Any] = True
) -> list[str]:
    """Return the full names of the packed parameters, or of those with one of these roles.

    Of a mapping the keys are the names themselves.
    """
    packed = packed_parameters(model)
    if isinstance(roles, Mapping):
        return [name for name in packed if name in roles]
    if roles is True:
        return list(packed)
    asked: object = roles
    if not isinstance(asked, (bool, Collection)):
        raise ConfigError(
            f"experts is {roles!r}; give True, a list of roles, or indices of experts by the names "
            "of their modules."
        )
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

    In its file PEFT leaves out what has another adapter's name anywhere in its own.
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
    """Tell whether PEFT takes `target` for this parameter: its full name, or the end of it."""
    return name == target or name.endswith(f".{target}")


def is_all_linear(config: Any) -> bool:
    """Tell whether the caller asked for every Linear layer."""
    target_modules = getattr(config, "target_modules", None)
    return isinstance(target_modules, str) and target_modules.lower() == ALL_LINEAR


def as_set(value: Any) -> Any:
    """Return names in a form that compares without order; a regex is itself, None is no name."""
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
