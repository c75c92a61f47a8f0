"""The PEFT model over packed experts: `get_peft_model`, and the class behind later calls."""

import os
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import peft
import torch
from peft import LoraConfig, PeftConfig, PeftModel
from peft.tuners.lora import LoraModel as StockLoraModel
from peft.tuners.lora.layer import LoraLayer
from peft.tuners.tuners_utils import BaseTuner
from peft.utils.save_and_load import load_peft_weights
from torch import nn

from ..checkpoint import training_codec
from ..checkpoint.adapter import WEIGHTS, of_single_experts, single_expert
from ..checkpoint.folder import read_header
from ..checkpoint.rows import kept_dtypes
from ..errors import AdapterError, ConfigError
from ..experts import checks, forward
from ..layout import base_model
from ..packing.parametrize import check_resident
from ..world import world
from . import files
from .config import adapt, adapt_lora_config, record_base, spell_exactly
from .layer import Linear4bit, Linear8bitLt, ParamWrapper, use_own_layers
from .packed_rows import watch_packed_rows
from .targets import check_adapter_names, check_packed, packed_parameters, rewritten

_CREATION_KEYS = ("low_cpu_mem_usage", "autocast_adapter_dtype")
_OFFLINE = (
    "save the adapter on all ranks, and go on from its folder in one process (moe-qlora merge)"
)
_BEFORE_SHARDING = "add adapters before the model is sharded; load_adapter fills one that is there"


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

    Args:
        model: The model, changed in place as PEFT does.
        lora_config: The caller's config; never changed.
        adapter_name: Of the first adapter.
        experts: As for `adapt_lora_config`.
        router: As for `adapt_lora_config`.
        scale_expert_rank: As for `adapt_lora_config`.
        unpacked_ok: Accept experts that are not packed, without a warning or an error.
        **peft_kwargs: Passed on to `peft.get_peft_model` (low_cpu_mem_usage, ...).

    Raises a `ConfigError` as `adapt_lora_config`, for `mixed=True`, a `PeftModel`, and for experts
    that are not packed although the model's quantization_config asks for it.
    """
    if not (experts or router or scale_expert_rank):  # which have an error of their own
        check_packed(model, unpacked_ok=unpacked_ok, stacklevel=2)
    config = adapt_lora_config(
        model, lora_config, experts=experts, router=router, scale_expert_rank=scale_expert_rank
    )
    if not packed_parameters(model):
        return peft.get_peft_model(model, config, adapter_name=adapter_name, **peft_kwargs)
    if isinstance(model, PeftModel):
        said = f"model is a PeftModel with adapters ({', '.join(model.peft_config)})"
        raise ConfigError(f"{said}; for one more call model.add_adapter(name, lora_config).")
    if peft_kwargs.get("mixed"):
        raise ConfigError("mixed=True combines adapter types, and experts take LoRA; leave it out.")
    world().prepare_adapters(model, config)
    with without_false_warning(config):
        peft_model = peft.get_peft_model(model, config, adapter_name=adapter_name, **peft_kwargs)
    return connect_adapters(peft_model)


def load_adapter(
    model: nn.Module,
    adapter: str | os.PathLike[str],
    adapter_name: str = "default",
    *,
    is_trainable: bool = False,
    any_base: bool = False,
    unpacked_ok: bool = False,
    **peft_kwargs: Any,
) -> PeftModel:
    """Load a saved adapter: `PeftModel.from_pretrained` for packed experts.

    Reads adapters of this package and of stock PEFT on the unpacked model, and those on single
    experts (transformers v4) that PEFT can fuse for the model's type. Files of adapters on experts
    carry no `lora_dropout`, which stock PEFT would refuse.

    Args:
        model: A model with packed experts, or a `PeftModel` of it, which gets one more adapter.
        adapter: The folder, or the repository id.
        adapter_name: Name of the adapter in the model.
        is_trainable: False freezes the adapter and puts the model in evaluation mode, as PEFT does.
        any_base: Accept a model other than the one in the adapter's note.
        unpacked_ok: Accept experts that are not packed though the adapter's note says packed.
        **peft_kwargs: Passed on to `PeftModel.from_pretrained` or `PeftModel.load_adapter`.

    Raises an `AdapterError` where the file does not fit the model, or the adapter's note names one
    that computes otherwise or has other weights; a `CheckpointError` where the folder is no
    adapter, or a file of it is missing or damaged; a `ConfigError` as `adapt_lora_config`.
    """
    adapter = os.fspath(adapter)
    if adapter_name in getattr(model, "peft_config", {}):
        raise AdapterError(f"adapter_name={adapter_name!r} is in this model already: give another.")
    base = base_model(model)
    hub = {key: peft_kwargs[key] for key in files.HUB_KEYS if key in peft_kwargs}
    subfolder = hub.get("subfolder") or ""
    on_disk = Path(adapter) / subfolder
    files.check_adapter(adapter, base, subfolder, any_base=any_base)
    if training_codec.from_note(on_disk) is not None:  # trained on packed experts
        check_packed(base, unpacked_ok=unpacked_ok, stacklevel=2)
    with files.reading(adapter):
        config = _read_config(base, adapter, on_disk, **hub)
    config.inference_mode = not is_trainable
    config = adapt(base, config)
    creation = {key: peft_kwargs[key] for key in _CREATION_KEYS if key in peft_kwargs}
    peft_model: Any = model
    with without_false_warning(config):
        if isinstance(model, PeftModel):
            model.add_adapter(adapter_name, config, **creation)
        else:
            made = peft.get_peft_model(model, config, adapter_name=adapter_name, **creation)
            peft_model = connect_adapters(made)
    if is_trainable:
        peft_model.set_requires_grad(adapter_name)
    peft_kwargs.setdefault("key_mapping", getattr(base, "_checkpoint_conversion_mapping", None))
    peft_kwargs |= {"called": adapter, "is_trainable": is_trainable}
    files.load_adapter(peft_model, adapter, adapter_name, **peft_kwargs)
    return cast(PeftModel, peft_model)


def _read_config(base: nn.Module, adapter: str, folder: Path, **hub: Any) -> PeftConfig:
    config: PeftConfig = PeftConfig.from_pretrained(adapter, **hub)
    if isinstance(config, LoraConfig):
        local: Any = read_header(folder / WEIGHTS) if (folder / WEIGHTS).exists() else None
        keys = local or load_peft_weights(adapter, device="cpu", **hub)
        if (key := single_expert(base, keys)) is not None:
            if (fused := rewritten(base, config)) is None:
                raise of_single_experts(adapter, key)
            return fused  # PEFT fuses those of transformers v4 for some model types
    return config if packed_parameters(base) else spell_exactly(base, config)


def connect_adapters(model: PeftModel) -> PeftModel:
    """Check adapters that a host has created with stock PEFT over packed experts, in place.

    For hosts that build the `LoraConfig` and the `PeftModel` themselves, with the names from
    `target_parameters` and `exclude_modules`. Any other model is returned as it is. An
    `AdapterError` where an adapter targets a packed parameter and has no layer for it.
    """
    tuner = getattr(model, "base_model", None)
    # Prompt learning leaves the model as it is.
    if not packed_parameters(model) or not isinstance(tuner, BaseTuner):
        return model
    if type(tuner) is StockLoraModel:
        tuner.__class__ = LoraModel
    use_own_layers(tuner.model)
    check_adapter_names(tuner.model, model.peft_config)
    checks.check(tuner.model, model.peft_config)
    for config in model.peft_config.values():
        record_base(tuner.model, config)
    watch_packed_rows(tuner.model)
    world().follow_adapters(tuner.model)
    files.use_own_files(model)
    return model


def set_dropout(model: PeftModel, adapter: str, probability: float) -> None:
    """Give every layer of an adapter this dropout, which files of adapters do not carry."""
    model.peft_config[adapter].lora_dropout = probability
    for module in model.modules():
        if isinstance(module, ParamWrapper) and adapter in module.lora_A:
            module.set_dropout(adapter, probability)
        elif isinstance(module, LoraLayer) and adapter in module.lora_dropout:
            module.lora_dropout[adapter] = nn.Dropout(p=probability)


class LoraModel(StockLoraModel):
    """PEFT's LoRA model over packed experts, whose later calls are right too."""

    def inject_adapter(
        self, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any
    ) -> None:
        check_adapter_names(model, self.peft_config)
        world().check_unsharded(model, f"Adding the adapter {adapter_name!r}", _BEFORE_SHARDING)
        config = adapt_lora_config(model, self.peft_config[adapter_name])
        self.peft_config[adapter_name] = config
        with without_false_warning(config):
            super().inject_adapter(model, adapter_name, *args, **kwargs)
        self._post_injection_hook(model, config, adapter_name)

    def _post_injection_hook(self, model: nn.Module, config: Any, adapter_name: str) -> None:
        # PEFT calls it for a first adapter, which the stock class may inject (stock_calls.py).
        super()._post_injection_hook(model, config, adapter_name)
        use_own_layers(model)
        checks.check(model, {adapter_name: config})
        record_base(model, config)
        world().follow_adapters(model)

    def merge_adapter(self, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> None:
        """Merge into the base weights; `unmerge_adapter` restores the original codes bit for bit.

        Packed experts and Linear layers with an adapter are plain until then: W + s B A, in fp32,
        rounded once to `dtype`, by default the dtype before packing.
        """
        with self._merging(dtype):
            super().merge_adapter(*args, **kwargs)

    def merge_and_unload(
        self, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any
    ) -> nn.Module:
        """Return the base model with adapters merged; `dtype` as in `merge_adapter`.

        With `dtype` it is a plain model of that dtype: Linear layers without an adapter are
        dequantized too, and other weights cast, except the weights that the class keeps in fp32.
        """
        with self._merging(dtype):
            merged = cast(nn.Module, super().merge_and_unload(*args, **kwargs))
        if dtype is None:
            forward.clear_quantized(merged)
            return merged
        for module in merged.modules():
            if hasattr(type(module), "restore_stock"):  # a Linear layer that engines can shard
                cast(Any, module).restore_stock()
        forward.dequantize(merged, dtype)
        kept = kept_dtypes(merged, dtype)
        for name, parameter in merged.named_parameters():
            if parameter.is_floating_point() and not kept(name):
                parameter.data = parameter.data.to(dtype)
        return merged

    def unmerge_adapter(self) -> None:
        """Undo `merge_adapter`."""
        world().check_unsharded(self.model, "Unmerging", _OFFLINE)
        super().unmerge_adapter()

    @contextmanager
    def _merging(self, dtype: torch.dtype | None) -> Iterator[None]:
        world().check_unsharded(self.model, "Merging", _OFFLINE)
        check_resident(self.model)
        kinds = (ParamWrapper, Linear4bit, Linear8bitLt)
        layers = [module for module in self.model.modules() if isinstance(module, kinds)]
        try:
            for layer in layers:
                layer.merge_dtype = dtype
                if not dtype and not isinstance(layer, ParamWrapper):  # int8 layers know no dtype
                    layer.merge_dtype = getattr(self.model, "dtype", None)
            yield
        finally:
            for layer in layers:
                layer.merge_dtype = None


@contextmanager
def without_false_warning(config: PeftConfig) -> Iterator[None]:
    """Suppress PEFT's warning on patterns for expert parameters: it looks at modules alone."""
    with warnings.catch_warnings():
        if getattr(config, "target_parameters", None):
            said = "The following (rank|alpha)_pattern keys did not match any targeted module"
            warnings.filterwarnings("ignore", said, RuntimeWarning)
        yield
