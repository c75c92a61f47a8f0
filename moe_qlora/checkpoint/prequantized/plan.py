"""Which stored tensors make which plain ones: every key of a folder is given its part."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from ...errors import CheckpointError
from ..reader import TensorInfo
from .config import (
    ADVICE,
    COMPRESSED,
    FLOAT,
    FP8,
    INT,
    MODELOPT,
    MXFP4,
    MXFP8,
    MakerConfig,
    Scheme,
)
from .decode import CODES, SCALE, Quantized
from .formats import FP8_DTYPES, described, plan_fp4, plan_fp8, plan_int, plan_mxfp4

ShapeOf = Callable[[str], tuple[int, ...]]
"""Reads a stored `weight_shape`."""

_ACTIVATIONS = {
    *("input_scale", "input_global_scale", "input_zero_point", "activation_scale"),
    *("output_scale", "output_zero_point", "qscale_act", "q_scale", "k_scale", "v_scale"),
    *("q_zero_point", "k_zero_point", "v_zero_point", "prob_output_scale"),
}
"""Last names of tensors for activations or the KV cache, which weights do without."""
_ACTIVATION_ENDS = ("_input_scale", "_activation_scale")
_REFUSED = {
    "weight_g_idx": "columns are reordered by activation",
    "g_idx": "columns are reordered by activation",
    "qweight": "codes are packed as GPTQ and AWQ do",
    "qzeros": "codes are packed as GPTQ and AWQ do",
    "pre_quant_scale": "inputs are scaled as AWQ does",
}
_SCALES = (
    *("_scale_inv", "weight_scale", "weight_scale_2", "weight_global_scale", "weight_shape"),
    *("weight_zero_point", "qscale_weight", "_scales"),
)
"""Ends of keys of scales and their like."""
_FP4 = Scheme(FLOAT, 4, ((1, 32),), "expert_dtype fp4, groups of 32")


def plan_tensors(
    stored: Mapping[str, TensorInfo], config: MakerConfig, shape_of: ShapeOf
) -> tuple[dict[str, Quantized], list[str]]:
    """Return the quantized tensors by their plain names, and the keys of tensors that are plain.

    What lies on disk decides: codes with their scales are decoded, tensors of 16 bits or more are
    read as they are, whatever the configuration lists. It says how codes are laid out, and of which
    modules bytes are no codes and a tensor called scale is a weight.

    Raises:
        CheckpointError: A part is missing, belongs to nothing, or has the wrong shape.
    """
    tensors: dict[str, Quantized] = {}
    for key, info in stored.items():
        entry = _plan(key, info, stored, config, shape_of)
        if entry is not None:
            name, tensor = entry
            if name in tensors or (name in stored and name != key):
                raise CheckpointError(f"{name} is stored twice, once as {key}: remove one.")
            tensors[name] = tensor
    used = {key for tensor in tensors.values() for key in tensor.parts.values()}
    rest = {key: info for key, info in stored.items() if key not in used}
    rest = {key: info for key, info in rest.items() if not _is_idle(key, tensors)}
    for key, info in rest.items():
        if _holds_codes(key, info, config):
            raise _without_scale(key, info, stored, tensors, config)
    for key, info in rest.items():
        if _is_scale(key, info, config):
            codes = _like(key, CODES, tensors) or "the tensor it belongs to"
            raise CheckpointError(
                f"{key} is a part of a quantized weight, and {codes} is missing or holds no codes: "
                "copy the whole folder."
            )
    return tensors, list(rest)


def _plan(
    key: str,
    info: TensorInfo,
    stored: Mapping[str, TensorInfo],
    config: MakerConfig,
    shape_of: ShapeOf,
) -> tuple[str, Quantized] | None:
    """Return the plain tensor that a key holds the codes of; None where it holds none."""
    module, _, last = key.rpartition(".")
    if last in _REFUSED:
        raise CheckpointError(
            f"{key} says that {_REFUSED[last]}, which is not read here ({config.method}): {ADVICE}."
        )
    if config.method == MXFP4:
        if not key.endswith("_blocks"):
            return None
        name = key.removesuffix("_blocks")
        _need(f"{name}_scales", key, stored)
        return name, plan_mxfp4(name, stored)
    if config.method == COMPRESSED and last.endswith("_packed"):
        name = key.removesuffix("_packed")
        _need(f"{name}_scale", key, stored)
        module = name.rpartition(".")[0]
        if stored[key].dtype == torch.uint8:
            return name, plan_fp4(
                key, name, f"{name}_scale", stored, _scheme(key, module, config, FLOAT, 4)
            )
        _need(f"{name}_shape", key, stored)
        return name, plan_int(key, name, stored, _scheme(key, module, config, INT), shape_of)
    if info.dtype not in (*FP8_DTYPES, torch.int8, torch.uint8):
        return None
    scale = _scale_of(key, stored)
    if scale is None:
        return None
    if info.dtype in FP8_DTYPES:
        return key, plan_fp8(key, scale, stored, _scheme(key, module, config, FLOAT, 8))
    if info.dtype == torch.int8 and config.method == COMPRESSED:
        return key, plan_fp8(key, scale, stored, _scheme(key, module, config, INT, 8))
    if info.dtype == torch.int8 and config.method == FP8:
        return key, plan_fp4(key, key, scale, stored, _FP4)
    if info.dtype == torch.uint8 and config.method == MODELOPT:
        return key, plan_fp4(key, key, scale, stored, _scheme(key, module, config, FLOAT, 4))
    return None


def _need(part: str, key: str, stored: Mapping[str, TensorInfo]) -> None:
    if part not in stored:
        raise CheckpointError(
            f"{part} is missing, without which {key} cannot be read: copy the whole folder."
        )


def _scheme(
    key: str, module: str, config: MakerConfig, kind: str, bits: int | None = None
) -> Scheme:
    scheme = config.scheme(module)
    if scheme is None or scheme.kind != kind or scheme.bits not in (bits or scheme.bits,):
        said = "no group of it is for them" if scheme is None else f"it says {scheme.setting}"
        what = kind if bits is None else f"{kind}, {bits} bits"
        raise CheckpointError(
            f"{key} holds codes ({what}) that quantization_config ({config.method}) does not tell "
            f"of: {said}; put the maker's config.json back."
        )
    return scheme


def _scale_of(key: str, stored: Mapping[str, TensorInfo]) -> str | None:
    module, _, last = key.rpartition(".")
    names = [f"{key}_scale_inv", f"{key}_scale"]
    if last == "weight":
        names += [f"{module}.scale", f"{module}.qscale_weight"]
    return next((name for name in names if name in stored), None)


def _like(key: str, role: str, tensors: Mapping[str, Quantized]) -> str | None:
    module, _, last = key.rpartition(".")
    for tensor in tensors.values():
        if any(part.rpartition(".")[2] == last for part in tensor.parts.values()):
            return f"{module}.{tensor.parts[role].rpartition('.')[2]}"
    return None


def _is_idle(key: str, tensors: Mapping[str, Quantized]) -> bool:
    """Whether a tensor that is no part is for activations, or the zero points of 0 of codes."""
    last = key.rpartition(".")[2]
    if last in _ACTIVATIONS or last.endswith(_ACTIVATION_ENDS):
        return True
    return last.endswith("_zero_point") and key.removesuffix("_zero_point") in tensors


def _holds_codes(key: str, info: TensorInfo, config: MakerConfig) -> bool:
    if info.dtype == torch.float8_e8m0fnu:
        return False
    if info.dtype.is_floating_point:
        return info.dtype.itemsize == 1
    module, _, last = key.rpartition(".")
    is_packed = last.endswith(("_packed", "_blocks"))
    is_bytes = info.dtype in (torch.int8, torch.uint8) and len(info.shape) > 1
    is_scale = last.endswith(_SCALES)
    return (is_packed or (is_bytes and not is_scale)) and not config.is_ignored(module)


def _is_scale(key: str, info: TensorInfo, config: MakerConfig) -> bool:
    module, _, last = key.rpartition(".")
    if info.dtype == torch.float8_e8m0fnu:
        return True
    return last.endswith(_SCALES) and not config.is_ignored(module)


def _without_scale(
    key: str,
    info: TensorInfo,
    stored: Mapping[str, TensorInfo],
    tensors: Mapping[str, Quantized],
    config: MakerConfig,
) -> CheckpointError:
    scale = _scale_of(key, stored)
    if scale is not None:
        return CheckpointError(
            f"{key} is {described(info)} beside {scale}, and {config.method} stores no such codes: "
            f"copy the whole folder, or {ADVICE}."
        )
    end = "_scale_inv" if config.method in (FP8, MXFP8) else "_scale"
    wanted = _like(key, SCALE, tensors) or f"{key}{end}"
    return CheckpointError(
        f"{key} is {described(info)}, which are codes, and {wanted}, without which they cannot be "
        f"read, is missing: copy the whole folder, or {ADVICE}."
    )
