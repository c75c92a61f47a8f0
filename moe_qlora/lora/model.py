"""The PEFT model over packed experts: `get_peft_model`, and the class behind later calls."""

from __future__ import annotations

import logging
import re
import types
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any, cast

import peft
import torch
from peft import LoraConfig, PeftConfig, PeftModel
from peft.tuners.lora import LoraModel as StockLoraModel
from peft.tuners.lora.layer import LoraLayer
from peft.tuners.tuners_utils import BaseTuner
from torch import Tensor, nn
from torch.nn.functional import pad

from ..checkpoint.rows import kept_dtypes
from ..errors import AdapterError, ConfigError
from ..experts import forward
from ..layout import unwrapped, unwrapped_name
from ..packing.decoders import restore_linear
from ..packing.parametrize import check_resident
from ..versions import REQUIRED, installed_version
from ..world import world
from .config import AdaptedLoraConfig, adapt_lora_config, become_adapted, record_base
from .files import use_own_files
from .inject import check_connected, log_coverage, upgrade_wrappers
from .layer import ParamWrapper, check_repack
from .merging import (
    Linear4bit,
    Linear8bitLt,
    SingleExpert,
    concatenate,
    merge_exactly,
    stored_factors,
    summed_config,
)
from .names import as_set, check_adapter_names, check_packed, packed_parameters, reached_modules
from .packed_rows import watch_packed_rows
from .unfit import serve_reads

_log = logging.getLogger(__name__)

_OFFLINE = (
    "save the adapter with save_pretrained on all ranks, and go on from its folder in one process, "
    "such as with moe-qlora merge"
)
_BEFORE_SHARDING = (
    "add adapters before the model is sharded; load_adapter(folder, adapter_name) loads weights "
    "into one that is there"
)


def get_peft_model(
    model: nn.Module,
    lora_config: PeftConfig,
    adapter_name: str = "default",
    *,
    experts: bool | Collection[str] = False,
    router: bool = False,
    scale_expert_rank: bool | int = False,
    unpacked_ok: bool = False,
    **peft_kwargs: Any,
) -> PeftModel:
    """Make a PEFT model over packed experts: `peft.get_peft_model` with the config adapted.

    Names, shapes and files are those of stock PEFT on the unpacked model. On a model without packed
    experts this is stock PEFT with a copy of the config, and a warning if the model has experts.
    What got LoRA is logged in one line, at INFO.

        adapt_lora_config          config.py     a new config for PEFT:
        |   resolve_targets        targets.py    pure: Targets(excludes, modules, parameters, notes)
        |   check_supported        targets.py    no DoRA, no PiSSA, ...
        |   make_adapted           config.py     the AdaptedLoraConfig
        v
        peft.get_peft_model                      stock PEFT; for each parameter of packed experts:
        |   wrap_parameter         inject.py     a ParamWrapper (layer.py), which the experts
        v                                        forward asks for its active LoraFactors
        connect_adapters           model.py      class LoraModel: add_adapter, merge_adapter, ...
            check_connected        inject.py     LoRA on each packed parameter has an effect

    Args:
        model: The model, changed in place as PEFT does.
        lora_config: The caller's config; never changed.
        adapter_name: Name of the first adapter.
        experts: As for `adapt_lora_config`.
        router: As for `adapt_lora_config`.
        scale_expert_rank: As for `adapt_lora_config`.
        unpacked_ok: The model's experts are there and are not packed on purpose: no warning, and no
            error.
        **peft_kwargs: Passed on to `peft.get_peft_model` (low_cpu_mem_usage,
            autocast_adapter_dtype, ...).

    Raises:
        ConfigError: See `adapt_lora_config`; also `mixed=True`, a `PeftModel`, and experts that are
            not packed although the model's quantization_config asks for it.
        AdapterError: LoRA on an expert parameter did not get connected.
    """
    plain = []
    asks_for_packed = bool(experts or router or scale_expert_rank)  # an error of its own, if none
    if not asks_for_packed and not packed_parameters(model):
        plain = check_packed(model, unpacked_ok=unpacked_ok, stacklevel=2)
    options = {"experts": experts, "router": router, "scale_expert_rank": scale_expert_rank}
    peft_model = make_peft_model(model, lora_config, adapter_name, options, **peft_kwargs)
    log_coverage(peft_model, adapter_name, [name for param in plain for name in param.names])
    return peft_model


def make_peft_model(
    model: nn.Module,
    lora_config: PeftConfig,
    adapter_name: str = "default",
    options: Mapping[str, Any] = types.MappingProxyType({}),
    **peft_kwargs: Any,
) -> PeftModel:
    """Do what `get_peft_model` does, without logs, also where experts are not packed.

    `options` are those of `adapt_lora_config`.
    """
    warn_untested()
    config = adapt_lora_config(model, lora_config, **options)
    if not packed_parameters(model):
        return peft.get_peft_model(model, config, adapter_name=adapter_name, **peft_kwargs)
    if isinstance(model, PeftModel):
        raise ConfigError(
            f"model is a PeftModel with adapters ({', '.join(model.peft_config)}); for one more "
            "call model.add_adapter(name, lora_config)."
        )
    if peft_kwargs.get("mixed"):
        raise ConfigError(
            "mixed=True combines adapter types, which packed experts cannot take; leave it out."
        )
    world().prepare_adapters(model, config)
    with without_false_warning(model, config):
        peft_model = peft.get_peft_model(model, config, adapter_name=adapter_name, **peft_kwargs)
    return connect_adapters(peft_model)


def connect_adapters(model: PeftModel) -> PeftModel:
    """Connect adapters that a host has created with stock PEFT over packed experts, in place.

    For hosts that build the `LoraConfig` and the `PeftModel` themselves, given the names from
    `target_parameters` and `exclude_modules`. Parameters, optimizer state and weights stay; the
    order of nested wrappers, and with it the names in files, becomes that of the unpacked model.

    Args:
        model: A `PeftModel` over a model with packed experts; any other is returned as it is.

    Raises:
        AdapterError: An adapter targets a packed parameter and has no layer for it.
    """
    tuner = getattr(model, "base_model", None)
    # Prompt learning leaves the model as it is.
    if not packed_parameters(model) or not isinstance(tuner, BaseTuner):
        return model
    if type(tuner) is StockLoraModel:
        tuner.__class__ = LoraModel
    upgrade_wrappers(tuner.model)
    use_own_layers(tuner.model)
    check_adapter_names(tuner.model, model.peft_config)
    for name, config in model.peft_config.items():
        check_connected(tuner.model, name, config)
        record_base(tuner.model, config)
    watch_packed_rows(tuner.model)
    world().follow_adapters(tuner.model)
    use_own_files(model)
    return model


def apply_adapted_config(model: PeftModel, adapted: PeftConfig) -> None:
    """Apply an adapted LoRA config to adapters that a host made from its lists with stock PEFT.

    Their files then have the caller's settings, and their layers the caller's dropout.
    """
    if not isinstance(adapted, AdaptedLoraConfig):
        return
    # Not by target_modules, which PEFT narrows to the modules that it finds.
    fields = ("target_parameters", "exclude_modules")
    for name, config in model.peft_config.items():
        if type(config) not in (LoraConfig, AdaptedLoraConfig) or not all(
            as_set(getattr(config, field)) == as_set(getattr(adapted, field)) for field in fields
        ):
            continue
        become_adapted(config, adapted._edits, adapted._notes, adapted._packed)
        record_base(model.get_base_model(), config)
        if adapted.lora_dropout != config.lora_dropout:
            set_dropout(model, name, adapted.lora_dropout)


def set_dropout(model: PeftModel, adapter: str, probability: float) -> None:
    """Give every layer of an adapter this dropout; PEFT sets it only as it makes a layer."""
    model.peft_config[adapter].lora_dropout = probability
    for module in model.modules():
        if isinstance(module, ParamWrapper) and adapter in module.lora_A:
            module.set_dropout(adapter, probability)
        elif isinstance(module, LoraLayer) and adapter in module.lora_dropout:
            module.lora_dropout[adapter] = nn.Dropout(p=probability)


def use_own_layers(model: nn.Module) -> None:
    """Turn PEFT's layers into ours where these do more, in place."""
    merge_exactly(model)
    serve_reads(model)


class LoraModel(StockLoraModel):
    """PEFT's LoRA model over packed experts, whose later calls are right too."""

    def inject_adapter(
        self, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any
    ) -> None:
        check_adapter_names(model, self.peft_config)
        world().check_unsharded(model, f"Adding the adapter {adapter_name!r}", _BEFORE_SHARDING)
        config = adapt_lora_config(model, self.peft_config[adapter_name])
        self.peft_config[adapter_name] = config
        with without_false_warning(model, config):
            super().inject_adapter(model, adapter_name, *args, **kwargs)
        self._post_injection_hook(model, config, adapter_name)

    def _post_injection_hook(self, model: nn.Module, config: Any, adapter_name: str) -> None:
        # PEFT calls it for a first adapter, which the stock class may inject (stock_calls.py).
        super()._post_injection_hook(model, config, adapter_name)
        use_own_layers(model)
        check_connected(model, adapter_name, config)
        record_base(model, config)
        world().follow_adapters(model)

    def merge_adapter(
        self, *args: Any, dtype: torch.dtype | None = None, repack: bool = False, **kwargs: Any
    ) -> None:
        """Merge into the base weights; `unmerge_adapter` restores the original codes bit for bit.

        Packed experts are plain until then: W + s B A, in fp32, rounded once to `dtype`, by
        default the dtype before packing. So do bitsandbytes' Linear layers with an adapter where
        `dtype` is given; without it they are packed again, as PEFT does, which rounds away much of
        an adapter. `repack` packs experts and Linear layers again, with any dtype.
        """
        with self._merging(dtype, repack):
            super().merge_adapter(*args, **kwargs)

    def merge_and_unload(
        self, *args: Any, dtype: torch.dtype | None = None, repack: bool = False, **kwargs: Any
    ) -> nn.Module:
        """Return the base model with adapters merged; `dtype`, `repack` as in `merge_adapter`.

        With `dtype` (and no `repack`) it is a plain model of that dtype, which no later load packs
        again: Linear layers without an adapter are dequantized too, and other weights cast, except
        those that the model's class keeps in fp32.
        """
        with self._merging(dtype, repack):
            merged = cast(nn.Module, super().merge_and_unload(*args, **kwargs))
        if dtype is None or repack:
            forward.clear_quantized(merged)
            return merged
        for module in merged.modules():
            restore_linear(module)
        forward.dequantize(merged, dtype)
        kept = kept_dtypes(merged, dtype)
        for name, parameter in merged.named_parameters():
            if parameter.is_floating_point() and not kept(name):
                parameter.data = parameter.data.to(dtype)
        return merged

    def unmerge_adapter(self) -> None:
        """Undo `merge_adapter`."""
        world().check_unsharded(self.model, "Unmerging", _OFFLINE)
        with self._stock_linears():
            super().unmerge_adapter()

    @contextmanager
    def _merging(self, dtype: torch.dtype | None, repack: bool) -> Iterator[None]:
        world().check_unsharded(self.model, "Merging", _OFFLINE)
        check_resident(self.model)
        if repack:
            check_repack(self.model)
        layers = list(self.model.modules())
        wrappers = [module for module in layers if isinstance(module, ParamWrapper)]
        linears = [module for module in layers if isinstance(module, (Linear4bit, Linear8bitLt))]
        for wrapper in wrappers:
            wrapper.merge_dtype, wrapper.merge_repack = dtype, repack
        for linear in linears:
            linear.merge_dtype = None if repack else dtype
        try:
            with self._stock_linears():
                yield
        finally:
            for wrapper in wrappers:
                wrapper.merge_dtype, wrapper.merge_repack = None, False
            for linear in linears:
                linear.merge_dtype = None

    @contextmanager
    def _stock_linears(self) -> Iterator[None]:
        """Convert adapted Linear layers to bitsandbytes' own layout, which PEFT can merge."""
        for module in self.model.modules():
            if isinstance(module, LoraLayer):
                restore_linear(unwrapped(module))
        yield
        world().lay_out(self.model)

    def add_weighted_adapter(
        self,
        adapters: list[str],
        weights: list[float],
        adapter_name: str,
        combination_type: str = "svd",
        **kwargs: Any,
    ) -> None:
        """Add the weighted sum of adapters as PEFT does, on expert parameters expert by expert."""
        if adapter_name in self.peft_config:
            return
        check_adapter_names(self.model, {*self.peft_config, adapter_name})
        world().check_unsharded(self.model, "add_weighted_adapter", _OFFLINE)
        for adapter in adapters:
            if adapter not in self.peft_config:
                raise AdapterError(
                    f"add_weighted_adapter: there is no adapter {adapter!r}; the model has "
                    f"{', '.join(self.peft_config)}."
                )
        configs = {name: self.peft_config[name] for name in adapters}
        summed = summed_config(self.model, [configs[name] for name in adapters], adapters)
        # PEFT derives the new config from the first one, and refuses target_parameters, which its
        # own wrappers cannot combine, and target_modules of several kinds.
        plain = {"target_parameters": None, "target_modules": summed.target_modules}
        self.peft_config.update({n: replace(config, **plain) for n, config in configs.items()})
        self._summed = summed
        try:
            super().add_weighted_adapter(
                adapters, weights, adapter_name, combination_type=combination_type, **kwargs
            )
        finally:
            del self._summed
            self.peft_config.update(configs)
        if combination_type == "cat" and len(adapters) > 1:
            for module in self.model.modules():
                if isinstance(module, ParamWrapper) and adapter_name in module.lora_A:
                    concatenate(module, adapters, weights, adapter_name)

    def _check_add_weighted_adapter(self, adapters: list[str], *args: Any, **kwargs: Any) -> Any:
        checked = super()._check_add_weighted_adapter(adapters, *args, **kwargs)
        self.peft_config[adapters[0]] = self._summed  # PEFT derives the new one from it next
        return checked

    def _svd_generalized_task_arithmetic_weighted_adapter(
        self, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        stock = super()._svd_generalized_task_arithmetic_weighted_adapter
        shared, rank, target, rest = args[:3], args[3], args[4], args[5:]
        parts = [target]
        if isinstance(target, ParamWrapper):
            parts = [SingleExpert(target, index) for index in range(target.num_experts)]
        # PEFT's rank is at most the weight's: zeros fill the rest.
        sides = (rest[0].shape[1], len(rest[1])) if rest[0].dim() == 2 else ()  # no convolution
        most, factors = min((rank, *sides)), []
        for part in parts:
            a, b = stock(*shared, most, part, *rest, **kwargs)
            missing = rank - most
            factors.append((pad(a, (0, 0, 0, missing)), pad(b, (0, missing))))
        return stored_factors(factors) if isinstance(target, ParamWrapper) else factors[0]


@contextmanager
def without_false_warning(model: nn.Module, config: PeftConfig) -> Iterator[None]:
    """Suppress PEFT's false "pattern did not match" warning for expert parameters.

    PEFT still warns of patterns that match nothing at all.
    """
    parameters = getattr(config, "target_parameters", None) or ()
    fields = ("rank_pattern", "alpha_pattern")
    patterns = {field: list(getattr(config, field, None) or ()) for field in fields}
    if not parameters or not any(patterns.values()):
        yield
        return
    names = [*parameters, *map(unwrapped_name, reached_modules(model, config))]
    message = "The following {} keys did not match any targeted module and were ignored"
    with warnings.catch_warnings():
        for field in fields:
            warnings.filterwarnings("ignore", message.format(field), RuntimeWarning)
        yield
    for field, keys in patterns.items():
        idle = [key for key in keys if not any(re.match(rf"(.*\.)?({key})$", n) for n in names)]
        if idle:
            warnings.warn(f"{message.format(field)}: {sorted(idle)}.", RuntimeWarning, stacklevel=4)


@cache
def warn_untested() -> None:
    """Warn once where PEFT or transformers has a version that was not tested here."""
    for package in ("peft", "transformers"):
        installed, tested = installed_version(package), REQUIRED[package]
        if installed is not None and not tested.includes(installed):
            warnings.warn(
                f"{package} {installed} is not one of the versions this package was tested with "
                f"({tested}); every adapter is still checked after it is created.",
                UserWarning,
                stacklevel=3,
            )
