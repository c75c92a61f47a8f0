"""What one load packs: decided from the meta model.

`packing_spec` serves 16-bit checkpoints and `reload_spec` folders that this package packed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..detection.detect import detect
from ..errors import CheckpointError, UnsupportedWeightError
from ..layout import ExpertParam, ModelLayout
from ..models.files import check_patterns
from ..packing.selection import weights_to_pack
from ..packing.settings import CodecSettings, packed_nbytes, why_not_packed
from .manifest import Manifest, canonical_name, settings_problem


@dataclass(frozen=True)
class PackingPlan:
    """The expert weights that a load packs, and how."""

    params: dict[str, ExpertParam]  # a tied weight under each of its names
    settings: CodecSettings
    # that weights would be loaded in, were they not packed; of dequantized files, and where the
    # load `recasts`, all tensors'
    dtypes: dict[str, torch.dtype]
    layout: ModelLayout
    manifest: Manifest | None = None  # of a folder that this package packed
    recasts: bool = False  # such a folder into another dtype than its config.json names
    # how weights are packed that keep their checkpoint's own codes, by each of their names
    kept: dict[str, CodecSettings] = field(default_factory=dict)

    def nbytes(self, name: str) -> int:
        """Return the bytes of a weight, packed."""
        return packed_nbytes(self.params[name].shape, self.settings_of(name))

    def settings_of(self, name: str) -> CodecSettings:
        """Return how a weight is packed."""
        return self.kept.get(name, self.settings)


def packing_spec(
    model: nn.Module, config: Any, dtype: torch.dtype | None, device_map: Any
) -> PackingPlan:
    """Return what to pack of a 16-bit checkpoint, loaded in `dtype`, given its model on meta."""
    from transformers.integrations.accelerate import get_device

    settings, layout, dtypes = _examine(model, config, dtype)
    # Linear layers that bitsandbytes leaves in 16 bit on the CPU, experts beside them
    offload = getattr(config, "llm_int8_enable_fp32_cpu_offload", False)
    places = device_map if offload and isinstance(device_map, Mapping) else {}
    places = {} if {*places.values()} == {"cpu"} else dict(places)
    params: dict[str, ExpertParam] = {}
    for param in weights_to_pack(model, layout, config, settings):
        if places and get_device(places, param.name) in ("cpu", "disk", torch.device("cpu")):
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
    return PackingPlan(params, settings, dtypes, layout)


def reload_spec(
    model: nn.Module, config: Any, dtype: torch.dtype | None, manifest: Manifest, folder: Path
) -> PackingPlan:
    """Return what a packed folder holds packed, for the model on meta as it was built."""
    settings, layout, dtypes = _examine(model, config, dtype)
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
    problem = settings_problem(manifest, settings) if params else None
    if problem is not None:
        raise CheckpointError(f"{folder}: {problem}: one of them is not of this save.")
    own = manifest.config.get("dtype")
    recasts = bool(dtype and own) and dtype != getattr(torch, str(own), None)
    return PackingPlan(params, settings, dtypes, layout, manifest, recasts, kept)


def _examine(
    model: nn.Module, config: Any, dtype: torch.dtype | None
) -> tuple[CodecSettings, ModelLayout, dict[str, torch.dtype]]:
    settings = CodecSettings.from_config(config)
    # transformers matches the patterns with all modules next.
    names = [name for name, _ in model.named_modules()]
    check_patterns(settings.skip_modules, names, "llm_int8_skip_modules")
    # transformers builds the model, and asks its quantizer, under a default device of meta.
    with torch.device("cpu"):
        layout = detect(model)
    kept = kept_dtypes(model, dtype)
    dtypes: dict[str, torch.dtype] = {}
    for param in layout.experts:
        wanted = kept(param.name) or model.get_parameter(param.name).dtype
        dtypes |= dict.fromkeys(param.names, wanted)
    return settings, layout, dtypes


def kept_dtypes(model: Any, dtype: torch.dtype | None) -> Callable[[str], torch.dtype | None]:
    """Return what gives the dtype that a model loaded in `dtype` keeps a parameter in, or None."""
    by_glob: Mapping[str, torch.dtype] = {}
    if dtype is not None and hasattr(model, "_get_dtype_plan"):
        by_glob = model._get_dtype_plan(dtype) or {}
    patterns = [(re.compile(glob.replace("*", ".*")), kept) for glob, kept in by_glob.items()]
    return lambda name: next((kept for pattern, kept in patterns if pattern.search(name)), None)
