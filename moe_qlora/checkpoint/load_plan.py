"""What one load packs: made on the meta model, read by the quantizer and its converters."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..detection.detect import detect
from ..errors import CheckpointError, UnsupportedWeightError
from ..layout import ExpertParam, ModelLayout
from ..packing.codec import PackedWeight
from ..packing.selection import weights_to_pack
from ..packing.settings import CodecSettings
from ..packing.sizes import packed_nbytes
from ..packing.supported import why_not_packed
from .manifest import Manifest
from .reader import DTYPES, Checkpoint


@dataclass
class LoadSpec:
    """The stacks that a load packs, and what it has packed so far.

    Converters are deep-copied for every parameter that they make, and must all see one plan: a
    copy of it is itself.

    Attributes:
        params: Stacks by name; a tied stack under each of its names.
        settings: What to pack into.
        dtypes: What each stack would be loaded in, were it not packed.
        layout: Of the whole model.
        files: The checkpoint on disk, None where it is given as tensors or is no safetensors.
        manifest: Of a folder that this package packed, None otherwise.
        device_map: As transformers settled it.
        units: Bytes, once loaded, of the model's blocks and of the layers outside of them.
        stacks: What has been packed, by name.
        replaced: Converters of transformers that the plan's own stand for: `(own, theirs)`.
    """

    params: dict[str, ExpertParam]
    settings: CodecSettings
    dtypes: dict[str, torch.dtype]
    layout: ModelLayout
    files: Checkpoint | None = None
    manifest: Manifest | None = None
    device_map: Any = None
    units: tuple[float, ...] = ()
    stacks: dict[str, PackedWeight] = field(default_factory=dict)
    replaced: list[tuple[Any, Any]] = field(default_factory=list)

    def __deepcopy__(self, memo: dict[int, Any]) -> LoadSpec:
        return self

    def nbytes(self, name: str) -> int:
        """Bytes of a stack once it is packed."""
        return packed_nbytes(self.params[name].shape, self.settings)

    def device(self, name: str) -> torch.device:
        """Where a stack is to be."""
        from transformers.integrations.accelerate import get_device

        place = get_device(self.device_map or {"": "cpu"}, name, valid_torch_device=True)
        return torch.device("cpu" if place == "disk" else place)

    def keep(self, name: str, packed: PackedWeight) -> None:
        """Note a packed stack under all its names."""
        param = self.params[name]
        for alias in param.names:
            self.stacks[alias] = packed

    def leaves(self) -> list[str]:
        """The stacks' names without layer numbers and what is before: "experts.gate_up_proj"."""
        names = {".".join(_tail(name)): None for name in self.params}
        return list(names)


def _tail(name: str) -> list[str]:
    """A stack's own name and its module's, with as much before as has no number in it."""
    parts = name.split(".")
    start = len(parts)
    while start > 0 and not parts[start - 1].isdigit() and len(parts) - start < 2:
        start -= 1
    return parts[start:]


def plan_packing(
    model: nn.Module, config: Any, dtype: torch.dtype | None, device_map: Any
) -> LoadSpec:
    """Plan what to pack of a 16-bit checkpoint.

    Args:
        model: On the meta device, as it was built.
        config: The caller's `BitsAndBytesConfig`.
        dtype: What the model is loaded in.
        device_map: As far as it is known.

    Raises:
        UnsupportedWeightError: A stack cannot be packed.
    """
    settings = CodecSettings.from_config(config)
    layout = _detect(model)
    dtypes = _dtypes(model, layout, dtype)
    params: dict[str, ExpertParam] = {}
    for param in weights_to_pack(model, layout, config, settings):
        if getattr(config, "llm_int8_enable_fp32_cpu_offload", False) and _offloaded(
            param.name, device_map
        ):
            continue
        if hasattr(model.get_parameter(param.name), "device_mesh"):
            raise UnsupportedWeightError(
                f"{param.name} is sharded by a tensor or expert parallel plan, which packing while "
                "loading does not support: load without tp_plan or distributed_config."
            )
        reason = why_not_packed(param.shape, dtypes[param.name], settings)
        if reason is not None:
            raise UnsupportedWeightError(f"{param.name} {reason}. Nothing was loaded.")
        for name in param.names:
            params[name] = param
    return LoadSpec(params, settings, dtypes, layout)


def plan_reload(
    model: nn.Module, config: Any, dtype: torch.dtype | None, manifest: Manifest, folder: Path
) -> LoadSpec:
    """Plan the reload of a packed folder: what its manifest says is packed.

    Raises:
        CheckpointError: The folder's stacks or settings are not the model's or the config's.
    """
    settings = CodecSettings.from_config(config)
    layout = _detect(model)
    known = {name: param for param in layout.experts for name in param.names}
    params: dict[str, ExpertParam] = {}
    prefix = f"{getattr(model, 'base_model_prefix', '')}."

    def param_of(name: str) -> ExpertParam | None:
        names = (name, prefix + name, name.removeprefix(prefix))
        return next((known[found] for found in names if found in known), None)

    for name, entry in manifest.experts.items():
        param = param_of(name)
        if param is None:
            raise CheckpointError(
                f"{folder} holds the packed stack {name}, which a {type(model).__name__} does not "
                "have: load it with the class that it was saved from."
            )
        if tuple(param.shape) != tuple(entry.shape):
            raise CheckpointError(
                f"{folder}: {name} was packed with the shape {tuple(entry.shape)}, the model's "
                f"config gives {tuple(param.shape)}: config.json is not the one it was saved with."
            )
        # Nothing is tied on the meta device yet: a stack's other names are parameters of their own.
        for tied in (param, *filter(None, map(param_of, entry.aliases))):
            for alias in tied.names:
                params[alias] = tied
    for name, param in known.items():
        stored = manifest.tensors.get(name)
        if name in params or stored is None:
            continue
        if stored.shape != tuple(param.shape) or not DTYPES[stored.dtype].is_floating_point:
            raise CheckpointError(
                f"{folder} holds {stored.dtype} of shape {stored.shape} as {name}, but its "
                "manifest does not say that this stack is packed."
            )
    saved, asked = manifest.settings.to_dict(), settings.to_dict()
    for key in saved.keys() - {"compute_dtype"}:
        if params and saved[key] != asked[key]:
            raise CheckpointError(
                f"{folder}: the manifest says {key}={saved[key]!r}, config.json {asked[key]!r}: "
                "one of them is not of this save."
            )
    return LoadSpec(params, settings, _dtypes(model, layout, dtype), layout, manifest=manifest)


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
    policy = dtype_policy(model, dtype)
    found: dict[str, torch.dtype] = {}
    for param in layout.experts:
        wanted = policy(param.name, model.get_parameter(param.name).dtype)
        found |= dict.fromkeys(param.names, wanted)
    return found


def dtype_policy(
    model: Any, dtype: torch.dtype | None
) -> Callable[[str, torch.dtype], torch.dtype]:
    """What transformers loads a parameter in, by name and own dtype.

    That is its own dtype, unless the class keeps some of its parameters in another one.
    """
    plan: Mapping[str, torch.dtype] = {}
    if dtype is not None and hasattr(model, "_get_dtype_plan"):
        plan = model._get_dtype_plan(dtype) or {}
    patterns = [(re.compile(glob.replace("*", ".*")), wanted) for glob, wanted in plan.items()]

    def policy(name: str, own: torch.dtype) -> torch.dtype:
        return next((wanted for pattern, wanted in patterns if pattern.search(name)), own)

    return policy


def safetensors_files(files: Sequence[str] | None) -> Checkpoint | None:
    """The checkpoint's files to read from, where they are safetensors."""
    if not files or not all(str(file).endswith(".safetensors") for file in files):
        return None
    return Checkpoint.of_files([Path(file) for file in files])
