"""A LoraConfig fitted to packed experts, whose file on disk still says what the caller asked for.

`adapt` takes a copy of the caller's config and changes three fields, each for one reason:

    exclude_modules    + every packed experts module and the modules inside it, which leaf names
                       would hit
    target_modules     full names, where PEFT would rewrite the caller's spelling (see
                       `peft_targets`)
    target_parameters  full names for packed parameters: the only spelling that PEFT matches on a
                       parametrized module

`AdaptedLoraConfig.to_dict`, which PEFT writes to adapter_config.json, gives the caller's own values
for them, so the file is the one that stock PEFT writes for the unpacked model.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Collection, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from peft import LoraConfig, PeftConfig
from torch import nn

from ..checkpoint import rounding
from ..detection.detect import detect
from ..errors import ConfigError
from ..layout import ModelLayout, name_pattern
from . import targets
from .inject import register_wrapper
from .supported import _check_modules_to_save, _check_supported, _is_lora
from .targets import exclude_paths, expert_parameters

if TYPE_CHECKING:
    from transformers import PretrainedConfig


TOP_K_NAMES = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_top_k",
    "moe_topk",
    "top_k_experts",
    "moe_k",
)


class AdaptedLoraConfig(LoraConfig):
    """A LoraConfig fitted to a model with packed experts; its file keeps the caller's own spelling.

    Attributes:
        _edits: For each changed field the value set here and the caller's.
        _reload_note: One sentence for `save_pretrained` where stock PEFT would not load the file
            right, or "".
        _packed: What of the model was packed, for the note that a merge reads; None where unknown.
        _awaited: Packed parameters that this config names and that are not loaded yet.
    """

    _edits: dict[str, tuple[Any, Any]] = {}  # never changed in place
    _reload_note: str = ""
    _packed: rounding.Rounding | None = None
    _awaited: frozenset[str] = frozenset()

    def callers(self) -> dict[str, Any]:
        """The caller's value of each field that still has the value set by `adapt`.

        PEFT narrows `target_modules` while it injects; the caller's spelling stands for both.
        """
        return {
            field: value
            for field, (ours, value) in self._edits.items()
            if field == "target_modules" or _same(getattr(self, field), ours)
        }

    def to_dict(self) -> dict[str, Any]:
        written: dict[str, Any] = super().to_dict()
        written.update(copy.deepcopy(self.callers()))
        if written.get("target_parameters"):
            written["lora_dropout"] = 0.0  # for training; stock PEFT refuses to load it with these
        return written

    def save_pretrained(self, save_directory: str, **kwargs: Any) -> None:
        if self._reload_note:
            warnings.warn(self._reload_note, UserWarning, stacklevel=2)
        ours = {field: getattr(self, field) for field in self._edits}
        self.__dict__.update(self.callers())  # a host's own class may write fields past `to_dict`
        try:
            super().save_pretrained(save_directory, **kwargs)
        finally:
            self.__dict__.update(ours)
        if self._packed is not None:
            rounding.write_note(Path(save_directory), self._packed)


@cache
def _adapted_class(theirs: Any) -> Any:
    """`AdaptedLoraConfig`; for a host's own LoraConfig a class that is both."""
    if issubclass(theirs, AdaptedLoraConfig):
        return theirs
    if theirs is LoraConfig:
        return AdaptedLoraConfig
    return type(theirs.__name__, (AdaptedLoraConfig, theirs), {})


def adapt_unloaded(
    model: Any,
    config: PeftConfig,
    quantization_config: Any,
    *,
    trust_remote_code: bool = False,
    **options: Any,
) -> PeftConfig:
    """The config fitted to a model that a trainer is yet to load; see `adapt_lora_config`."""
    from .unloaded import stand_in

    _check_type(config)
    built, packed = stand_in(model, quantization_config, trust_remote_code=trust_remote_code)
    known = targets.packed_parameters(built)
    for option, value in options.items():
        if value and not known:
            raise ConfigError(
                f"{option}={value!r} is for models with packed experts, and a load of this "
                f"{cast(Any, built.config).model_type} model with this quantization_config packs "
                "none."
            )
    adapted = adapt(built, config, **options)
    if isinstance(adapted, AdaptedLoraConfig):
        adapted._packed = packed
        adapted._awaited = frozenset(known) & frozenset(adapted.target_parameters or ())
    return adapted


def _check_type(config: Any) -> None:
    if not isinstance(config, PeftConfig):
        raise ConfigError(
            f"lora_config is a {type(config).__name__}: give a peft.LoraConfig, or another PEFT "
            "config."
        )


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, str) or isinstance(right, str) or left is None or right is None:
        return bool(left == right)
    return set(left) == set(right)


def adapt(
    model: nn.Module,
    config: PeftConfig,
    *,
    experts: bool | Collection[str] = False,
    router: bool = False,
    scale_expert_rank: bool | int = False,
) -> PeftConfig:
    """The config fitted to `model`; see `moe_qlora.adapt_lora_config`."""
    _check_type(config)
    model = targets.base_model(model)
    packed = targets.packed_parameters(model)
    if not packed:
        for option, value in (
            ("experts", experts),
            ("router", router),
            ("scale_expert_rank", scale_expert_rank),
        ):
            if value:
                raise ConfigError(
                    f"{option}={value!r} is for models with packed experts and this model has "
                    f"none; call "
                    "moe_qlora.quantize_experts first, or name the parameters in target_parameters."
                )
        return copy.deepcopy(config)

    if config.is_prompt_learning:  # touches no module
        return copy.deepcopy(config)
    adapted = _caller_view(config)
    _check_modules_to_save(adapted, packed)
    layout = _layout(model, adapted, router)
    callers = {"exclude_modules": copy.deepcopy(adapted.exclude_modules)}
    _set_excludes(model, adapted, layout, router)
    if router:
        _add_routers(model, adapted, layout)
    for field in ("target_modules", "target_parameters"):
        callers[field] = copy.deepcopy(getattr(adapted, field, None))
    note = ""
    if isinstance(adapted, LoraConfig):
        note = _set_target_modules(model, adapted, layout)
        _leave_out(model, adapted, callers["exclude_modules"])
    chosen = _set_target_parameters(model, adapted, packed, layout, experts, callers)
    if chosen:
        _check_supported(adapted, chosen, packed)
        if scale_expert_rank:
            _scale_rank(model, adapted, chosen, scale_expert_rank)
        register_wrapper(adapted)
    finished = _finish(adapted, callers, note)
    if isinstance(finished, AdaptedLoraConfig):
        finished._packed = rounding.from_packed(model)
    return finished


def spell_exactly(model: nn.Module, config: PeftConfig) -> PeftConfig:
    """A copy whose `target_modules` PEFT takes as they stand, where no expert is packed."""
    if not isinstance(config, LoraConfig) or targets.rewritten(model, config) is None:
        return config
    exact = _caller_view(config)
    callers = {"target_modules": copy.deepcopy(exact.target_modules)}
    note = _set_target_modules(model, exact, detect(model))
    return _finish(exact, callers, note)


def _caller_view(config: PeftConfig) -> PeftConfig:
    """A deep copy with the caller's own values, whether or not the config was adapted before."""
    adapted = copy.deepcopy(config)
    if isinstance(adapted, AdaptedLoraConfig):
        for field, value in adapted.callers().items():
            setattr(adapted, field, value)
        adapted._edits = {}
    if not hasattr(adapted, "exclude_modules") or not hasattr(adapted, "target_modules"):
        raise ConfigError(
            f"{type(config).__name__} has no target_modules and exclude_modules, which models "
            f"with packed experts "
            "need; pass a LoraConfig."
        )
    return adapted


def _finish(adapted: PeftConfig, callers: dict[str, Any], note: str) -> PeftConfig:
    if not _is_lora(adapted):
        return adapted  # AdaLoRA and others keep their class; their files name what they match
    adapted.__class__ = _adapted_class(cast(Any, type(adapted)))
    # PEFT writes what "all-linear" and a model type's defaults stand for, not the word
    asked = callers["target_modules"]
    if asked is None or (isinstance(asked, str) and asked.lower() == targets.ALL_LINEAR):
        del callers["target_modules"]
    adapted._edits = {
        field: (copy.copy(getattr(adapted, field)), value) for field, value in callers.items()
    }
    adapted._reload_note = note
    return adapted


def _layout(model: nn.Module, config: PeftConfig, router: bool) -> ModelLayout:
    """The model's routers, looked for only where a target could reach one."""
    needed = router or targets.is_all_linear(config) or targets.rewritten(model, config) is not None
    return detect(model) if needed else ModelLayout()


def _set_excludes(model: nn.Module, config: PeftConfig, layout: ModelLayout, router: bool) -> None:
    paths = exclude_paths(model)
    existing = config.exclude_modules
    if targets.is_all_linear(config):
        # Some routers are Linear by class and give two values, which LoRA's own layer cannot.
        left_out = [
            found.name
            for found in layout.routers
            if (not router if found.plain_linear else _is_linear(model, found.name))
        ]
        paths += _tied(model, left_out)
    if isinstance(existing, str):
        patterns = [re.escape(path) for path in paths]
        config.exclude_modules = targets.combine_patterns("exclude_modules", existing, patterns)
    else:
        config.exclude_modules = {*targets.as_names("exclude_modules", existing), *paths}


def _tied(model: nn.Module, names: Sequence[str]) -> list[str]:
    """These modules, and those that share a weight with one (diffusion_gemma's decoder does)."""
    weights = {id(getattr(model.get_submodule(name), "weight", None)) for name in names}
    others = [
        targets.plain_name(name)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and id(module.weight) in weights
    ]
    return list(dict.fromkeys((*names, *others)))


def _is_linear(model: nn.Module, name: str) -> bool:
    try:
        return isinstance(model.get_submodule(name), nn.Linear)
    except AttributeError:  # a bare parameter
        return False


def _set_target_modules(model: nn.Module, config: LoraConfig, layout: ModelLayout) -> str:
    """Spell `target_modules` so that PEFT takes them as meant; returns the reload note."""
    if targets.rewritten(model, config) is None:
        return ""
    modules, router_weights = targets.exact_targets(model, config, layout)
    written = copy.copy(config)  # what the file will say
    if targets.is_all_linear(config):
        written.target_modules = {str(name) for name in modules}
    config.target_modules = modules
    if router_weights:
        config.target_parameters = [*(config.target_parameters or ()), *router_weights]
    return _reload_note(model, written, modules, router_weights)


def _leave_out(model: nn.Module, config: LoraConfig, excluded: Any) -> None:
    """Name what "all-linear" reaches, where without our excludes it would be more.

    PEFT writes the names that the word stands for, and the caller's excludes beside them: routers
    that are Linear by class (phimoe, llama4, dbrx, ...) would get LoRA where the file is read.
    """
    if not targets.is_all_linear(config):
        return
    plain = copy.copy(config)
    plain.exclude_modules = excluded
    reached = set(targets.reached_modules(model, config))
    if reached != set(targets.reached_modules(model, plain)):
        config.target_modules = reached


def _reload_note(
    model: nn.Module, written: LoraConfig, modules: set[targets.ExactName], parameters: list[str]
) -> str:
    """One sentence where stock PEFT, given this config, would adapt something else, or ""."""
    stock = targets.rewritten(model, written)
    if stock is None:
        return ""
    added = set(stock.target_parameters or ()) - set(written.target_parameters or ())
    wrong = {
        one for one in added if not any(targets.names_parameter(one, name) for name in parameters)
    }
    if not wrong and set(targets.reached_modules(model, stock)) == modules:
        return ""
    lost = modules - set(targets.reached_modules(model, stock))
    what = ", ".join(sorted({name_pattern(str(name)) for name in lost})) or "its targets"
    return (
        "stock PEFT rewrites the target_modules of this adapter for its model type "
        f"({cast(Any, model.config).model_type}) and would load {what} wrong; load it with "
        "moe_qlora.load_adapter."
    )


def _add_routers(model: nn.Module, config: LoraConfig, layout: ModelLayout) -> None:
    """Target every router: a plain Linear as a module, any other by its weight."""
    modules = [router.name for router in layout.routers if router.plain_linear]
    parameters = [
        _router_parameter(model, router.name)
        for router in layout.routers
        if not router.plain_linear
    ]
    if modules and not targets.is_all_linear(config):
        present = config.target_modules
        if isinstance(present, str):
            patterns = [re.escape(name) for name in modules]
            config.target_modules = targets.combine_patterns("target_modules", present, patterns)
        else:
            config.target_modules = {
                *(present or ()),
                *(targets.ExactName(name) for name in modules),
            }
    if parameters:
        config.target_parameters = list(
            dict.fromkeys([*(config.target_parameters or ()), *parameters])
        )


def _router_parameter(model: nn.Module, name: str) -> str:
    try:
        model.get_submodule(name)
    except AttributeError:  # a bare parameter
        return name
    return f"{name}.weight"


def _set_target_parameters(
    model: nn.Module,
    config: PeftConfig,
    packed: dict[str, nn.Module],
    layout: ModelLayout,
    experts: bool | Collection[str],
    callers: dict[str, Any],
) -> list[str]:
    """Name packed parameters in full; returns those that LoRA goes to, in model order."""
    asked = targets.as_names("target_parameters", getattr(config, "target_parameters", None))
    if experts:
        added = expert_parameters(model, experts)
        asked = list(dict.fromkeys([*asked, *added]))
        callers["target_parameters"] = list(
            dict.fromkeys([*(callers["target_parameters"] or ()), *added])
        )
    if not asked:
        return []
    if not isinstance(config, LoraConfig):
        raise ConfigError(
            f"{type(config).__name__} cannot adapt parameters; use a LoraConfig for "
            f"target_parameters."
        )
    # a module that holds one packed parameter is parametrized as a whole, so its plain ones need
    # full names too
    beside = [
        f"{name}.{parameter}" if name else parameter
        for name, module in targets.packed_modules(model)
        for parameter, _ in module.named_parameters(recurse=False)
    ]
    known = list(dict.fromkeys([*packed, *beside]))
    full = [name for name in known if _names_any(asked, name)]
    plain = [
        targets.plain_name(name)
        for name, _ in model.named_parameters()
        if ".parametrizations." not in name
    ]
    elsewhere = set(plain) - set(known)
    # what matches nothing at all stays, so that PEFT says so
    kept = [
        one
        for one in asked
        if not any(targets.names_parameter(one, name) for name in full)
        or any(targets.names_parameter(one, name) for name in elsewhere)
    ]
    config.target_parameters = list(dict.fromkeys([*full, *kept]))
    return [name for name in full if name in packed]


def _names_any(asked: list[str], name: str) -> bool:
    return any(targets.names_parameter(one, name) for one in asked)


def _scale_rank(model: nn.Module, config: LoraConfig, chosen: list[str], scale: bool | int) -> None:
    """Give the experts the rank r // top_k.

    A token then meets the same rank in its experts together as in a dense layer.
    Entries that the caller put in `rank_pattern` come first and so keep their effect. `lora_alpha`
    is unchanged.
    """
    top_k = scale if not isinstance(scale, bool) else _top_k(model)
    rank = max(config.r // top_k, 1)
    patterns = {}
    for name in chosen:
        pattern = r"\d+".join(re.escape(part) for part in name_pattern(name).split("*"))
        patterns[pattern] = rank
    config.rank_pattern = {**(config.rank_pattern or {}), **patterns}


def _top_k(model: nn.Module) -> int:
    config: Any = getattr(model, "config", None)
    nested = config.get_text_config() if hasattr(config, "get_text_config") else config
    for holder in (config, nested):
        for name in TOP_K_NAMES:
            value = getattr(holder, name, None)
            if isinstance(value, int) and value > 0:
                return value
    raise ConfigError(
        "scale_expert_rank=True needs the number of experts that a token goes to, and the model's "
        "config has none of "
        f"{', '.join(TOP_K_NAMES)}; pass the number itself, as in scale_expert_rank=8."
    )


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
        return adapt(model, lora_config, **options)
    return adapt_unloaded(
        model,
        lora_config,
        quantization_config,
        trust_remote_code=trust_remote_code,
        **options,
    )


__all__ = [
    "adapt_lora_config",
]
