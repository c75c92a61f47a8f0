"""What transformers asks a quantizer while it loads a model, answered for expert stacks too.

In the order of the calls:

    update_attn_implementation   the config, before any file is looked for: is it a packed folder?
    update_device_map,
    validate_environment         which device gets what
    preprocess_model             the model on meta: detect, plan, refuse
    update_weight_conversions    converters that pack (converters.py) in the place of the model's
    param_element_size           true bytes, for device maps and the allocator's warm-up
    param_needs_quantization     packed parameters have another shape than the model's
    postprocess_model            put the stacks on their modules, and be the stock quantizer again

The quantizer that a loaded model keeps is of the stock class: nothing of this file outlives a load.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

from torch import nn
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.integrations.accelerate import get_max_memory
from transformers.quantizers.base import get_keys_to_not_convert

from ..checkpoint.integrity import FolderCheck
from ..checkpoint.load_spec import LoadSpec, packing_spec, reload_spec, safetensors_files
from ..checkpoint.manifest import CONFIG_KEY, Manifest, Mark, has_manifest, parse_mark
from ..errors import CheckpointError
from ..packing import parametrize
from ..packing.codec import pack
from ..packing.format import ABSMAX, SCALES
from .converters import PackedConverter, PackingConverter, WholeNames
from .model import finish_packing


@cache
def packing_quantizer(stock: type, extra_skip_modules: Callable[[], Sequence[str]]) -> type:
    """Derive the class that packs experts from the one that serves bitsandbytes configs now.

    Args:
        stock: transformers' quantizer class.
        extra_skip_modules: Gives, at each load, the patterns of what to leave in 16 bit on top of
            the load's own config.
    """
    members = {"__module__": __name__, "_extra_skip_modules": staticmethod(extra_skip_modules)}
    return type(f"Packing{stock.__name__}", (_Packing, stock), members)


class _Packing:
    """Mixed in before a bitsandbytes quantizer of transformers."""

    pre_quantized: bool
    quantization_config: Any
    _extra_skip_modules: Callable[[], Sequence[str]]
    _plan: LoadSpec | None = None
    _device_map: Any = None
    _checked: FolderCheck | None = None
    _mark: Mark | None = None

    def update_attn_implementation(self, config: Any) -> Any:
        """Recognise a packed folder by its config, and make transformers find its files."""
        config = super().update_attn_implementation(config)  # type: ignore[misc]
        if CONFIG_KEY not in config.__dict__:
            return config
        self._mark = parse_mark(config.__dict__.pop(CONFIG_KEY))
        config.transformers_weights = self._mark.entry
        folder = Path(getattr(config, "_name_or_path", None) or "")
        if str(folder) != "." and (folder / "config.json").is_file():
            # Before transformers looks for files, so that what is missing is named by us.
            self._check(folder, self._mark)
        return config

    def _check(self, folder: Path, mark: Mark) -> Manifest:
        if self._checked is None or self._checked.folder != folder:
            self._checked = FolderCheck(folder, mark)
        return self._checked.manifest

    def update_device_map(self, device_map: Any) -> Any:
        """Note what the stock quantizer makes of it."""
        self._device_map = super().update_device_map(device_map)  # type: ignore[misc]
        return self._device_map

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Note the settled device map, which transformers shows here last."""
        super().validate_environment(*args, **kwargs)  # type: ignore[misc]
        self._device_map = kwargs.get("device_map")
        if self._plan is not None:
            self._plan.device_map = self._device_map

    def preprocess_model(self, model: Any, dtype: Any = None, **kwargs: Any) -> None:
        """Plan what is packed, while the model is still as it was built."""
        files = kwargs.get("checkpoint_files")
        self._add_skips(model)
        self._plan = self._make_plan(model, dtype, files, kwargs.get("device_map"))
        self._plan.device_map = self._device_map
        super().preprocess_model(model, dtype=dtype, **kwargs)  # type: ignore[misc]
        # Stock may have put lists of Linear layers in the place of stacks.
        held = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        self._plan.params = {n: p for n, p in self._plan.params.items() if n in held}
        self._measure(model)

    def _add_skips(self, model: Any) -> None:
        """Leave in 16 bit, in a copy of the config, what the switch was told to leave."""
        extra = self._extra_skip_modules()
        if not extra or self.pre_quantized:
            return
        config = copy.copy(self.quantization_config)
        own = config.llm_int8_skip_modules
        if own is None:  # a list takes the place of the stock default, which is the output head
            own = get_keys_to_not_convert(model)
        config.llm_int8_skip_modules = list(dict.fromkeys([*own, *extra]))
        self.quantization_config = config

    def _make_plan(self, model: Any, dtype: Any, files: list[str] | None, place: Any) -> LoadSpec:
        folder = Path(files[0]).parent if files else None
        if self._mark is None:
            plan = packing_spec(model, self.quantization_config, dtype, place)
        else:
            if folder is None or files is None:
                raise CheckpointError("A packed folder is loaded by its path, not by tensors.")
            manifest = self._check(folder, self._mark)
            # transformers was sent to the first file only; the manifest knows them all.
            files[:] = [str(folder / name) for name in manifest.shards]
            model.config.__dict__.pop("transformers_weights", None)
            plan = reload_spec(model, self.quantization_config, dtype, manifest, folder)
        plan.files = safetensors_files(files)
        if self._mark is None and self.pre_quantized and folder and has_manifest(folder):
            ends = (ABSMAX, SCALES)
            if any(f"{name}{end}" in (plan.files or ()) for name in plan.params for end in ends):
                raise CheckpointError(
                    f"{folder} holds a manifest of moe_qlora, but its config.json does not say so: "
                    "it was overwritten; restore it, or pack the model again."
                )
        return plan

    def _convert_model_for_quantization(self, model: Any) -> None:
        """Leave fused experts alone, unless the checkpoint holds them as single layers."""
        # Llama 4: stock swaps its experts for a list of Linear layers, as such folders once were.
        plan = self._plan
        if plan is not None and plan.files is not None:
            names = [param.module_name for param in plan.layout.experts]
            if not any(f"{name}.0." in key for key in plan.files for name in names):
                return
        super()._convert_model_for_quantization(model)  # type: ignore[misc]

    def update_weight_conversions(self, weight_conversions: Any, *model: Any) -> Any:
        """Put converters that pack in the place of the model's own, and add those for the rest."""
        plan = self._plan
        if plan is None or not plan.params:
            return super().update_weight_conversions(weight_conversions, *model)  # type: ignore[misc]
        if plan.manifest is not None:
            # A packed folder has the model's own names: nothing to rename, nothing to merge.
            own = [PackedConverter(leaf, plan) for leaf in plan.leaves()]
            theirs = super().update_weight_conversions([], *model)  # type: ignore[misc]
            return own + [WholeNames.converter(linears) for linears in theirs]
        conversions = []
        for theirs in weight_conversions:
            if isinstance(theirs, WeightConverter):
                ours = PackingConverter.replacing(theirs, plan)
                plan.replaced.append((ours, theirs))
                conversions.append(ours)
            else:
                conversions.append(theirs)
        conversions = super().update_weight_conversions(conversions, *model)  # type: ignore[misc]
        for leaf in plan.leaves():
            ours = PackingConverter.for_fused(leaf, plan)
            plan.replaced.append((ours, None))
            conversions.append(ours)
        return conversions

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        """Whether a parameter ends up packed."""
        if self._plan is not None and param_name in self._plan.params:
            return True
        needs: bool = super().param_needs_quantization(model, param_name, **kwargs)  # type: ignore[misc]
        return needs

    def param_element_size(self, model: Any, param_name: str, param: Any) -> float:
        """Bytes of an element once it is loaded, a packed stack's statistics included."""
        if self._plan is not None and param_name in self._plan.params:
            return self._plan.nbytes(param_name) / param.numel()
        size: float = super().param_element_size(model, param_name, param)  # type: ignore[misc]
        return size

    def adjust_max_memory(self, max_memory: dict[Any, Any]) -> dict[Any, Any]:
        """What each device may take, so that "auto" and "balanced" spread the model evenly.

        transformers asks with even shares of the model and room for a block more; the stock answer
        takes a tenth off, and what all lack falls to the last device (Qwen3-30B-A3B on two: 6.9 and
        8.7 GiB instead of 7.8 each). Only of a device's free memory a tenth stays free here.
        """
        stock = super().adjust_max_memory(max_memory)  # type: ignore[misc]
        if self._plan is None or not self._plan.params:
            return dict(stock)
        free = get_max_memory()
        shares = {
            device: min(share, max(stock[device], 0.9 * free[device])) if device in free else share
            for device, share in max_memory.items()
        }
        if self._device_map not in ("auto", "balanced"):
            return shares
        places = [device for device, share in shares.items() if isinstance(device, int) and share]
        if len(places) < 2:
            return shares
        even = dict(zip(places, _even_shares(self._plan.unit_nbytes, len(places)), strict=True))
        if all(shares[place] >= even[place] for place in places):
            shares |= {place: even[place] for place in places[:-1]}
        return shares

    def _measure(self, model: Any) -> None:
        """Note the bytes of the model's blocks, and of the layers outside of them, in order."""
        plan = cast(LoadSpec, self._plan)
        blocks = set(model._no_split_modules or ())
        owners = {name for name, part in model.named_modules() if type(part).__name__ in blocks}
        units: dict[str, float] = {}
        for name, parameter in model.named_parameters():
            parts = name.split(".")
            above = (".".join(parts[:end]) for end in range(1, len(parts)))
            unit = next((owner for owner in above if owner in owners), name.rpartition(".")[0])
            size = parameter.numel() * self.param_element_size(model, name, parameter)
            units[unit] = units.get(unit, 0.0) + size
        plan.unit_nbytes = tuple(units.values())

    def get_quantize_ops(self) -> Any:
        """The stock operation, kept from expert stacks: converters have packed these already."""
        ops = super().get_quantize_ops()  # type: ignore[misc]
        return ops if self._plan is None else _LeaveExperts(ops, self._plan)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        """Put the packed stacks on their modules, and step back."""
        model = super()._process_model_after_weight_loading(model, **kwargs)  # type: ignore[misc]
        plan, self._plan = self._plan, None
        if self._checked is not None:
            self._checked.finish()
        if model.__dict__.get("hf_quantizer") is self:
            model.hf_quantizer = self._stock()
        if plan is not None:
            finish(model, plan, self.quantization_config)
        return model

    def _stock(self) -> Any:
        """The same quantizer as one of the stock class, for the model to keep."""
        stock: Any = type(self).__mro__[2]
        quantizer = stock.__new__(stock)
        quantizer.__dict__.update(self.__dict__)
        for name in ("_plan", "_device_map", "_checked", "_mark"):
            quantizer.__dict__.pop(name, None)
        return quantizer


def _even_shares(units: Sequence[float], devices: int) -> list[float]:
    """What each device may take so that units, filled in in their order, end up even.

    Args:
        units: Bytes of what is not split, in order.
        devices: How many.
    """
    total, done, place = sum(units), 0.0, 0
    held = [0.0] * max(devices, 1)
    for unit in units:
        # to where its middle lies, were the model one line cut into equal parts
        while place < len(held) - 1 and done + unit / 2 > total * (place + 1) / len(held):
            place += 1
        held[place] += unit
        done += unit
    shares = [share + min(units, default=0.0) / 2 for share in held]
    # On the first device accelerate keeps room for the largest layer free.
    shares[0] += max(units, default=0.0)
    return shares


class _LeaveExperts(ConversionOps):
    """Quantizes what the stock operation does, and passes expert stacks on."""

    def __init__(self, stock: Any, plan: LoadSpec) -> None:
        self.stock, self.plan = stock, plan

    def convert(self, input_dict: dict[str, Any], *args: Any, **context: Any) -> Any:
        """Names to tensors, those of Linear layers packed."""
        stacks = {n: value for n, value in input_dict.items() if n in self.plan.params}
        rest = {n: value for n, value in input_dict.items() if n not in stacks}
        return stacks | (self.stock.convert(rest, *args, **context) if rest else {})


def finish(model: Any, plan: LoadSpec, config: Any) -> None:
    """Attach what was packed, pack what was not, and make the model say what it is.

    Args:
        model: Loaded; packed stacks are still plain parameters that hold the codes.
        plan: Of the load.
        config: The caller's `BitsAndBytesConfig`.

    Raises:
        CheckpointError: A stack of a packed folder was not in its files.
    """
    _restore_conversions(model, plan)
    if not plan.params:
        return
    holders = {id(parametrize.hold(stack)): stack for stack in plan.packed.values()}
    for name, param in plan.params.items():
        module, leaf = _owner(model, name)
        if parametrize.is_packed(module, leaf):
            continue  # by another name of it
        weight = module._parameters.get(leaf)
        stack = holders.get(id(weight))
        if stack is None:
            if plan.manifest is not None or weight is None:
                raise CheckpointError(f"{name} was not loaded: the checkpoint does not hold it.")
            # It came by a way of its own, or was missing and has just been initialised.
            stack = pack(weight, plan.settings)
        for other in param.names:
            module, leaf = _owner(model, other)
            if module._parameters.get(leaf) is weight:
                parametrize.attach(module, leaf, stack)
    finish_packing(model, plan.layout, config, plan.settings)


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    module_name, _, leaf = name.rpartition(".")
    return model.get_submodule(module_name), leaf


def _restore_conversions(model: Any, plan: LoadSpec) -> None:
    """Let a later save of the decoded model find transformers' own converters."""
    if plan.manifest is not None:
        # Nothing was renamed on the way in; without a record, the model type's mapping is used.
        model.__dict__.pop("_weight_conversions", None)
        return
    theirs = {id(ours): original for ours, original in plan.replaced}
    kept = []
    for conversion in model.__dict__.get("_weight_conversions") or []:
        original = theirs.get(id(conversion), conversion)
        if original is not None:
            if original is not conversion:
                original._was_used = conversion._was_used
            kept.append(original)
    if "_weight_conversions" in model.__dict__:
        model._weight_conversions = kept
