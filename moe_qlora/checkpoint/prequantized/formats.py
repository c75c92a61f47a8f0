"""Which stored tensors make which plain ones, and their decoding: codes times scales, in pieces.

    fp8, mxfp8, int8      X (R, C) or (E, R, C), and X_scale_inv | X_scale | M.scale |
                          M.qscale_weight for X = M.weight
    int4, int8 (packed)   X_packed (R, ceil(C bits / 32)) int32 + X_scale (R, C / group)
                          + X_shape (R, C)
    mxfp4 (gpt-oss)       N_blocks (E, R, G, 16) + N_scales (E, R, G), exponents -> N (E, 32 G, R)
    nvfp4 (compressed)    X_packed (R, C/2) + X_scale fp8 (R, C/16) / X_global_scale
    mxfp4 (compressed)    X_packed (R, C/2) + X_scale, exponents (R, C/32)
    nvfp4 (modelopt)      X uint8 (R, C/2) + X_scale fp8 (R, C/16) * X_scale_2
    fp4 (DeepSeek-V4)     X int8 (R, C/2) + M.scale e8m0 (R, C/32)

All are one product: codes (L, R, C) as fp32 values, times a grid of scales of which each belongs to
a block of rows and columns; the scale multiplies, "inv" or not. Blocks at the edges may be cut off:
576 x 7168 codes in blocks of 128 x 128 have 5 x 56 scales. Scales are fp32, bf16, fp16, or
exponents (e8m0, or bytes). Two E2M1 codes share a byte, the first in the low half; integers are
symmetric, stored with 2^(bits - 1) added, the first in a word's lowest bits, and words of a row are
its own: columns that a last word has room for are no part of the tensor.

Sources: https://github.com/deepseek-ai/DeepSeek-V3/blob/main/inference/kernel.py (weight_dequant),
https://huggingface.co/deepseek-ai/DeepSeek-V3/blob/main/README_WEIGHTS.md,
https://github.com/vllm-project/compressed-tensors, compressors (naive_quantized, mxfp8, mxfp4,
nvfp4, pack_quantized/helpers.py), OCP Microscaling Formats (MX) Specification v1.0 (E2M1, E8M0),
https://github.com/openai/gpt-oss/blob/main/gpt_oss/torch/weights.py,
https://docs.vllm.ai/en/latest/features/quantization/modelopt.html,
https://github.com/NVIDIA/Model-Optimizer, modelopt/torch/quantization/qtensor/nvfp4_tensor.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod

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

    def rows(self, role: str, start: int, stop: int) -> tuple[int, int | None]:
        """Return the rows of a part that rows [start, stop) need; (0, None): all."""
        if role == SCALE and not self.one_scale and not self.stacked:
            return start // self.block[0], cdiv(stop, self.block[0])
        if role == CODES or (role == SCALE and not self.one_scale):
            return start, stop
        return 0, None


def dequantize(
    tensor: Quantized, parts: Mapping[str, Tensor], start: int, stop: int, dtype: torch.dtype
) -> Tensor:
    """Decode rows [start, stop) of the first dimension from those rows of the parts.

    Every value is made in fp32 and rounded once; a piece of them is in fp32 at a time.
    """
    codes, (high, wide) = parts[CODES], tensor.block
    plain = torch.empty((stop - start, *tensor.shape[1:]), dtype=dtype, device=codes.device)
    target = plain if tensor.stacked else plain[None]
    target = target.transpose(1, 2) if tensor.transposed else target
    experts, rows, columns = target.shape
    if not plain.numel():
        return plain
    first = 0 if tensor.stacked else start % high  # row of the first one in its block
    codes = codes.reshape(experts, rows, -1)
    scale = parts[SCALE].reshape(1 if tensor.one_scale else experts, -1, cdiv(columns, wide))
    step = max(1, PIECE * (1 if codes.is_cpu else 4) // columns)
    for expert in range(experts):
        own = scale[0 if tensor.one_scale else expert]
        for begin in range(0, rows, step):
            end = min(begin + step, rows)
            values = tensor.unpack(codes[expert, begin:end])[:, :columns]
            top, bottom = (first + begin) // high, cdiv(first + end, high)
            grid = own[top:bottom]
            # bytes are exponents (E8M0): 2^(byte - 127), 255 is NaN
            grid = (grid.view(torch.float8_e8m0fnu) if grid.dtype == torch.uint8 else grid).float()
            if DIVISOR in parts:
                grid = grid / parts[DIVISOR].float()
            if FACTOR in parts:
                grid = grid * parts[FACTOR].float()
            if high > 1:
                index = torch.arange(first + begin, first + end, device=grid.device) // high - top
                grid = grid.index_select(0, index)
            whole = columns // wide
            if whole:
                blocks = values[:, : whole * wide].unflatten(1, (whole, wide))
                blocks *= grid[:, :whole, None]
            if whole < grid.shape[1]:
                values[:, whole * wide :] *= grid[:, whole:]
            target[expert, begin:end] = values.to(dtype)  # the one rounding
    return plain


def unpack_nibbles(codes: Tensor, table: Sequence[float]) -> Tensor:
    """Return the values (r, 2 w), fp32, of bytes (r, w): `table[low], table[high]` of each."""
    pairs = [(low, high) for high in table for low in table]
    values = torch.tensor(pairs, dtype=torch.float32, device=codes.device)
    index = codes.contiguous().view(torch.uint8).int().flatten()
    both = values.view(torch.int64).flatten().index_select(0, index)  # a pair at a time
    return both.view(torch.float32).view(codes.shape[0], -1)


_unpack_e2m1 = partial(unpack_nibbles, table=TABLES[MXFP4])
# words are little-endian
_unpack_int4 = partial(unpack_nibbles, table=[float(code - 8) for code in range(16)])


def _unpack_int8(words: Tensor) -> Tensor:
    """Return the fp32 values (r, 4 w) of words (r, w)."""
    return words.contiguous().view(torch.uint8).float() - 128


FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
FLOAT_SCALES = (torch.float32, torch.bfloat16, torch.float16)
MXFP4_SCALES = (torch.uint8, torch.float8_e8m0fnu)
FP8_SCALES = (*FLOAT_SCALES, *MXFP4_SCALES)


def _unpack_bytes(codes: Tensor) -> Tensor:
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
_GPT_OSS = Scheme(FLOAT, 4, ((1, MX_BLOCK),), "quant_method mxfp4, groups of 32")


class Plan:
    """The plain tensors that stored ones make: `tensors` by their names; keys that are `plain`.

    What lies on disk decides: codes with their scales are decoded, tensors of 16 bits or more are
    read as they are, whatever the configuration lists. It says how codes are laid out, and of which
    modules bytes are no codes and a tensor called scale is a weight.

    Raises:
        CheckpointError: A part is missing, belongs to nothing, or has the wrong shape.
    """

    def __init__(
        self,
        stored: Mapping[str, TensorInfo],
        config: MakerConfig,
        shape_of: Callable[[str], tuple[int, ...]],
    ) -> None:
        """Take the `shape_of` a stored `weight_shape`, which it reads."""
        self.stored, self.config, self.shape_of = stored, config, shape_of
        self.tensors: dict[str, Quantized] = {}
        for key, info in stored.items():
            tensor = self._of_codes(key, info)
            if tensor is not None:
                name = self._name(key)
                if name in self.tensors or (name in stored and name != key):
                    raise CheckpointError(f"{name} is stored twice, once as {key}: remove one.")
                self.tensors[name] = tensor
        used = {key for tensor in self.tensors.values() for key in tensor.parts.values()}
        self.plain = [key for key in stored if key not in used and not self._is_idle(key)]
        codes = list(filter(self._holds_codes, self.plain))
        for key in (*codes, *filter(self._is_scale, self.plain)):
            raise CheckpointError(
                f"{key} is {described(stored[key])}, a part of a quantized weight, and "
                f"{self._other(key, key in codes)} is missing, or does not go with it in "
                f"{config.method}: copy the whole folder, or {ADVICE}."
            )

    def _name(self, key: str) -> str:
        """Return the plain name of codes."""
        ends = {MXFP4: "_blocks", COMPRESSED: "_packed"}
        return key.removesuffix(ends.get(self.config.method, ""))

    def _scale_of(self, key: str) -> str | None:
        module, _, last = key.rpartition(".")
        names = [f"{key}_scale_inv", f"{key}_scale"]
        names += [f"{module}.scale", f"{module}.qscale_weight"] * (last == "weight")
        return next((name for name in names if name in self.stored), None)

    def _other(self, key: str, is_codes: bool) -> str:
        """Return the name of what a part of a weight is without, as other modules have it."""
        module, _, last = key.rpartition(".")
        role = SCALE if is_codes else CODES
        ends = (
            {one: part.rpartition(".")[2] for one, part in tensor.parts.items()}
            for tensor in self.tensors.values()
        )
        like = next((f"{module}.{end[role]}" for end in ends if last in end.values()), None)
        if not is_codes:
            return like or "the other part"
        end = "_scale_inv" if self.config.method in (FP8, MXFP8) else "_scale"
        return self._scale_of(key) or like or f"{key}{end}"

    def _of_codes(self, key: str, info: TensorInfo) -> Quantized | None:
        """Return the plain tensor that a key holds the codes of; None where it holds none."""
        method, last = self.config.method, key.rpartition(".")[2]
        if last in _REFUSED:
            raise CheckpointError(
                f"{key} says that {_REFUSED[last]}, which is not read here ({method}): {ADVICE}."
            )
        if method == MXFP4:
            return self._gpt_oss(key, info) if key.endswith("_blocks") else None
        if method == COMPRESSED and last.endswith("_packed"):
            if info.dtype == torch.uint8:
                return self._fp4(key, f"{self._name(key)}_scale", self._scheme(key, FLOAT, 4))
            return self._int(key, self._scheme(key, INT))
        scale = self._scale_of(key)
        if scale is None:
            return None
        is_int8 = info.dtype == torch.int8
        if info.dtype in FP8_DTYPES or (is_int8 and method == COMPRESSED):
            scheme = self._scheme(key, INT if is_int8 else FLOAT, 8)
            return self._quantized(key, info.shape, scale, scheme, FP8_SCALES, _unpack_bytes)
        if is_int8 and method == FP8:
            return self._fp4(key, scale, _FP4)
        if info.dtype == torch.uint8 and method == MODELOPT:
            return self._fp4(key, scale, self._scheme(key, FLOAT, 4))
        return None

    def _quantized(
        self,
        key: str,
        shape: tuple[int, ...],
        scale: str,
        scheme: Scheme,
        dtypes: tuple[torch.dtype, ...],
        unpack: Callable[[Tensor], Tensor],
        *others: tuple[str, str],
    ) -> Quantized:
        """Return codes whose scales fit one of the scheme's blocks.

        `shape` is that of the codes once unpacked; `dtypes`, that such scales are stored in.
        """
        info = self._part(scale, key)
        if len(shape) not in (2, 3) or 0 in shape:
            raise misfit(key, self.stored[key], "codes of shape (out, in) or (experts, out, in)")
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
                parts = dict([(CODES, key), (SCALE, scale), *others])
                return Quantized(parts, shape, (high, wide), unpack, one_scale=one)
        raise misfit(
            scale,
            info,
            f"scales of {key} of shape {shape}, which are {' or '.join(map(dtype_name, dtypes))} "
            f"of shape {' or '.join(fitting)} by {scheme.setting}",
        )

    def _int(self, key: str, scheme: Scheme) -> Quantized:
        """Return words of codes.

        Columns are those of all groups, which spares reading thousands of shapes from disk; they
        are read where there are no groups. The reader compares them when a tensor is read.
        """
        name, words = self._name(key), self.stored[key]
        scale, said = f"{name}_scale", f"{name}_shape"
        scales, group = self._part(scale, key).shape, scheme.blocks[0][1]
        self._part(said, key)
        shape = (*words.shape[:-1], (scales or (0,))[-1] * group) if group else self.shape_of(said)
        wanted = (*shape[:-1], cdiv(shape[-1], 32 // scheme.bits)) if shape else ()
        if words.dtype != torch.int32 or words.shape != wanted:
            codes = f"int32 of shape {wanted}, {scheme.bits} bits for each of {shape}"
            raise misfit(key, words, f"{codes}, which {scale if group else said} asks for")
        unpack = _unpack_int4 if scheme.bits == 4 else _unpack_int8
        return self._quantized(key, shape, scale, scheme, FLOAT_SCALES, unpack, (SHAPE, said))

    def _fp4(self, key: str, scale: str, scheme: Scheme) -> Quantized:
        """Return bytes of two codes; where the scheme is nested, the scales have a scale."""
        *rest, width = self.stored[key].shape or (0,)
        shape = (*rest, width * 2)
        if not scheme.nested:
            return self._quantized(key, shape, scale, scheme, MXFP4_SCALES, _unpack_e2m1)
        is_factor = self.config.method == MODELOPT
        other = f"{self._name(key)}{'_scale_2' if is_factor else '_global_scale'}"
        info, own = self._part(other, key), (torch.float8_e4m3fn,)
        if prod(info.shape) != 1 or info.dtype not in FLOAT_SCALES:
            raise misfit(other, info, f"one floating-point value for {key}")
        role = FACTOR if is_factor else DIVISOR
        return self._quantized(key, shape, scale, scheme, own, _unpack_e2m1, (role, other))

    def _gpt_oss(self, key: str, info: TensorInfo) -> Quantized:
        if info.shape[3:] != (MX_BLOCK // 2,) or info.dtype != torch.uint8:
            raise misfit(key, info, "bytes of shape (experts, rows, groups, 16)")
        experts, rows, groups, _ = info.shape
        shape, scale = (experts, rows, groups * MX_BLOCK), f"{self._name(key)}_scales"
        found = self._quantized(key, shape, scale, _GPT_OSS, MXFP4_SCALES, _unpack_e2m1)
        return replace(found, shape=(experts, shape[2], rows), transposed=True)

    def _part(self, part: str, key: str) -> TensorInfo:
        if part not in self.stored:
            raise CheckpointError(
                f"{part} is missing, without which {key} cannot be read: copy the whole folder."
            )
        return self.stored[part]

    def _scheme(self, key: str, kind: str, bits: int | None = None) -> Scheme:
        scheme = self.config.scheme(key.rpartition(".")[0])
        if scheme is None or scheme.kind != kind or scheme.bits not in (bits or scheme.bits,):
            said = "no group of it is for them" if scheme is None else f"it says {scheme.setting}"
            what = kind if bits is None else f"{kind}, {bits} bits"
            raise CheckpointError(
                f"{key} holds codes ({what}) that quantization_config ({self.config.method}) does "
                f"not tell of: {said}; put the maker's config.json back."
            )
        return scheme

    def _is_idle(self, key: str) -> bool:
        """Whether a tensor that is no part is for activations, or the zero points of 0 of codes."""
        last = key.rpartition(".")[2]
        if last in _ACTIVATIONS or last.endswith(_ACTIVATION_ENDS):
            return True
        return last.endswith("_zero_point") and key.removesuffix("_zero_point") in self.tensors

    def _holds_codes(self, key: str) -> bool:
        info, (module, _, last) = self.stored[key], key.rpartition(".")
        if info.dtype.is_floating_point:
            return info.dtype.itemsize == 1 and info.dtype != torch.float8_e8m0fnu
        is_bytes = info.dtype in (torch.int8, torch.uint8) and len(info.shape) > 1
        is_codes = is_bytes and not last.endswith(_SCALES)
        is_codes = is_codes or last.endswith(("_packed", "_blocks"))
        return is_codes and not self.config.is_ignored(module)

    def _is_scale(self, key: str) -> bool:
        module, _, last = key.rpartition(".")
        is_exponent = self.stored[key].dtype == torch.float8_e8m0fnu
        return is_exponent or (last.endswith(_SCALES) and not self.config.is_ignored(module))
