"""Which stored tensors make which plain ones: every key of a folder is given its part."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from ...errors import CheckpointError
from ...layout import dtype_name
from ..reader import TensorInfo
from .config import COMPRESSED, FP8, MODELOPT, MXFP4, MakerConfig, Scheme
from .decode import Quantized
from .fp4 import plan_fp4, plan_mxfp4
from .fp8 import FP8_DTYPES, plan_fp8
from .int4 import plan_int

ShapeOf = Callable[[str], tuple[int, ...]]
"""Reads a stored `weight_shape`."""

_ACTIVATIONS = (
    *("input_scale", "input_global_scale", "input_zero_point", "activation_scale"),
    *("output_scale", "qscale_act", "k_scale", "v_scale", "q_scale", "k_zero_point"),
    *("v_zero_point", "prob_output_scale"),
)
"""Last names of tensors for activations or the KV cache, which weights do without."""
_ACTIVATION_ENDS = ("_input_scale", "_activation_scale")
_REFUSED = {
    "weight_g_idx": "columns are reordered by activation",
    "g_idx": "columns are reordered by activation",
    "qweight": "codes are packed as GPTQ and AWQ do",
    "qzeros": "codes are packed as GPTQ and AWQ do",
    "pre_quant_scale": "columns are scaled as AWQ does",
}
_ORPHANS = {
    "_scale_inv": "",
    "weight_scale": "weight",
    "weight_scale_2": "weight",
    "weight_global_scale": "weight_packed",
    "weight_shape": "weight_packed",
    "weight_zero_point": "weight_packed",
    "qscale_weight": "weight",
    "_scales": "_blocks",
}
_FP4_SCHEME = Scheme("float", 4, ((1, 32),), "FP4 codes in groups of 32 (expert_dtype fp4)")


def plan_tensors(
    stored: Mapping[str, TensorInfo], config: MakerConfig, shape_of: ShapeOf
) -> tuple[dict[str, Quantized], list[str]]:
    """Return the quantized tensors by their plain names, and the keys of tensors that are plain.

    Raises:
        CheckpointError: A part is missing, belongs to nothing, or has the wrong shape.
    """
    tensors: dict[str, Quantized] = {}
    for key, info in stored.items():
        found = _plan(key, info, stored, config, shape_of)
        if found is not None:
            name, tensor = found
            if name in tensors or (name in stored and name != key):
                raise CheckpointError(f"{name} is stored twice, once as {key}: remove one.")
            tensors[name] = tensor
    used = {key for tensor in tensors.values() for key in tensor.parts.values()}
    plain = [
        key
        for key, info in stored.items()
        if key not in used and not _is_companion(key, info, tensors, config)
    ]
    return tensors, plain


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
            f"{key} says that {_REFUSED[last]}, which is not read here ({config.method}): name the "
            "model's 16-bit checkpoint instead."
        )
    if config.method == MXFP4:
        if not key.endswith("_blocks"):
            return None
        name = key.removesuffix("_blocks")
        _need(f"{name}_scales", key, stored)
        return name, plan_mxfp4(name, stored)
    if last.endswith("_packed") and config.method == COMPRESSED:
        return _plan_packed(key, stored, config, shape_of)
    if info.dtype not in (*FP8_DTYPES, torch.int8, torch.uint8):
        return None
    scale = _scale_of(key, stored)
    if scale is None:
        return None
    if info.dtype in FP8_DTYPES or config.method == COMPRESSED:
        return key, plan_fp8(key, scale, stored, _scheme(key, module, config, 8))
    if config.method == FP8:
        return key, plan_fp4(key, key, scale, stored, _FP4_SCHEME)
    if config.method == MODELOPT and info.dtype == torch.uint8:
        return key, plan_fp4(key, key, scale, stored, _scheme(key, module, config, 4))
    return None


def _plan_packed(
    key: str, stored: Mapping[str, TensorInfo], config: MakerConfig, shape_of: ShapeOf
) -> tuple[str, Quantized]:
    name = key.removesuffix("_packed")
    _need(f"{name}_scale", key, stored)
    scheme = _scheme(key, name.rpartition(".")[0], config, None)
    if scheme.kind == "float":
        if scheme.bits != 4 or stored[key].dtype != torch.uint8:
            raise CheckpointError(
                f"{key} is {dtype_name(stored[key].dtype)}, and {scheme.setting} says "
                f"{scheme.bits} bits of float, which are packed in bytes, two in each."
            )
        return name, plan_fp4(key, name, f"{name}_scale", stored, scheme)
    _need(f"{name}_shape", key, stored)
    return name, plan_int(key, name, stored, scheme, shape_of(f"{name}_shape"))


def _need(part: str, key: str, stored: Mapping[str, TensorInfo]) -> None:
    if part not in stored:
        raise CheckpointError(
            f"{part} is missing, without which {key} cannot be read: copy the whole folder."
        )


def _scheme(key: str, module: str, config: MakerConfig, bits: int | None) -> Scheme:
    """Return the scheme of a tensor that is stored as codes of so many bits."""
    scheme = config.scheme(module)
    if scheme is None or (bits is not None and scheme.bits != bits):
        said = "no group of it is for" if scheme is None else f"{scheme.setting} is not of"
        raise CheckpointError(
            f"{key} holds codes, and the quantization_config ({config.method}) does not say how: "
            f"{said} them; put the maker's config.json back."
        )
    return scheme


def _scale_of(key: str, stored: Mapping[str, TensorInfo]) -> str | None:
    module, _, last = key.rpartition(".")
    names = [f"{key}_scale_inv", f"{key}_scale"]
    if last == "weight":
        names += [f"{module}.scale", f"{module}.qscale_weight"]
    return next((name for name in names if name in stored), None)


def _is_companion(
    key: str, info: TensorInfo, tensors: Mapping[str, Quantized], config: MakerConfig
) -> bool:
    """Whether a tensor without a part goes with a quantized one; False where it is plain."""
    module, _, last = key.rpartition(".")
    if last in _ACTIVATIONS or last.endswith(_ACTIVATION_ENDS):
        return True
    if last.endswith("_zero_point") and key.removesuffix("_zero_point") in tensors:
        return True  # of a symmetric scheme, where it is zero
    if config.is_ignored(module) and info.dtype not in FP8_DTYPES:
        return False
    if info.dtype in FP8_DTYPES or (
        info.dtype in (torch.int8, torch.uint8) and last in ("weight", "weight_packed")
    ):
        raise CheckpointError(
            f"{key} is {dtype_name(info.dtype)}, and {key}_scale_inv or {key}_scale is missing, "
            "without which it cannot be read: copy the whole folder."
        )
    for end, owner in _ORPHANS.items():
        if last.endswith(end):
            codes = key.removesuffix(end) + owner
            raise CheckpointError(
                f"{key} belongs to codes that are not there: {codes} is missing or is not "
                "quantized; copy the whole folder."
            )
    return False
