"""Codes of 8 bits: FP8 (e4m3, e5m2) and INT8, with a scale a block, channel, tensor or group.

    X (R, C) or (E, R, C), and X_scale_inv | X_scale | M.scale | M.qscale_weight for X = M.weight

The scale multiplies, "inv" or not. Blocks at the edges may be cut off: 576 x 7168 codes in blocks
of 128 x 128 have 5 x 56 scales. Scales are fp32, bf16, fp16, or exponents (e8m0, or bytes).
Sources: https://github.com/deepseek-ai/DeepSeek-V3/blob/main/inference/kernel.py (weight_dequant),
https://huggingface.co/deepseek-ai/DeepSeek-V3/blob/main/README_WEIGHTS.md,
https://github.com/vllm-project/compressed-tensors, compressors/naive_quantized, compressors/mxfp8,
https://docs.vllm.ai/en/latest/features/quantization/modelopt.html.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType

import torch
from torch import Tensor

from ...errors import CheckpointError
from ...kernels.limits import cdiv
from ...kernels.weights import MX_BLOCK, TABLES
from ...layout import dtype_name
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
    TENSOR,
    MakerConfig,
    Scheme,
)

# Decoding of one quantized tensor, or rows of it, in pieces.
#
# All formats are the same product: codes (L, R, C) as fp32 values, times a grid of scales of which
# each belongs to a block of rows and columns. They differ in how a code becomes a value, in the
# block and in the dtype of the scales.

PIECE = 1 << 20
"""Most values that are in fp32 at a time on the CPU, in whose cache they stay; on other devices it
is four times as many, which start fewer kernels."""

CODES, SCALE, FACTOR, DIVISOR, SHAPE = "codes", "scale", "factor", "divisor", "shape"
"""Roles of stored tensors: scales of scales are multiplied (factor) or divided by (divisor)."""


@dataclass(frozen=True)
class Quantized:
    """How one plain tensor is stored.

    Attributes:
        parts: Keys on disk by their role; `CODES` is the one that the tensor is known by.
        shape: Of the plain tensor: (rows, columns) or (experts, rows, columns).
        block: Rows and columns that share a scale; of the matrix of codes, whatever the plain one.
        unpack: Codes (r, whatever their width) -> fp32 values (r, at least the columns).
        one_scale: Whether a single scale belongs to all of the tensor.
        transposed: Whether the plain tensor has the codes' rows as its last dimension.
    """

    parts: Mapping[str, str]
    shape: tuple[int, ...]
    block: tuple[int, int]
    unpack: Callable[[Tensor], Tensor]
    one_scale: bool = False
    transposed: bool = False

    @property
    def stacked(self) -> bool:
        """Whether the first dimension counts experts."""
        return len(self.shape) == 3

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns of a matrix of codes, once unpacked."""
        rows, columns = self.shape[-2:]
        return (columns, rows) if self.transposed else (rows, columns)

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of the scales of one matrix; edges may be cut off a block."""
        rows, columns = self.matrix
        return cdiv(rows, self.block[0]), cdiv(columns, self.block[1])

    def rows(self, role: str, start: int, stop: int) -> tuple[int, int] | None:
        """Return the rows of a part that rows [start, stop) need; None: all, which is one value."""
        if role == CODES or (role == SCALE and self.stacked and not self.one_scale):
            return start, stop
        if role == SCALE and not self.one_scale:
            return start // self.block[0], cdiv(stop, self.block[0])
        return None


def exponents(scale: Tensor) -> Tensor:
    """Return scales as fp32; bytes are exponents: 2^(byte - 127), 255 is NaN.

    Source: OCP Microscaling Formats (MX) Specification v1.0, E8M0.
    """
    return (scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale).float()


def dequantize(
    tensor: Quantized, parts: Mapping[str, Tensor], start: int, stop: int, dtype: torch.dtype
) -> Tensor:
    """Decode rows [start, stop) of the first dimension from those rows of the parts.

    Every value is made in fp32 and rounded once; a piece of them is in fp32 at a time.
    """
    if start == stop:
        return torch.empty((0, *tensor.shape[1:]), dtype=dtype, device=parts[CODES].device)
    height, columns = tensor.matrix
    experts, rows, first = (stop - start, height, 0) if tensor.stacked else (1, stop - start, start)
    codes = parts[CODES].reshape(experts, rows, -1)
    scale = parts[SCALE].reshape(1 if tensor.one_scale else experts, -1, tensor.grid[1])
    shape = (experts, columns, rows) if tensor.transposed else (experts, rows, columns)
    plain = torch.empty(shape, dtype=dtype, device=codes.device)
    target = plain.transpose(1, 2) if tensor.transposed else plain
    high, wide = tensor.block
    step = max(1, PIECE * (1 if codes.is_cpu else 4) // columns)
    for expert in range(experts):
        own = scale[0 if tensor.one_scale else expert]
        for begin in range(0, rows, step):
            end = min(begin + step, rows)
            values = tensor.unpack(codes[expert, begin:end])[:, :columns]
            place = first % high + begin
            top, bottom = place // high, cdiv(place + end - begin, high)
            grid = exponents(own[top:bottom])  # (rows, grid columns) from `place` on
            if DIVISOR in parts:
                grid = grid / parts[DIVISOR].float()
            if FACTOR in parts:
                grid = grid * parts[FACTOR].float()
            if high > 1:
                index = torch.arange(place, place + end - begin, device=grid.device) // high - top
                grid = grid.index_select(0, index)
            _multiply(values, grid, wide)
            target[expert, begin:end] = values.to(dtype)  # the one rounding
    return plain if tensor.stacked else plain[0]


def _multiply(values: Tensor, scale: Tensor, wide: int) -> None:
    """Multiply values (r, C) by scales (r, ceil(C / wide)) in place."""
    columns = values.shape[1]
    whole = columns // wide
    if whole:
        blocks = values[:, : whole * wide].unflatten(1, (whole, wide))
        blocks *= scale[:, :whole, None]
    if whole < scale.shape[1]:
        values[:, whole * wide :] *= scale[:, whole:]


# Integers that compressed-tensors packs: symmetric, 4 or 8 bits, in words of 32.
#
#     X_packed (R, ceil(C bits / 32)) int32 + X_scale (R, C / group) + X_shape (R, C)
#
# The first code of a word is in its lowest bits; codes are stored with 2^(bits - 1) added. Words of
# a row are its own: columns that a last word has room for are no part of the tensor.
# Source: https://github.com/vllm-project/compressed-tensors, compressors/pack_quantized/helpers.py.
INT4 = tuple(float(code - 8) for code in range(16))


def unpack_int4(words: Tensor) -> Tensor:
    """Return the fp32 values (r, 8 w) of words (r, w); words are little-endian."""
    return unpack_nibbles(words, INT4)


def unpack_int8(words: Tensor) -> Tensor:
    """Return the fp32 values (r, 4 w) of words (r, w)."""
    return words.contiguous().view(torch.uint8).float() - 128


def check_shape(tensor: Quantized, shape: tuple[int, ...]) -> None:
    """Refuse a stored shape that the codes do not have."""
    if shape != tensor.shape:
        raise CheckpointError(
            f"{tensor.parts[SHAPE]} says {shape}, and {tensor.parts[CODES]} and its scales are of "
            f"{tensor.shape}: copy the files again."
        )


# Codes of 4 bits that are floats (E2M1), two in a byte, the first in the low half.
#
#     mxfp4 (gpt-oss)       N_blocks (E, R, G, 16) + N_scales (E, R, G), exponents -> N (E, 32 G, R)
#     nvfp4 (compressed)    X_packed (R, C/2) + X_scale fp8 (R, C/16) / X_global_scale
#     mxfp4 (compressed)    X_packed (R, C/2) + X_scale, exponents (R, C/32)
#     nvfp4 (modelopt)      X uint8 (R, C/2) + X_scale fp8 (R, C/16) * X_scale_2
#     fp4 (DeepSeek-V4)     X int8 (R, C/2) + M.scale e8m0 (R, C/32)
#
# Sources: OCP Microscaling Formats (MX) Specification v1.0 (E2M1),
# https://github.com/openai/gpt-oss/blob/main/gpt_oss/torch/weights.py,
# https://github.com/vllm-project/compressed-tensors, compressors/nvfp4 and compressors/mxfp4,
# https://github.com/NVIDIA/Model-Optimizer, modelopt/torch/quantization/qtensor/nvfp4_tensor.py.
MXFP4_SCALES = (torch.uint8, torch.float8_e8m0fnu)
NVFP4_SCALES = (torch.float8_e4m3fn,)


def unpack_e2m1(codes: Tensor) -> Tensor:
    """Return the fp32 values (r, 2 w) of bytes (r, w)."""
    return unpack_nibbles(codes, TABLES[MXFP4])


def unpack_nibbles(codes: Tensor, table: Sequence[float]) -> Tensor:
    """Return the values (r, 2 w), fp32, of bytes (r, w): `table[low], table[high]` of each."""
    pairs = [(low, high) for high in table for low in table]
    values = torch.tensor(pairs, dtype=torch.float32, device=codes.device)
    index = codes.contiguous().view(torch.uint8).int().flatten()
    both = values.view(torch.int64).flatten().index_select(0, index)  # a pair at a time
    return both.view(torch.float32).view(codes.shape[0], -1)


FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
FLOAT_SCALES = (torch.float32, torch.bfloat16, torch.float16)
FP8_SCALES = (*FLOAT_SCALES, torch.float8_e8m0fnu, torch.uint8)


def unpack_bytes(codes: Tensor) -> Tensor:
    """Return the fp32 values (r, c) of FP8 or INT8 codes (r, c).

    The CPU converts FP8 one by one, four times slower than a table does. The table is of bfloat16,
    which holds every FP8 value.
    """
    if not codes.is_cpu or codes.dtype == torch.int8:
        return codes.float()
    table = torch.arange(256, dtype=torch.uint8).view(codes.dtype).to(torch.bfloat16)
    index = codes.contiguous().view(torch.uint8).int().flatten()
    values = table.view(torch.int16).index_select(0, index).view(torch.bfloat16)
    return values.float().view(codes.shape)


def described(info: TensorInfo) -> str:
    """Return what a stored tensor is, for messages."""
    return f"{dtype_name(info.dtype)} of shape {info.shape}"


def misfit(key: str, info: TensorInfo, wanted: str) -> CheckpointError:
    """Return the error for a stored tensor that does not fit the others or the configuration."""
    return CheckpointError(
        f"{key} is {described(info)}, and wanted is {wanted}: copy the files again, or put the "
        "maker's config.json back."
    )


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
    plan = _Plan(stored, config, shape_of)
    return plan.tensors, plan.plain


class _Plan:
    """Which plain tensors the stored ones make; see `plan_tensors`."""

    def __init__(
        self, stored: Mapping[str, TensorInfo], config: MakerConfig, shape_of: ShapeOf
    ) -> None:
        self.stored, self.config, self.shape_of = stored, config, shape_of
        self.tensors: dict[str, Quantized] = {}
        for key, info in stored.items():
            entry = self._of_codes(key, info)
            if entry is not None:
                name, tensor = entry
                if name in self.tensors or (name in stored and name != key):
                    raise CheckpointError(f"{name} is stored twice, once as {key}: remove one.")
                self.tensors[name] = tensor
        used = {key for tensor in self.tensors.values() for key in tensor.parts.values()}
        self.plain = [key for key in stored if key not in used and not self._is_idle(key)]
        self._check_plain()

    def _of_codes(self, key: str, info: TensorInfo) -> tuple[str, Quantized] | None:
        """Return the plain tensor that a key holds the codes of; None where it holds none."""
        method, last = self.config.method, key.rpartition(".")[2]
        if last in _REFUSED:
            raise CheckpointError(
                f"{key} says that {_REFUSED[last]}, which is not read here ({method}): {ADVICE}."
            )
        if method == MXFP4:
            name = key.removesuffix("_blocks")
            return None if name == key else (name, self._mxfp4(key, info, f"{name}_scales"))
        if method == COMPRESSED and last.endswith("_packed"):
            name = key.removesuffix("_packed")
            self._need(f"{name}_scale", key)
            if info.dtype == torch.uint8:
                scheme = self._scheme(key, name, FLOAT, 4)
                return name, self._fp4(key, name, f"{name}_scale", scheme)
            self._need(f"{name}_shape", key)
            return name, self._int(key, name, self._scheme(key, name, INT))
        scale = self._scale_of(key)
        if scale is None or info.dtype not in (*FP8_DTYPES, torch.int8, torch.uint8):
            return None
        is_int8 = info.dtype == torch.int8
        if info.dtype in FP8_DTYPES or (is_int8 and method == COMPRESSED):
            scheme = self._scheme(key, key, INT if is_int8 else FLOAT, 8)
            return key, self._quantized(key, info.shape, scale, scheme, FP8_SCALES, unpack_bytes)
        if is_int8 and method == FP8:
            return key, self._fp4(key, key, scale, _FP4)
        if info.dtype == torch.uint8 and method == MODELOPT:
            return key, self._fp4(key, key, scale, self._scheme(key, key, FLOAT, 4))
        return None

    def _quantized(
        self,
        key: str,
        shape: tuple[int, ...],
        scale: str,
        scheme: Scheme,
        dtypes: tuple[torch.dtype, ...],
        unpack: Callable[[Tensor], Tensor],
        parts: Mapping[str, str] = MappingProxyType({}),
    ) -> Quantized:
        """Return codes whose scales fit one of the scheme's blocks.

        `shape` is that of the codes once unpacked; `dtypes`, that such scales are stored in.
        """
        codes, info = self.stored[key], self.stored[scale]
        if len(codes.shape) not in (2, 3) or 0 in codes.shape:
            raise misfit(key, codes, "codes of shape (out, in) or (experts, out, in)")
        rows, columns = shape[-2:]
        # modelopt keeps dimensions of 1 between; a scale of a tensor may have none
        grid = tuple(size for size in info.shape if size != 1)
        fitting = []
        for block in scheme.blocks:
            high, wide = block[0] or rows, block[1] or columns
            wanted = (*shape[:-2], cdiv(rows, high), cdiv(columns, wide))
            fitting.append(str(wanted))
            one = not grid and (prod(wanted) == 1 or block == TENSOR)
            same = grid == tuple(size for size in wanted if size != 1)
            same = same and info.shape[:1] == wanted[:1]  # rows are read by the first dimension
            if info.dtype in dtypes and (one or same):
                parts = {CODES: key, SCALE: scale, **parts}
                return Quantized(parts, shape, (high, wide), unpack, one_scale=one)
        raise misfit(
            scale,
            info,
            f"scales of {key} of shape {shape}, which are {' or '.join(map(dtype_name, dtypes))} "
            f"of shape {' or '.join(fitting)} by {scheme.setting}",
        )

    def _int(self, key: str, name: str, scheme: Scheme) -> Quantized:
        """Return words of codes.

        Columns are those of all groups, which spares reading thousands of shapes from disk; they
        are read where there are no groups. `check_shape` compares them when a tensor is read.
        """
        words, scale, said = self.stored[key], f"{name}_scale", f"{name}_shape"
        group = scheme.blocks[0][1]
        if group is None:
            shape = self.shape_of(said)
        else:
            shape = (*words.shape[:-1], (self.stored[scale].shape or (0,))[-1] * group)
        wanted = (*shape[:-1], cdiv(shape[-1], 32 // scheme.bits)) if shape else ()
        if words.dtype != torch.int32 or words.shape != wanted:
            codes = f"int32 of shape {wanted}, {scheme.bits} bits for each of {shape}"
            raise misfit(key, words, f"{codes}, which {said if group is None else scale} asks for")
        unpack = unpack_int4 if scheme.bits == 4 else unpack_int8
        return self._quantized(key, shape, scale, scheme, FLOAT_SCALES, unpack, {SHAPE: said})

    def _fp4(self, key: str, name: str, scale: str, scheme: Scheme) -> Quantized:
        """Return bytes of two codes; where the scheme is nested, the scales have a scale."""
        *rest, width = self.stored[key].shape or (0,)
        parts: dict[str, str] = {}
        if scheme.nested:
            role, end = (FACTOR, "_scale_2") if key == name else (DIVISOR, "_global_scale")
            other = parts[role] = f"{name}{end}"
            self._need(other, key)
            info = self.stored[other]
            if prod(info.shape) != 1 or info.dtype not in FLOAT_SCALES:
                raise misfit(other, info, f"one floating-point value for {key}")
        dtypes = NVFP4_SCALES if scheme.nested else MXFP4_SCALES
        return self._quantized(key, (*rest, width * 2), scale, scheme, dtypes, unpack_e2m1, parts)

    def _mxfp4(self, key: str, info: TensorInfo, scale: str) -> Quantized:
        self._need(scale, key)
        is_blocks = len(info.shape) == 4 and info.shape[3] == MX_BLOCK // 2
        if not is_blocks or info.dtype != torch.uint8 or 0 in info.shape:
            raise misfit(key, info, "bytes of shape (experts, rows, groups, 16)")
        experts, rows, groups = info.shape[:3]
        scales = self.stored[scale]
        if scales.shape != info.shape[:3] or scales.dtype not in MXFP4_SCALES:
            raise misfit(scale, scales, f"bytes of shape {info.shape[:3]} for {key}")
        shape = (experts, groups * MX_BLOCK, rows)
        parts = {CODES: key, SCALE: scale}
        return Quantized(parts, shape, (1, MX_BLOCK), unpack_e2m1, transposed=True)

    def _need(self, part: str, key: str) -> None:
        if part not in self.stored:
            raise CheckpointError(
                f"{part} is missing, without which {key} cannot be read: copy the whole folder."
            )

    def _scheme(self, key: str, name: str, kind: str, bits: int | None = None) -> Scheme:
        scheme = self.config.scheme(name.rpartition(".")[0])
        if scheme is None or scheme.kind != kind or scheme.bits not in (bits or scheme.bits,):
            said = "no group of it is for them" if scheme is None else f"it says {scheme.setting}"
            what = kind if bits is None else f"{kind}, {bits} bits"
            raise CheckpointError(
                f"{key} holds codes ({what}) that quantization_config ({self.config.method}) does "
                f"not tell of: {said}; put the maker's config.json back."
            )
        return scheme

    def _scale_of(self, key: str) -> str | None:
        module, _, last = key.rpartition(".")
        names = [f"{key}_scale_inv", f"{key}_scale"]
        if last == "weight":
            names += [f"{module}.scale", f"{module}.qscale_weight"]
        return next((name for name in names if name in self.stored), None)

    def _is_idle(self, key: str) -> bool:
        """Whether a tensor that is no part is for activations, or the zero points of 0 of codes."""
        last = key.rpartition(".")[2]
        if last in _ACTIVATIONS or last.endswith(_ACTIVATION_ENDS):
            return True
        return last.endswith("_zero_point") and key.removesuffix("_zero_point") in self.tensors

    def _check_plain(self) -> None:
        """Refuse codes and scales that are no part of a tensor."""
        codes = [key for key in self.plain if self._holds_codes(key)]
        for key in (*codes, *filter(self._is_scale, self.plain)):
            module, _, last = key.rpartition(".")
            like = (  # what other modules have beside a tensor of this name
                f"{module}.{tensor.parts[SCALE if key in codes else CODES].rpartition('.')[2]}"
                for tensor in self.tensors.values()
                if any(part.rpartition(".")[2] == last for part in tensor.parts.values())
            )
            end = "_scale_inv" if self.config.method in (FP8, MXFP8) else "_scale"
            other = next(like, f"{key}{end}" if key in codes else "the other part")
            other = (self._scale_of(key) if key in codes else None) or other
            raise CheckpointError(
                f"{key} is {described(self.stored[key])}, a part of a quantized weight, and "
                f"{other} is missing, or does not go with it in {self.config.method}: copy the "
                f"whole folder, or {ADVICE}."
            )

    def _holds_codes(self, key: str) -> bool:
        info = self.stored[key]
        if info.dtype.is_floating_point:
            return info.dtype.itemsize == 1 and info.dtype != torch.float8_e8m0fnu
        module, _, last = key.rpartition(".")
        is_packed = last.endswith(("_packed", "_blocks"))
        is_bytes = info.dtype in (torch.int8, torch.uint8) and len(info.shape) > 1
        is_codes = is_packed or (is_bytes and not last.endswith(_SCALES))
        return is_codes and not self.config.is_ignored(module)

    def _is_scale(self, key: str) -> bool:
        module, _, last = key.rpartition(".")
        is_exponent = self.stored[key].dtype == torch.float8_e8m0fnu
        return is_exponent or (last.endswith(_SCALES) and not self.config.is_ignored(module))
