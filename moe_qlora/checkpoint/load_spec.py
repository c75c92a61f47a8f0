"""What one load packs: made from the meta model, read by the quantizer and its converters.

`packing_spec` serves 16-bit checkpoints and `reload_spec` folders that this package packed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..detection.detect import detect
from ..errors import CheckpointError, UnsupportedWeightError
from ..kernels.weights import PackedWeight
from ..layout import ExpertParam, ModelLayout
from ..models.files import check_patterns
from ..packing.decoders import hold
from ..packing.selection import weights_to_pack
from ..packing.settings import CodecSettings, packed_nbytes, why_not_packed
from .integrity import canonical_name, settings_problem
from .manifest import Manifest
from .prequantized import PrequantizedCheckpoint
from .reader import DTYPES, Checkpoint


@dataclass
class LoadSpec:
    """The expert weights that a load packs, and what it has packed so far."""

    params: dict[str, ExpertParam]  # a tied weight under each of its names
    settings: CodecSettings
    # that weights would be loaded in, were they not packed; of dequantized files, and where the
    # load `recasts`, all tensors'
    dtypes: dict[str, torch.dtype]
    layout: ModelLayout
    files: Checkpoint | None = None  # None where tensors are given, or files are not safetensors
    manifest: Manifest | None = None  # of a folder that this package packed
    prefix: str = ""  # `base_model_prefix` of the model: of names within its body
    recasts: bool = False  # such a folder into another dtype than its config.json names
    device_map: Any = None  # as transformers settled it
    # how weights are packed that keep their checkpoint's own codes, by each of their names
    kept: dict[str, CodecSettings] = field(default_factory=dict)
    # bytes, once loaded, of each of the model's blocks and of the layers outside them, in order
    unit_nbytes: tuple[float, ...] = ()
    # what was packed, and the parameter that the model gets for it meanwhile
    packed: dict[str, tuple[nn.Parameter, PackedWeight]] = field(default_factory=dict)
    offloads: bool = False  # into host memory, whatever device a weight is packed on
    # of Linear layers that bitsandbytes packs: minimum and maximum by name, and what is wrong
    extremes: dict[str, Tensor] = field(default_factory=dict)
    faults: list[CheckpointError] = field(default_factory=list)
    read: set[str] = field(default_factory=set)  # keys on disk that converters of the load have got

    def __deepcopy__(self, memo: dict[int, Any]) -> LoadSpec:
        return self  # converters are copied for every parameter, and must all see one spec

    @property
    def prequantized(self) -> PrequantizedCheckpoint | None:
        """The files, where their maker quantized them."""
        return self.files if isinstance(self.files, PrequantizedCheckpoint) else None

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a weight."""
        return tuple(self.params[name].shape)

    def nbytes(self, name: str) -> int:
        """Return the bytes of a weight, packed."""
        return packed_nbytes(self.shape(name), self.settings_of(name))

    def settings_of(self, name: str) -> CodecSettings:
        """Return how a weight is packed."""
        return self.kept.get(name, self.settings)

    def device(self, name: str) -> torch.device:
        """Return the device that a weight is loaded to."""
        from transformers.integrations.accelerate import get_device

        place = get_device(self.device_map or {"": "cpu"}, name, valid_torch_device=True)
        return torch.device("cpu" if place == "disk" else place)

    def recast(self, name: str, loaded: Any) -> Any:
        """Return a tensor that transformers has read of a packed folder in the dtype asked for.

        Stock loads plain weights in the dtype on disk, and has Linear layers decode to the recorded
        one, whatever is asked for.
        """
        tensor = loaded[0] if isinstance(loaded, list) else loaded
        state = getattr(tensor, "quant_state", None)
        if self.recasts and state is not None:
            state.dtype = self.dtypes[name]
        elif self.recasts and tensor.is_floating_point():
            return tensor.to(self.dtypes[name])
        return loaded

    def keep(self, name: str, packed: PackedWeight) -> nn.Parameter:
        """Note a packed weight under all its names; return the parameter to load for it.

        Of a weight in host memory it is an empty one, which is on the device already.
        """
        if self.offloads:
            empty = torch.empty(0, dtype=packed.codes.dtype, device=self.device(name))
            parameter, packed = nn.Parameter(empty, requires_grad=False), packed.to("cpu")
        else:
            parameter = hold(packed)
        for alias in self.params[name].names:
            self.packed[alias] = parameter, packed
        return parameter


def packing_spec(
    model: nn.Module, config: Any, dtype: torch.dtype | None, device_map: Any
) -> LoadSpec:
    """Return what to pack of a 16-bit checkpoint, loaded in `dtype`, given its model on meta."""
    settings = _settings(model, config)
    layout = _detect(model)
    dtypes = _dtypes(model, layout, dtype)
    offload = getattr(config, "llm_int8_enable_fp32_cpu_offload", False)
    params: dict[str, ExpertParam] = {}
    for param in weights_to_pack(model, layout, config, settings):
        if offload and _offloaded(param.name, device_map):
            continue
        if hasattr(model.get_parameter(param.name), "device_mesh"):
            raise UnsupportedWeightError(
                f"{param.name} is sharded by a tensor or expert parallel plan, which packing while "
                "loading does not support: load without tp_plan or distributed_config."
            )
        reason = why_not_packed(param.shape, dtypes[param.name], settings)
        if reason is not None:
            raise UnsupportedWeightError(f"{param.name} {reason}. Nothing was loaded.")
        params |= dict.fromkeys(param.names, param)
    return LoadSpec(params, settings, dtypes, layout)


def reload_spec(
    model: nn.Module, config: Any, dtype: torch.dtype | None, manifest: Manifest, folder: Path
) -> LoadSpec:
    """Return what a packed folder holds packed, for the model on meta as it was built."""
    settings = _settings(model, config)
    layout = _detect(model)
    by_name = {name: param for param in layout.experts for name in param.names}
    params: dict[str, ExpertParam] = {}
    kept: dict[str, CodecSettings] = {}
    for name, entry in manifest.experts.items():
        own = canonical_name(model, name, by_name)
        if own is None:
            raise CheckpointError(
                f"{folder} holds the packed weight {name}, which a {type(model).__name__} does not "
                "have: load it with the class that it was saved from."
            )
        param = by_name[own]
        if tuple(param.shape) != tuple(entry.shape):
            raise CheckpointError(
                f"{folder}: {name} was packed with the shape {tuple(entry.shape)}, the model's "
                f"config gives {tuple(param.shape)}: config.json is not the one it was saved with."
            )
        # Nothing is tied on the meta device yet: a weight's aliases are parameters by themselves.
        for tied in (own, *(canonical_name(model, alias, by_name) for alias in entry.aliases)):
            if tied is not None:
                params |= dict.fromkeys(by_name[tied].names, by_name[tied])
        if (how := manifest.settings_of(name)).codec.is_kept:
            kept |= dict.fromkeys(param.names, how)
    for name, param in by_name.items():
        stored = manifest.tensors.get(name)
        if name in params or stored is None:
            continue
        if stored.shape != tuple(param.shape) or not DTYPES[stored.dtype].is_floating_point:
            raise CheckpointError(
                f"{folder} holds {stored.dtype} of shape {stored.shape} as {name}, but its "
                "manifest does not say that this weight is packed."
            )
    problem = settings_problem(manifest, settings) if params else None
    if problem is not None:
        raise CheckpointError(f"{folder}: {problem}: one of them is not of this save.")
    spec = LoadSpec(params, settings, _dtypes(model, layout, dtype), layout, manifest=manifest)
    own_dtype = manifest.config.get("dtype")
    spec.recasts = bool(dtype and own_dtype) and dtype != getattr(torch, str(own_dtype), None)
    spec.kept = kept
    return spec


def _settings(model: nn.Module, config: Any) -> CodecSettings:
    """Return the codec of a config, whose patterns transformers matches with all modules next."""
    settings = CodecSettings.from_config(config)
    names = [name for name, _ in model.named_modules()]
    check_patterns(settings.skip_modules, names, "llm_int8_skip_modules")
    return settings


def _detect(model: nn.Module) -> ModelLayout:
    # transformers builds the model, and asks its quantizer, under a default device of meta.
    with torch.device("cpu"):
        return detect(model)


def _offloaded(name: str, device_map: Any) -> bool:
    from transformers.integrations.accelerate import get_device

    if not isinstance(device_map, Mapping) or set(device_map.values()) == {"cpu"}:
        return False
    return get_device(dict(device_map), name) in ("cpu", "disk", torch.device("cpu"))


def _dtypes(
    model: nn.Module, layout: ModelLayout, dtype: torch.dtype | None
) -> dict[str, torch.dtype]:
    kept = kept_dtypes(model, dtype)
    dtypes: dict[str, torch.dtype] = {}
    for param in layout.experts:
        wanted = kept(param.name) or model.get_parameter(param.name).dtype
        dtypes |= dict.fromkeys(param.names, wanted)
    return dtypes


def kept_dtypes(model: Any, dtype: torch.dtype | None) -> Callable[[str], torch.dtype | None]:
    """Return what gives the dtype that a model loaded in `dtype` keeps a parameter in, or None."""
    by_glob: Mapping[str, torch.dtype] = {}
    if dtype is not None and hasattr(model, "_get_dtype_plan"):
        by_glob = model._get_dtype_plan(dtype) or {}
    patterns = [(re.compile(glob.replace("*", ".*")), kept) for glob, kept in by_glob.items()]
    return lambda name: next((kept for pattern, kept in patterns if pattern.search(name)), None)
