"""Whether a packed folder is what its manifest says, and fits the model of its config.json.

Checksums tell damage by chance. What is checked here is what a decode or a load goes by: which
tensors belong together, and their dtypes and sizes against the shapes of the model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..layout import dtype_name
from ..packing.bnb4bit import RECORD
from ..packing.codecs import codecs
from ..packing.format import problems
from ..packing.int8 import SCALES
from ..packing.settings import CodecSettings
from .manifest import Manifest
from .reader import DTYPES

INT8_FORMAT = ".weight_format"  # of bitsandbytes' Linear layers, beside their weight


def own_name(model: Any, name: str, names: Container[str]) -> str | None:
    """Return a name as a model has it, with or without the prefix of the model's body, or None."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    candidates = (name, prefix + name, name.removeprefix(prefix))
    return next((candidate for candidate in candidates if candidate in names), None)


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
    form = next((key for key in keys if key.endswith(INT8_FORMAT)), None)
    if form is not None and not (value := read(form)).is_meta and value.flatten().tolist() != [0]:
        raise ValueError(f"has another {INT8_FORMAT} than 0, which stands for rows")
    ends = {SCALES if key.endswith(SCALES) else key.removeprefix(name): key for key in keys}
    return {end: read(key) for end, key in ends.items() if key != form}


def form_problems(
    manifest: Manifest, name: str, keys: tuple[str, ...], shape: tuple[int, ...]
) -> Iterator[str]:
    """Yield what a packed weight of this shape lacks, or has of another dtype or size."""

    def blank(key: str) -> Tensor:
        entry = manifest.tensors[key]
        return torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device="meta")

    yield from problems(parts_of(name, keys, blank), shape, manifest.settings_of(name))


def settings_problem(manifest: Manifest, settings: CodecSettings) -> str | None:
    """Return how the manifest and the settings of config.json contradict each other."""
    saved, asked = manifest.settings.to_dict(), settings.to_dict()
    for key in ("kind", "double_quant", "blocksize", "storage_dtype"):
        if saved[key] != asked[key]:
            return f"the manifest says {key}={saved[key]!r}, config.json {asked[key]!r}"
    return None


def model_problems(manifest: Manifest, model: Any) -> Iterator[str]:
    """Yield in what a packed folder does not fit the model on meta, a sentence's beginning each.

    The model may be another class than the one that was saved; only of the same class are all
    tensors expected.
    """
    from ..packing.parametrize import is_packed_linear  # imports bitsandbytes, which prints

    state = model.state_dict()
    shapes = {key: tuple(tensor.shape) for key, tensor in state.items()}
    owners = {f"{n}.weight": m for n, m in model.named_modules() if hasattr(m, "out_features")}
    packed = packed_names(manifest)
    # In the loader bitsandbytes' layers are there already, unless nothing is packed by its config.
    linears = {name for name, module in owners.items() if is_packed_linear(module)}
    owned = {key for keys in packed.values() for key in keys}
    stored = set()
    ends = (INT8_FORMAT, *(end for codec in codecs() for end in codec.ends))
    for name, entry in manifest.tensors.items():
        if name in owned and name not in packed:
            continue
        own = own_name(model, name, shapes)
        if own is None:
            if name.endswith(ends) or RECORD in name:
                yield f"{name} belongs to no packed weight"
            continue
        stored.add(own)
        if name in manifest.experts:
            continue
        plain = name not in packed
        floats = DTYPES[entry.dtype].is_floating_point == state[own].is_floating_point()
        if linears and not plain and own not in linears:
            yield f"{name} is packed, and by its config it is not"
        elif not plain and own not in owners:
            yield f"{name} is packed, and the manifest does not name it"
        elif plain and own not in linears and not floats:
            yield f"{name} is {entry.dtype}, the model's is {dtype_name(state[own].dtype)}"
        elif not plain:
            why = next(form_problems(manifest, name, packed[name], shapes[own]), None)
            if why is not None:
                yield f"{name} {why}"
        elif entry.shape != shapes[own]:
            yield f"{name} has the shape {entry.shape}, the model's config gives {shapes[own]}"
    classes = manifest.config.get("architectures")
    if isinstance(classes, list) and type(model).__name__ in classes:
        for name in _expected(model, shapes, manifest) - stored:
            yield f"{name} is missing"


def _expected(model: Any, shapes: Mapping[str, Any], manifest: Manifest) -> set[str]:
    """Return the tensors that a folder of this very class holds: all but tied ones."""
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    tied |= {alias for entry in manifest.experts.values() for alias in entry.aliases}
    ignored = "|".join(getattr(model, "_keys_to_ignore_on_load_missing", None) or ())
    return {
        name for name in shapes if name not in tied and not (ignored and re.search(ignored, name))
    }
