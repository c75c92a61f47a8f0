"""Whether a packed folder is what its manifest says, and fits the model of its config.json.

Checksums tell damage by chance. What is checked here is what a decode or a load goes by: which
tensors belong together, and their dtypes and sizes against the shapes of the model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..packing.format import RECORD, SCALES, problems
from ..packing.parametrize import is_packed_linear
from .manifest import Manifest
from .reader import DTYPES

INT8_FORMAT = ".weight_format"  # of bitsandbytes' Linear layers, beside their weight


def packed_names(manifest: Manifest) -> dict[str, tuple[str, ...]]:
    """Return the keys that hold each packed weight, experts' or Linear layers', by its name."""
    keys = manifest.tensors
    owners = set(manifest.experts)
    for key in keys:
        if RECORD in key:
            owners.add(key.partition(RECORD)[0])
        elif key.endswith(SCALES) and key.removesuffix(SCALES) not in owners:
            owners.add(f"{key.removesuffix(SCALES)}.weight")
    names = {}
    for name in owners & keys.keys():
        module = name.removesuffix(".weight")
        beside = {module + SCALES, module + INT8_FORMAT} if module != name else set()
        names[name] = tuple(
            key for key in keys if key == name or key.startswith(f"{name}.") or key in beside
        )
    return names


def parts_of(name: str, keys: tuple[str, ...], read: Callable[[str], Tensor]) -> dict[str, Tensor]:
    """Return a packed weight's tensors by the end of their key; ValueError for another order."""
    parts = {SCALES if key.endswith(SCALES) else key.removeprefix(name): key for key in keys}
    form = next((parts.pop(end) for end in list(parts) if end.endswith(INT8_FORMAT)), None)
    if form is not None and not (value := read(form)).is_meta and value.flatten().tolist() != [0]:
        raise ValueError(f"has another {INT8_FORMAT} than 0, which stands for rows")
    return {end: read(key) for end, key in parts.items()}


def form_problems(
    manifest: Manifest, name: str, keys: tuple[str, ...], shape: tuple[int, ...]
) -> Iterator[str]:
    """Yield what a packed weight of this shape lacks, or has of another dtype or size."""

    def blank(key: str) -> Tensor:
        entry = manifest.tensors[key]
        return torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device="meta")

    yield from problems(parts_of(name, keys, blank), shape, manifest.settings)


def model_problems(manifest: Manifest, model: Any) -> Iterator[str]:
    """Yield in what a packed folder does not fit the model on meta, a sentence's beginning each.

    The model may be another class than the one that was saved; only of the same class are all
    tensors expected.
    """
    shapes = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    for name, module in model.named_modules():
        if hasattr(module, "out_features") and f"{name}.weight" in shapes:  # packed ones too
            shapes[f"{name}.weight"] = (module.out_features, module.in_features)
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    packed = packed_names(manifest)
    linears = {f"{name}.weight" for name, one in model.named_modules() if is_packed_linear(one)}
    owned = {key for keys in packed.values() for key in keys}
    found = set()
    for name, entry in manifest.tensors.items():
        if name in owned and name not in packed:
            continue
        names = (name, prefix + name, name.removeprefix(prefix))
        own = next((other for other in names if other in shapes), None)
        if own is None:
            continue
        found.add(own)
        if name in manifest.experts:
            continue
        if linears and (own in linears) != (name in packed):
            yield f"{name} is {'' if name in packed else 'not '}packed, and not so by its config"
        elif name in packed:
            why = next(form_problems(manifest, name, packed[name], shapes[own]), None)
            if why is not None:
                yield f"{name} {why}"
        elif entry.shape != shapes[own]:
            yield f"{name} has the shape {entry.shape}, the model's config gives {shapes[own]}"
    if type(model).__name__ in (manifest.config.get("architectures") or ()):
        for name in _expected(model, shapes, manifest) - found:
            yield f"{name} is missing"


def _expected(model: Any, shapes: Mapping[str, Any], manifest: Manifest) -> set[str]:
    """Return the tensors that a folder of this very class holds: all but tied ones."""
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    tied |= {alias for entry in manifest.experts.values() for alias in entry.aliases}
    ignored = "|".join(getattr(model, "_keys_to_ignore_on_load_missing", None) or ())
    return {
        name for name in shapes if name not in tied and not (ignored and re.search(ignored, name))
    }
