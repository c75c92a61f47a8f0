"""The PEFT model over packed experts: later adapters, weighted sums, merging and loading."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, cast

import peft
import torch
from peft import LoraConfig, PeftConfig, PeftModel
from peft.tuners.lora import LoraModel as StockLoraModel
from peft.tuners.tuners_utils import BaseTuner
from torch import Tensor, nn

from ..errors import ConfigError
from ..experts import restore
from . import inject, layer, targets
from .combine import _concatenate, _single_experts, lora_a, lora_b
from .config import adapt

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel
    from torch import nn

from peft import PeftConfig, PeftModel
from peft.tuners.lora.layer import LoraLayer
from torch import nn

from .config import AdaptedLoraConfig, adapt_lora_config


class LoraModel(StockLoraModel):
    """PEFT's LoRA model over packed experts.

    An instance gets this class after creation (`upgrade_peft_model`), so that what users and
    trainers call on it later is right too: add_adapter, load_adapter, add_weighted_adapter,
    merge_adapter, merge_and_unload.
    """

    def inject_adapter(
        self, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any
    ) -> None:
        config = adapt(model, self.peft_config[adapter_name])
        self.peft_config[adapter_name] = config
        with without_false_warning(config):
            super().inject_adapter(model, adapter_name, *args, **kwargs)
        check(model, adapter_name, config)

    def merge_adapter(
        self,
        adapter_names: list[str] | None = None,
        safe_merge: bool = False,
        *,
        dtype: torch.dtype | None = None,
        repack: bool = False,
    ) -> None:
        """Merge into the base weights; packed experts become plain ones meanwhile.

        Args:
            adapter_names: None is all active ones.
            safe_merge: Refuse results that are not finite.
            dtype: Of merged expert weights; None is the dtype that they had before packing.
            repack: Pack merged experts again, with the settings that they had. `unmerge_adapter`
                restores the original codes exactly, either way.
        """
        with self._merging(dtype, repack):
            super().merge_adapter(adapter_names=adapter_names, safe_merge=safe_merge)

    def merge_and_unload(
        self,
        progressbar: bool = False,
        safe_merge: bool = False,
        adapter_names: list[str] | None = None,
        *,
        dtype: torch.dtype | None = None,
        repack: bool = False,
    ) -> nn.Module:
        """The base model with the adapters merged; `dtype` and `repack` as in `merge_adapter`."""
        with self._merging(dtype, repack):
            merged = super().merge_and_unload(
                progressbar=progressbar, safe_merge=safe_merge, adapter_names=adapter_names
            )
        restore.clear_quantized(cast(nn.Module, merged))
        return cast(nn.Module, merged)

    @contextmanager
    def _merging(self, dtype: torch.dtype | None, repack: bool) -> Iterator[None]:
        wrappers = [
            module for module in self.model.modules() if isinstance(module, layer.ParamWrapper)
        ]
        for wrapper in wrappers:
            wrapper.merge_dtype, wrapper.merge_repack = dtype, repack
        try:
            yield
        finally:
            for wrapper in wrappers:
                wrapper.merge_dtype, wrapper.merge_repack = None, False

    def add_weighted_adapter(
        self,
        adapters: list[str],
        weights: list[float],
        adapter_name: str,
        combination_type: str = "svd",
        **kwargs: Any,
    ) -> None:
        """PEFT's own, for expert parameters as well: each expert is combined by itself."""
        if adapter_name in self.peft_config:
            return
        super().add_weighted_adapter(
            adapters, weights, adapter_name, combination_type=combination_type, **kwargs
        )
        if combination_type == "cat" and len(adapters) > 1:
            for module in self.model.modules():
                if isinstance(module, layer.ParamWrapper) and adapter_name in module.lora_A:
                    _concatenate(module, adapters, weights, adapter_name)

    def _check_add_weighted_adapter(self, adapters: list[str], *args: Any, **kwargs: Any) -> Any:
        # PEFT refuses adapters with target_parameters here, since its own wrappers cannot combine
        # them
        configs = [self.peft_config[name] for name in adapters if name in self.peft_config]
        kept = [config.target_parameters for config in configs]
        for config in configs:
            config.target_parameters = None
        try:
            return super()._check_add_weighted_adapter(adapters, *args, **kwargs)
        finally:
            for config, value in zip(configs, kept, strict=True):
                config.target_parameters = value

    def _svd_generalized_task_arithmetic_weighted_adapter(
        self,
        combination_type: str,
        adapters: list[str],
        weights: list[float],
        new_rank: int,
        target: Any,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        combine = super()._svd_generalized_task_arithmetic_weighted_adapter
        if not isinstance(target, layer.ParamWrapper):
            return cast(
                "tuple[Tensor, Tensor]",
                combine(combination_type, adapters, weights, new_rank, target, *args, **kwargs),
            )
        parts = [
            combine(combination_type, adapters, weights, new_rank, expert, *args, **kwargs)
            for expert in _single_experts(target)
        ]
        return lora_a([a for a, _ in parts]), lora_b([b for _, b in parts])


@contextmanager
def without_false_warning(config: PeftConfig) -> Iterator[None]:
    """Keep PEFT from saying that a rank or alpha pattern has no effect where it has one.

    PEFT 0.21 compares these patterns with the modules that it targets, not with the parameters.
    """
    parameters = getattr(config, "target_parameters", None) or ()
    patterns = [
        *(getattr(config, "rank_pattern", None) or ()),
        *(getattr(config, "alpha_pattern", None) or ()),
    ]
    used = patterns and all(
        any(re.match(rf"(.*\.)?({key})$", name) for name in parameters) for key in patterns
    )
    with warnings.catch_warnings():
        if used:
            message = r"The following (rank|alpha)_pattern keys did not match any targeted module"
            warnings.filterwarnings("ignore", message=message, category=RuntimeWarning)
        yield


def upgrade_peft_model(model: PeftModel) -> None:
    """Make a PEFT model over packed experts right from here on.

    Raises:
        AdapterError: LoRA on an expert parameter is not connected.
    """
    tuner = model.base_model
    if not isinstance(tuner, BaseTuner):  # prompt learning leaves the model as it is
        return
    if type(tuner) is StockLoraModel:
        tuner.__class__ = LoraModel
    inject.adopt(tuner.model)
    for name, config in model.peft_config.items():
        check(tuner.model, name, config)


def check(model: nn.Module, adapter_name: str, config: PeftConfig) -> None:
    """Raise where LoRA on a packed parameter that the config names has no effect."""
    asked = getattr(config, "target_parameters", None) or ()
    expected = [
        name
        for name in targets.packed_parameters(model)
        if any(targets.names_parameter(one, name) for one in asked)
    ]
    inject.check_connected(model, adapter_name, expected)


_TESTED = {"peft": ((0, 20), (0, 21)), "transformers": ((5, 20), (5, 23))}


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
    from . import targets

    _warn_untested()
    config = adapt_lora_config(
        model, lora_config, experts=experts, router=router, scale_expert_rank=scale_expert_rank
    )
    if not targets.packed_parameters(model):
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
    with without_false_warning(config):
        wrapped = peft.get_peft_model(model, config, adapter_name=adapter_name, **peft_kwargs)
    upgrade_peft_model(wrapped)
    return wrapped


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
    from . import targets

    if targets.packed_parameters(model):
        upgrade_peft_model(model)
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


# PEFT narrows target_modules to what it has found, so that these cannot be compared.
_LISTS = ("target_parameters", "exclude_modules")


def take_after(model: PeftModel, adapted: PeftConfig) -> None:
    """Let every adapter of `model` that was made from `adapted`'s lists be as if made with it.

    Its file then says what the caller asked for, with the note that a merge reads, and its layers
    have the dropout that PEFT's own layer for parameters refuses, which a host leaves at 0.

    Args:
        model: Connected already.
        adapted: From `adapt_lora_config`; where it is no LoRA config nothing happens.
    """
    if not isinstance(adapted, AdaptedLoraConfig):
        return
    for name, config in model.peft_config.items():
        if type(config) is not LoraConfig or not _made_from(config, adapted):
            continue
        config.__class__ = AdaptedLoraConfig
        config._edits = adapted._edits
        config._reload_note, config._packed = adapted._reload_note, adapted._packed
        if adapted.lora_dropout != config.lora_dropout:
            set_dropout(model, name, adapted.lora_dropout)


def _made_from(config: Any, adapted: Any) -> bool:
    return all(_names(getattr(config, one)) == _names(getattr(adapted, one)) for one in _LISTS)


def _names(value: Any) -> Any:
    return value if isinstance(value, str) else frozenset(value or ())


def set_dropout(model: PeftModel, adapter: str, probability: float) -> None:
    """Give every layer of an adapter this dropout; PEFT sets it as it makes a layer."""
    model.peft_config[adapter].lora_dropout = probability
    for module in model.modules():
        if isinstance(module, layer.ParamWrapper):
            if adapter in module.lora_A:
                module._set_dropout(adapter, probability)
        elif isinstance(module, LoraLayer) and adapter in module.lora_dropout:
            module.lora_dropout[adapter] = nn.Dropout(p=probability)


__all__ = [
    "connect_adapters",
    "get_peft_model",
]
