"""What transformers asks a quantizer while it loads a model, answered for expert weights too.

The methods stand in the order of the calls; switch.py draws the path. The quantizer that a loaded
model keeps is of the stock class: nothing of this file outlives a load.
"""

from __future__ import annotations

import copy
from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.integrations.accelerate import get_max_memory
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.quantizers.base import get_keys_to_not_convert

from ..checkpoint.integrity import FolderCheck, model_problems, warn_of_changes
from ..checkpoint.load_spec import LoadSpec, packing_spec, reload_spec
from ..checkpoint.manifest import CONFIG_KEY, Manifest, Mark, has_manifest, parse_mark
from ..checkpoint.prequantized import describe_plain
from ..checkpoint.reader import Checkpoint, check_plain
from ..checkpoint.source import file_facts
from ..errors import CheckpointError, ConfigError, NonFiniteWeightError
from ..layout import listed
from ..models.files import check_no_codes_of_single_experts
from ..packing import parametrize
from ..packing.codec import LARGEST, are_below
from ..packing.codecs import codecs
from ..packing.linear import check_linears
from ..world import many_ranks, offload, world
from .converters import (
    FillingConverter,
    LinearConverter,
    PackedConverter,
    PlainNames,
    RestConverter,
    WeightPacker,
    check_read,
    load_dtypes,
    open_files,
    refuse_to_shard,
    take_makers_config,
    weights_to_keep,
)
from .model import finish_packing


@cache
def packing_quantizer(
    stock: type,
    extra_skip_modules: Callable[[], Sequence[str]],
    keeps_codes: Callable[[], bool] = lambda: False,
    offloads: Callable[[], bool] = lambda: False,
) -> type:
    """Derive the class that packs experts from the one that serves bitsandbytes configs now."""
    members = {
        "__module__": __name__,
        "_extra_skip_modules": staticmethod(extra_skip_modules),
        "_keeps_codes": staticmethod(keeps_codes),
        "_offloads": staticmethod(offloads),
    }
    return type(f"Packing{stock.__name__}", (_Packing, stock), members)


class _Packing(ABC):  # as transformers' quantizers are, so that `__bases__` can be assigned
    """Mixed in before a bitsandbytes quantizer of transformers."""

    pre_quantized: bool
    quantization_config: Any
    _extra_skip_modules: Callable[[], Sequence[str]]
    _keeps_codes: Callable[[], bool]
    _offloads: Callable[[], bool]
    _spec: LoadSpec | None = None
    _device_map: Any = None
    _checked: FolderCheck | None = None
    _mark: Mark | None = None
    _sharded: Any = None  # ShardedLoad, of a load that transformers shards by FSDP2
    _makers_config: Mapping[str, Any] | None = None

    def __init__(self, quantization_config: Any, **kwargs: Any) -> None:
        self._makers_config = take_makers_config(quantization_config)
        if self._makers_config is not None:
            kwargs["pre_quantized"] = False  # what is read is 16 bit
        super().__init__(quantization_config, **kwargs)  # type: ignore[call-arg]

    def update_attn_implementation(self, config: Any) -> Any:
        """Recognise a packed folder by its config, and make transformers find its files."""
        config = super().update_attn_implementation(config)  # type: ignore[misc]
        if self._makers_config is not None:
            describe_plain(config)
        if CONFIG_KEY not in config.__dict__:
            return config
        self._mark = parse_mark(config.__dict__.pop(CONFIG_KEY))
        vars(config.get_text_config()).pop("transformers_weights", None)
        config.transformers_weights = self._mark.entry
        folder = Path(getattr(config, "_name_or_path", None) or "")
        if str(folder) != "." and (folder / "config.json").is_file():
            # Before transformers looks for files, so that what is missing is named by us.
            ranks = self._several(config)
            self._check(folder, self._mark, large=ranks is None or not ranks.shards)
        return config

    def _check(self, folder: Path, mark: Mark, *, large: bool = True) -> Manifest:
        if self._checked is None or self._checked.folder != folder:
            self._checked = FolderCheck(folder, mark, large=large)
            warn_of_changes(folder, self._checked.manifest)
        return self._checked.manifest

    def update_device_map(self, device_map: Any) -> Any:
        """Note what the stock quantizer makes of it; without one, ranks go to their own devices."""
        if device_map is None and (own := world().device()) is not None:
            device_map = {"": own}
        self._device_map = super().update_device_map(device_map)  # type: ignore[misc]
        return self._device_map

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Note the settled device map, which transformers shows here last."""
        super().validate_environment(*args, **kwargs)  # type: ignore[misc]
        self._device_map = kwargs.get("device_map")
        if self._spec is not None:
            self._spec.device_map = self._device_map

    def preprocess_model(self, model: Any, dtype: Any = None, **kwargs: Any) -> None:
        """Decide what is packed, while the model is still as it was built."""
        files, config = kwargs.get("checkpoint_files"), model.config
        ranks = self._several(config)
        if self._offloads() and ranks is not None:
            raise ConfigError(
                "enabled(offload=True): this load shards the model over ranks "
                "(distributed_config), and experts in host memory are whole on each rank: load it "
                "without that, for DDP, or without offload."
            )
        if self._offloads() and is_deepspeed_zero3_enabled():
            raise ConfigError(
                "enabled(offload=True): DeepSpeed's ZeRO-3 shards every weight, and experts in "
                "host memory are whole on each rank: use ZeRO-1 or ZeRO-2, or leave offload out "
                "and give zero_optimization.offload_param."
            )
        if ranks is not None:
            ranks.begin(lambda: self._facts(files, dtype))
        self._add_skips(model)
        self._spec = self._make_spec(model, dtype, files, kwargs.get("device_map"))
        self._spec.device_map, self._spec.offloads = self._device_map, self._offloads()
        super().preprocess_model(model, dtype=dtype, **kwargs)  # type: ignore[misc]
        # The stock method may have put lists of Linear layers in place of fused weights.
        names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        check_no_codes_of_single_experts(files or (), names)
        check_linears(model, self._spec.settings)
        if self._checked is not None:
            problem = next(model_problems(self._checked.manifest, model), None)
            if problem is not None:
                raise CheckpointError(
                    f"{self._checked.folder}: {problem}: config.json is not the one it was saved "
                    "with, or files are damaged."
                )
        if self._spec.prequantized is not None or self._spec.recasts:
            dtypes = load_dtypes(model, dtype, self.param_needs_quantization)
            self._spec.dtypes = dtypes | self._spec.dtypes
        self._spec.params = {n: p for n, p in self._spec.params.items() if n in names}
        if self._mark is None and self._keeps_codes():
            self._spec.kept = weights_to_keep(model, self._spec)
        filled_later = self._spec.params or self._spec.prequantized is not None
        if ranks is not None and ranks.shards and filled_later:
            spec, self._spec = self._spec, None
            if spec is None or spec.files is None or not files:
                raise CheckpointError(
                    "A model that is sharded while it loads is read from safetensors files: give a "
                    "folder or a hub id with such files."
                )
            refuse_to_shard(spec.kept, "fully_shard the model after it is loaded")
            spec.files.close()
            model.hf_quantizer = self
            folder = Path(files[0]).parent
            self._sharded = ranks.shard(
                model, spec, self.quantization_config, folder, dtype, self._makers_config
            )
            return
        blocks = set(model._no_split_modules or ())
        owners = {name for name, part in model.named_modules() if type(part).__name__ in blocks}
        units: dict[str, float] = {}
        for name, parameter in model.named_parameters():
            parts = name.split(".")
            above = (".".join(parts[:end]) for end in range(1, len(parts)))
            unit = next((owner for owner in above if owner in owners), name.rpartition(".")[0])
            size = parameter.numel() * self.param_element_size(model, name, parameter)
            units[unit] = units.get(unit, 0.0) + size
        self._spec.unit_nbytes = tuple(units.values())

    def _several(self, config: Any) -> Any:
        asked = getattr(config, "distributed_config", None)
        return None if asked is None else many_ranks().load(asked)

    def _facts(self, files: list[str] | None, dtype: Any) -> dict[str, Any]:
        asked = {"quantization_config": self.quantization_config, "dtype": dtype}
        asked |= {"keep_codes": self._keeps_codes()}
        asked |= {"skip_modules": tuple(self._extra_skip_modules())}
        return asked | (file_facts(Path(files[0]).parent) if files else {})

    def _add_skips(self, model: Any) -> None:
        extra = self._extra_skip_modules()
        if not extra or self.pre_quantized:
            return
        config = copy.copy(self.quantization_config)
        own = config.llm_int8_skip_modules
        if own is None:  # a list replaces the stock default, which is the output head
            own = get_keys_to_not_convert(model)
        config.llm_int8_skip_modules = list(dict.fromkeys([*own, *extra]))
        self.quantization_config = config

    def _make_spec(self, model: Any, dtype: Any, files: list[str] | None, place: Any) -> LoadSpec:
        folder = Path(files[0]).parent if files else None
        if self._mark is None:
            spec = packing_spec(model, self.quantization_config, dtype, place)
        else:
            if folder is None or files is None:
                raise CheckpointError("A packed folder is loaded by its path, not by tensors.")
            manifest = self._check(folder, self._mark)
            # transformers was sent to the first file only; the manifest knows them all.
            files[:] = [str(folder / name) for name in manifest.shards]
            model.config.__dict__.pop("transformers_weights", None)
            spec = reload_spec(model, self.quantization_config, dtype, manifest, folder)
        spec.files, spec.prefix = open_files(files, self._makers_config), model.base_model_prefix
        if not self.pre_quantized:
            prefix = f"{spec.prefix}."
            floating = {n for n, tensor in model.state_dict().items() if tensor.is_floating_point()}
            stored = spec.files or Checkpoint([])
            for key in stored:
                if floating & {key, prefix + key, key.removeprefix(prefix)}:
                    check_plain(key, stored.info(key).dtype)
        if self._mark is None and self.pre_quantized and folder and has_manifest(folder):
            ends = [codec.scales for codec in codecs()]
            if any(f"{name}{end}" in (spec.files or ()) for name in spec.params for end in ends):
                raise CheckpointError(
                    f"{folder} holds a manifest of moe_qlora, but its config.json does not say so: "
                    "it was overwritten; restore it, or pack the model again."
                )
        return spec

    def _convert_model_for_quantization(self, model: Any) -> None:
        """Leave fused experts alone, unless the checkpoint holds them as single layers."""
        # Llama 4: stock swaps its experts for a list of Linear layers, as such folders once were.
        spec = self._spec
        if spec is not None and spec.files is not None:
            names = [param.module_name for param in spec.layout.experts]
            if not any(f"{name}.0." in key for key in spec.files for name in names):
                return
        super()._convert_model_for_quantization(model)  # type: ignore[misc]

    def update_weight_conversions(self, weight_conversions: Any, *model: Any) -> Any:
        """Replace the model's converters with ones that pack, and add some for the rest."""
        spec = self._spec
        if self._sharded is not None and self._mark is not None:
            return []  # names are the model's own, and what is packed is filled later
        if spec is None or not (spec.params or spec.prequantized is not None):
            stock = super().update_weight_conversions(weight_conversions, *model)  # type: ignore[misc]
            quantized = None if self._sharded is None else self._sharded.prequantized
            return stock if quantized is None else [PlainNames(quantized), *stock]
        if spec.manifest is not None:
            # A packed folder has the model's own names: nothing to rename, nothing to merge.
            linears = super().update_weight_conversions([], *model)  # type: ignore[misc]
            packed = PackedConverter(spec)
            return [packed, *(LinearConverter.of(one, spec) for one in linears)]
        conversions = [
            FillingConverter.replacing(one, spec) if isinstance(one, WeightConverter) else one
            for one in weight_conversions
        ]
        names = [] if spec.prequantized is None else [PlainNames(spec.prequantized)]
        conversions = super().update_weight_conversions(conversions, *model)  # type: ignore[misc]
        return [*names, *conversions, RestConverter(spec)]

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        """Return whether a parameter ends up packed, and so has another shape than the model's."""
        if self._spec is not None and param_name in self._spec.params:
            return True
        return bool(super().param_needs_quantization(model, param_name, **kwargs))  # type: ignore[misc]

    def param_element_size(self, model: Any, param_name: str, param: Any) -> float:
        """Return the bytes of an element once loaded, a packed weight's statistics included."""
        if self._spec is not None and param_name in self._spec.params:
            if self._spec.offloads:  # transformers reserves and divides memory of devices by it
                return 0.0
            return self._spec.nbytes(param_name) / param.numel()
        return float(super().param_element_size(model, param_name, param))  # type: ignore[misc]

    def adjust_max_memory(self, max_memory: dict[Any, Any]) -> dict[Any, Any]:
        """Return what each device may take, so that "auto" and "balanced" spread evenly."""
        # The stock answer takes a tenth off even shares of the model, and what all lack falls to
        # the last device. Here only of a device's free memory a tenth stays free.
        stock = super().adjust_max_memory(max_memory)  # type: ignore[misc]
        if self._spec is None or not self._spec.params:
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
        # Blocks of these bytes, in order, spread evenly.
        units, last = self._spec.unit_nbytes, len(places) - 1
        total, done, at = sum(units), 0.0, 0
        taken = [0.0] * len(places)
        for unit in units:
            # to where its middle lies, were the model one line cut into equal parts
            while at < last and done + unit / 2 > total * (at + 1) / len(places):
                at += 1
            taken[at] += unit
            done += unit
        even = {
            place: share + min(units, default=0.0) / 2
            for place, share in zip(places, taken, strict=True)
        }
        # On the first device accelerate keeps room for the largest layer free.
        even[places[0]] += max(units, default=0.0)
        if all(shares[place] >= even[place] for place in places):
            shares |= {place: even[place] for place in places[:-1]}
        return shares

    def get_quantize_ops(self) -> Any:
        """Return the stock operation, kept from expert weights: converters have packed these."""
        ops = super().get_quantize_ops()  # type: ignore[misc]
        return ops if self._spec is None else _PackLinears(ops, self._spec)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        """Attach the packed weights, and leave the model with a quantizer of the stock class."""
        model = super()._process_model_after_weight_loading(model, **kwargs)  # type: ignore[misc]
        spec, self._spec = self._spec, None
        sharded, self._sharded = self._sharded, None
        if self._checked is not None:
            self._checked.finish()
        if model.__dict__.get("hf_quantizer") is self:
            model.hf_quantizer = self._stock()
        if sharded is not None:
            sharded.finish(model)
        if spec is not None:
            finish(model, spec, self.quantization_config)
        return model

    def _stock(self) -> Any:
        """Return this quantizer as one of the stock class, for the model to keep."""
        order = type(self).__mro__
        stock: Any = order[order.index(_Packing) + 1]
        quantizer = stock.__new__(stock)
        quantizer.__dict__.update(self.__dict__)
        for name in ("_spec", "_device_map", "_checked", "_mark", "_sharded", "_makers_config"):
            quantizer.__dict__.pop(name, None)
        return quantizer


class _PackLinears(ConversionOps):
    """The stock operation for Linear layers, which passes expert weights on and checks the others.

    transformers turns an exception of an operation into a line of a table, so that what is wrong is
    noted in the spec, and raised once the model is loaded.
    """

    def __init__(self, stock: Any, spec: LoadSpec) -> None:
        self.stock, self.spec = stock, spec

    def convert(self, input_dict: dict[str, Any], *args: Any, **context: Any) -> Any:
        experts = {n: self._packed(n, v) for n, v in input_dict.items() if n in self.spec.params}
        linears = {
            name: self._checked(name, value[0] if isinstance(value, list) else value, context)
            for name, value in input_dict.items()
            if name not in experts
        }
        return experts | (self.stock.convert(linears, *args, **context) if linears else {})

    def _packed(self, name: str, value: Any) -> nn.Parameter:
        """Pack a weight that no converter has served: transformers found its name as it is."""
        weight = value[0] if isinstance(value, list) else value
        packer = WeightPacker(name, self.spec)
        packer.add(weight)
        return packer.finish()

    def _checked(self, name: str, weight: Tensor, context: Mapping[str, Any]) -> Tensor:
        """Note another shape than the model's, and the extremes; return a weight of its shape."""
        module = context["model"].get_submodule(name.rpartition(".")[0])
        rows, cols = module.weight.shape
        swapped = not issubclass(getattr(module, "source_cls", nn.Linear), nn.Linear)  # Conv1D
        expected = (cols, rows) if swapped else (rows, cols)
        if tuple(weight.shape) != expected:
            self.spec.faults.append(
                CheckpointError(
                    f"{name} has the shape {tuple(weight.shape)} on disk and {expected} by "
                    "config.json: they are not of one model."
                )
            )
            return weight.new_zeros(expected)
        self.spec.extremes[name] = torch.stack(torch.aminmax(weight.detach()))
        return weight


def finish(model: Any, spec: LoadSpec, config: Any) -> None:
    """Attach what converters packed, pack what they did not see, and mark the model quantized."""
    # A later save of the decoded model finds transformers' own converters.
    if spec.manifest is not None:
        # Nothing was renamed on the way in; without a record, the model type's mapping is used.
        model.__dict__.pop("_weight_conversions", None)
    conversions = model.__dict__.get("_weight_conversions", ())
    for at, conversion in enumerate(conversions):
        if isinstance(conversion, FillingConverter):
            conversions[at] = conversion.stock
            conversion.stock._was_used = conversion._was_used
    check_read(model, spec)
    if spec.faults:
        raise spec.faults[0]
    extremes = spec.extremes
    devices = {extreme.device for extreme in extremes.values()}
    for device in devices:  # one wait for each
        names = [name for name, extreme in extremes.items() if extreme.device == device]
        finite = are_below(torch.stack([extremes[n].double() for n in names])).all(1).tolist()
        bad = [name for name, whole in zip(names, finite, strict=True) if not whole]
        if bad:
            raise NonFiniteWeightError(
                f"{listed(bad)} holds NaN or inf (or {LARGEST:.0e} and more), and the blocks with "
                "it could not be decoded: repair the checkpoint."
            )
    if not spec.params:
        return
    _attach(model, spec)
    finish_packing(model, spec.layout, config, spec.settings)
    if spec.offloads:
        offload(model)


def _attach(model: Any, spec: LoadSpec) -> None:
    # Apart, so that none of its names holds a weight when experts go to host memory.
    by_codes = {id(parameter): packed for parameter, packed in spec.packed.values()}
    spec.packed.clear()  # Each is freed as soon as it lies elsewhere
    lost = []
    for name, param in spec.params.items():
        module, leaf = parametrize.owner_of(model, name)
        if parametrize.is_packed(module, leaf):
            continue  # by another name of it
        weight = module._parameters.get(leaf)
        packed = by_codes.get(id(weight))
        if packed is None:
            lost.append(name)
            continue
        for module, leaf in (parametrize.owner_of(model, other) for other in param.names):
            if module._parameters.get(leaf) is weight:
                parametrize.attach(module, leaf, packed)
    if lost:
        raise CheckpointError(
            f"{listed(lost)} was not loaded: the checkpoint does not hold it, and random numbers "
            "would be packed. Load the 16-bit checkpoint of this model; one that another tool has "
            "packed keeps its weights under other names."
        )
