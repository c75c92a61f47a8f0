"""Folders that their makers quantized, read as the 16-bit folders that they stand for.

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
a block of rows and columns, at the edges cut off; the scale multiplies, "inv" or not. Scales are
fp32, bf16, fp16, or exponents (e8m0, or bytes). Two E2M1 codes share a byte, the first in the low
half; integers are symmetric, stored with 2^(bits - 1) added, the first in a word's lowest bits.

Sources: DeepSeek-V3's README_WEIGHTS.md, OCP Microscaling Formats (MX) Specification v1.0, gpt_oss'
torch/weights.py, vllm-project/compressed-tensors (compressors, quant_config.py), transformers'
utils/quantization_config.py, NVIDIA/Model-Optimizer (nvfp4_tensor.py, convert_hf_config.py).
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..kernels.limits import cdiv
from ..kernels.weights import MX_BLOCK, TABLES
from ..layout import dtype_name, human_bytes
from ..models.files import read_json
from .folder import Checkpoint, TensorInfo, inside
from .manifest import CONFIG, open_checkpoint

FP8, MXFP8, MXFP4 = "fp8", "mxfp8", "mxfp4"
COMPRESSED, MODELOPT = "compressed-tensors", "modelopt"
MODELOPT_CONFIG = "hf_quant_config.json"  # modelopt's, beside config.json
_SETTINGS = "quantization_config"
METHODS = (FP8, MXFP8, MXFP4, COMPRESSED, MODELOPT)
ADVICE = "name the model's 16-bit checkpoint instead"

Block = tuple[int | None, int | None]  # rows and columns of one scale; None: all of them
TENSOR: Block = (None, None)
CHANNEL: Block = (1, None)


def parts_of(config: Any) -> Iterator[dict[str, Any]]:
    """Yield the fields of a configuration (config.json or its object), and of those in it."""
    own: dict[str, Any] = config if isinstance(config, dict) else vars(config)
    yield own
    for inner in list(own.values()):
        if isinstance(inner, dict) or hasattr(inner, "sub_configs"):
            yield from parts_of(inner)


def maker_method(config: Any) -> str | None:
    """Return the method of a maker's configuration; None for 16 bits and for bitsandbytes."""
    return method_of(_maker_config(config))


def _maker_config(config: Any) -> Any:
    return next(filter(None, (part.get(_SETTINGS) for part in parts_of(config))), None)


def method_of(own: Any) -> str | None:
    """Return the method of a `quantization_config`, as `maker_method` does."""
    own = own.to_dict() if hasattr(own, "to_dict") else own or {}
    if not isinstance(own, Mapping):
        raise _unread(f"{own!r:.80}", "it is no object")
    method = str(own.get("quant_method") or "").lower()
    ours = method.startswith("bitsandbytes") or own.get("load_in_4bit") or own.get("load_in_8bit")
    if not own or ours:
        return None
    unnamed = not method and ("quant_algo" in own or own.get("quant_library") == MODELOPT)
    named = method.startswith(MODELOPT)  # modelopt_fp4 and others are names of vLLM
    return MODELOPT if unnamed or named else method or "no quant_method"


def _unread(setting: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"quantization_config says {setting}, which is not read here ({why}): {ADVICE}."
    )


# Of a group's weights: the values that are read, first the one that is meant where none is given
_READ: dict[str, tuple[Any, ...]] = {
    "type": ("int", "float", "INT", "FLOAT"),
    "num_bits": (8, 4),
    "symmetric": (None, True),
    "strategy": (None, "tensor", "channel", "group", "tensor_group", "block"),
}
# of modelopt, or how their names begin
_ALGORITHMS = ("FP8", "MXFP8", "NVFP4", "W4A16_NVFP4", "MIXED_PRECISION", "NONE")


class MakerConfig:
    """A `quantization_config` of a supported method; unsupported settings are refused by name."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.method = method_of(config) or "bitsandbytes"
        self.words: set[tuple[int, int | None]] = set()  # bits of integers, columns of one scale
        self.blocks: set[Block] = set()
        if self.method not in METHODS:
            raise _unread(self.method, f"read are {', '.join(METHODS)}")
        try:
            self._read({**config, **(config.get("quantization") or {})})
        except (AttributeError, TypeError, ValueError) as error:
            raise _unread("a value of another type than its format has", f"{error}") from error

    def _read(self, config: Mapping[str, Any]) -> None:
        method, algorithm = self.method, str(config.get("quant_algo"))
        if method == MODELOPT and not algorithm.upper().startswith(_ALGORITHMS):
            raise _unread(f"quant_algo {algorithm!r:.80}", "it is not known")
        for key, field in (("sparsity_config", "format"), ("transform_config", "config_groups")):
            said = (config.get(key) or {}).get(field)
            if said and said != "dense":
                raise _unread(f"{key}.{field} {said!r:.80}", "weights are stored otherwise")
        # modelopt's groups say less than its tensors
        groups = (config.get("config_groups") or {}) if method == COMPRESSED else {}
        for name, group in groups.items():
            if not (weights := group.get("weights")):
                continue
            for key, values in _READ.items():
                if (value := weights.get(key, values[0])) not in values:
                    said = f"config_groups.{name}.weights.{key} {value!r:.80}"
                    raise _unread(said, f"read are {values}")
            size = weights.get("group_size")
            whole = weights.get("strategy") in (None, "tensor") and size is None
            block = _sizes(weights.get("block_structure")) or (1, max(size or 0, 0) or None)
            self.blocks.add(TENSOR if whole else block)
            if weights.get("type", "int").lower() == "int":
                self.words.add((weights.get("num_bits", 8), None if whole else block[1]))
        size = _sizes(config.get("weight_block_size"))
        if method == MXFP8 or size:
            self.blocks = {size or (1, 32)}
        elif method != COMPRESSED:  # transformers takes 128 x 128, vLLM one for a tensor
            self.blocks = {(128, 128), TENSOR, CHANNEL, *[(1, 32)] * (method == MODELOPT)}


def _sizes(value: Any) -> tuple[int, int] | None:
    """Return rows and columns of a block, given as [16, 32] or "16x32"."""
    if not value:
        return None
    high, wide = map(int, value.split("x") if isinstance(value, str) else value)
    if high < 1 or wide < 1:
        raise ValueError(f"{value} is no block")
    return high, wide


# Most values that are in fp32 at a time on the CPU, in whose cache they stay; on other devices it
# is four times as many, which start fewer kernels.
PIECE = 1 << 20
# How codes are stored: bytes of a dtype, "e2m1" or "int4" two to a byte, or "words of int8"
Kind = str | torch.dtype
# Roles of stored tensors: scales of scales are multiplied (factor) or divided by (divisor).
CODES, SCALE, FACTOR, DIVISOR = "codes", "scale", "factor", "divisor"


@dataclass(frozen=True)
class Quantized:
    """How one plain tensor is stored."""

    parts: Mapping[str, str]  # keys on disk by role; `CODES` is the one that it is known by
    shape: tuple[int, ...]  # plain: (rows, columns) or (experts, rows, columns)
    block: tuple[int, int]  # rows and columns of the matrix of codes that share a scale
    kind: Kind  # of the codes
    one_scale: bool = False  # a single scale belongs to all of the tensor
    transposed: bool = False  # the plain tensor has the codes' rows as its last dimension


def dequantize(
    tensor: Quantized, parts: Mapping[str, Tensor], start: int, stop: int, dtype: torch.dtype
) -> Tensor:
    """Decode rows [start, stop) from those of the parts: in fp32, by pieces, rounded once."""
    codes, (high, wide), stacked = parts[CODES], tensor.block, len(tensor.shape) == 3
    plain = torch.empty((stop - start, *tensor.shape[1:]), dtype=dtype, device=codes.device)
    target = plain if stacked else plain[None]
    target = target.transpose(1, 2) if tensor.transposed else target
    experts, rows, columns = target.shape
    if not plain.numel():
        return plain
    first = 0 if stacked else start % high  # row of the first one in its block
    codes = codes.reshape(experts, rows, -1)
    scale = parts[SCALE].reshape(1 if tensor.one_scale else experts, -1, cdiv(columns, wide))
    scale = scale.expand(experts, -1, -1)
    step = max(1, PIECE * (1 if codes.is_cpu else 4) // columns)
    for expert in range(experts):
        for begin in range(0, rows, step):
            end = min(begin + step, rows)
            values = _unpack(codes[expert, begin:end], tensor.kind)[:, :columns]
            top = (first + begin) // high
            grid = scale[expert, top : cdiv(first + end, high)]
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


@cache
def _values(kind: Kind, device: torch.device) -> Tensor:
    """Return the values of each byte, fp32: (256,), or of two codes in it (256, 2)."""
    if isinstance(kind, torch.dtype):
        return torch.arange(256, dtype=torch.uint8, device="cpu").view(kind).float().to(device)
    if kind == "words of int8":
        return torch.arange(-128, 128, dtype=torch.float32, device=device)
    half = TABLES[MXFP4] if kind == "e2m1" else range(-8, 8)
    pairs = [(low, high) for high in half for low in half]
    return torch.tensor(pairs, dtype=torch.float32, device=device)


def _unpack(codes: Tensor, kind: Kind) -> Tensor:
    """Return the values of rows of codes, fp32, some more than their columns where words end."""
    values = _values(kind, codes.device)
    if values.dim() > 1:
        values = values.view(torch.int64).flatten()  # a pair at a time
    index = codes.contiguous().view(torch.uint8).int().flatten()
    return values.index_select(0, index).view(torch.float32).view(len(codes), -1)


FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
FLOAT_SCALES = (torch.float32, torch.bfloat16, torch.float16)
MXFP4_SCALES: tuple[torch.dtype, ...] = (torch.uint8, torch.float8_e8m0fnu)
FP8_SCALES = (*FLOAT_SCALES, *MXFP4_SCALES)
PLAIN_INT8 = (COMPRESSED, torch.int8)
PLAIN_FP4 = ((FP8, torch.int8), (MODELOPT, torch.uint8))

# of activations or the KV cache, which weights do without
_IDLE = re.compile(
    r"(.*_)?(input|activation|prob_output|output|[qkv])(_global)?_(scale|zero_point)|qscale_act"
)
_PART = re.compile(
    r".*(_scale_inv|weight_scale|weight_scale_2|weight_global_scale|weight_shape|weight_zero_point|"
    r"qscale_weight|pre_quant_scale|_scales|_packed|_blocks|g_idx|qweight|qzeros)"
)


def _described(info: TensorInfo) -> str:
    return f"{dtype_name(info.dtype)} of shape {info.shape}"


def _misfit(key: str, info: TensorInfo, wanted: str) -> CheckpointError:
    return CheckpointError(
        f"{key} is {_described(info)}, and wanted is {wanted}: copy the files again, or put the "
        "maker's config.json back."
    )


class PrequantizedCheckpoint(Checkpoint):
    """The 16-bit tensors that the quantized ones of a checkpoint stand for, decoded when read.

    What is `stored` decides: codes with their scales are decoded, tensors of 16 bits or more
    are read as they are, whatever the configuration lists.
    """

    def __init__(
        self, checkpoint: Checkpoint, config: Mapping[str, Any], dtype: torch.dtype
    ) -> None:
        super().__init__(())
        self.stored = checkpoint
        self._maker = MakerConfig(config)
        self.files, self.dtype, self.method = checkpoint.files, dtype, self._maker.method
        self._tensors: dict[str, Quantized] = {}
        self.names: dict[str, str] = {}  # of all, by the keys on disk of plain ones and of codes
        for key, info in self.stored.items():
            if (tensor := self._of_codes(key, info)) is not None:
                self.names[key] = name = self._name(key)
                if name in self._tensors or (name in self.stored and name != key):
                    raise CheckpointError(f"{name} is stored twice, once as {key}: remove one.")
                self._tensors[name] = tensor
        used = {key for tensor in self._tensors.values() for key in tensor.parts.values()}
        # of symmetric codes, or in groups, which are decoded without
        used |= {name + end for name in self._tensors for end in ("_zero_point", "_shape")}
        alone: list[str] = []  # what can only be codes or scales of a quantized weight
        for key, info in self.stored.items():  # in the order of the files
            last = key.rpartition(".")[2]
            if (name := self.names.get(key, "")) in self._tensors:
                shape = self._tensors[name].shape
                nbytes = prod(shape) * dtype.itemsize
                self[name] = replace(info, dtype=dtype, shape=shape, nbytes=nbytes)
            elif key not in used and not _IDLE.fullmatch(last):
                self[key], self.names[key] = info, key
                is_fp8 = info.dtype.itemsize == 1 and info.dtype.is_floating_point
                is_codes = info.dtype in (torch.uint8, torch.int8) and len(info.shape) > 1
                alone += [key] * (is_fp8 or is_codes or bool(_PART.fullmatch(last)))
        if alone:
            key = min(alone, key=lambda key: self.stored[key].dtype.itemsize)  # codes, not scales
            raise CheckpointError(
                f"{key} is {_described(self.stored[key])}, a part of a quantized weight, and the "
                f"other part (codes, or {key}_scale_inv, _scale or .scale) is missing, or does not "
                f"go with it in {self.method}: copy the whole folder, or {ADVICE}."
            )

    def is_dequantized(self, key: str) -> bool:
        return key in self._tensors

    def parts(self, name: str) -> Mapping[str, str]:
        """Return the keys on disk that make a plain tensor, by their role."""
        tensor = self._tensors.get(name)
        return {CODES: name} if tensor is None else tensor.parts

    def read(self, key: str, start: int = 0, stop: int | None = None, device: Any = None) -> Tensor:
        """Read a plain tensor, or its rows [start, stop), decoded on `device` (default: CPU)."""
        return self.fetch(key, start, stop, device)()

    def fetch(
        self, key: str, start: int = 0, stop: int | None = None, device: Any = None
    ) -> Callable[[], Tensor]:
        """Read codes and scales to the host; return what decodes them on the device."""
        tensor = self._tensors.get(key)
        if tensor is None:
            self.info(key)
            return self.stored.fetch(key, start, stop, device)
        first, last, _ = slice(start, stop).indices(tensor.shape[0])
        last, high = max(first, last), 1 if len(tensor.shape) == 3 else tensor.block[0]
        places: dict[str, tuple[int, int | None]] = {CODES: (first, last)}
        if not tensor.one_scale:  # scales of scales, and this one, are read whole
            places[SCALE] = first // high, cdiv(last, high)
        parts = {
            role: self.stored.fetch(part, *places.get(role, (0, None)), device)
            for role, part in tensor.parts.items()
        }
        return lambda: dequantize(
            tensor, {role: part() for role, part in parts.items()}, first, last, self.dtype
        )

    def close(self) -> None:
        self.stored.close()
        super().close()

    def _name(self, key: str) -> str:
        ends = {MXFP4: "_blocks", COMPRESSED: "_packed"}
        return key.removesuffix(ends.get(self.method, ""))

    def _of_codes(self, key: str, info: TensorInfo) -> Quantized | None:
        method, (module, _, last), name = self.method, key.rpartition("."), self._name(key)
        scale = f"{name}_scale" + "s" * (method == MXFP4)
        if name == key:
            scales = [f"{key}_scale_inv", scale]
            scales += [f"{module}.scale", f"{module}.qscale_weight"] * (last == "weight")
            scale = next((one for one in scales if one in self.stored and method != MXFP4), "")
            if scale and (info.dtype in FP8_DTYPES or (method, info.dtype) == PLAIN_INT8):
                blocks = self._maker.blocks
                return self._quantized(key, info.shape, scale, blocks, FP8_SCALES, info.dtype)
            if not scale or (method, info.dtype) not in PLAIN_FP4:
                return None
        elif method == COMPRESSED and info.dtype != torch.uint8:
            return self._of_words(key, scale)
        return self._of_fp4(key, scale)

    def _quantized(
        self,
        key: str,
        shape: tuple[int, ...],
        scale: str,
        blocks: Iterable[Block],
        dtypes: tuple[torch.dtype, ...],
        kind: Kind,
        **others: str,
    ) -> Quantized:
        """Return codes of `shape`, unpacked, whose scales fit one of these blocks and dtypes."""
        info = self._part(scale, key)
        if len(shape) not in (2, 3) or 0 in shape:
            raise _misfit(key, self.stored[key], "codes of shape (out, in) or (experts, out, in)")
        rows, columns = shape[-2:]
        # modelopt keeps dimensions of 1 between; a scale of a tensor may have none
        grid = tuple(size for size in info.shape if size != 1)
        wanted, fitting = [], set()
        for block in blocks:
            high, wide = min(block[0] or rows, rows), min(block[1] or columns, columns)
            scales = (*shape[:-2], cdiv(rows, high), cdiv(columns, wide))
            wanted.append(str(scales))
            one = not grid and (prod(scales) == 1 or block == TENSOR)
            same = grid == tuple(size for size in scales if size != 1)
            same = same and info.shape[:1] == scales[:1]  # rows are read by the first dimension
            if info.dtype in dtypes and (one or same):
                fitting.add((high, wide, one))
        if len(fitting) != 1:
            said = f"{' or '.join(map(dtype_name, dtypes))} of shape {' or '.join(sorted(wanted))}"
            raise _misfit(scale, info, f"scales of {key} of shape {shape}, which are {said}")
        high, wide, one = fitting.pop()
        return Quantized({CODES: key, SCALE: scale, **others}, shape, (high, wide), kind, one)

    def _of_words(self, key: str, scale: str) -> Quantized:
        """Return words of codes; shapes are read from disk only where groups do not tell them."""
        words, known = self.stored[key], self._maker.words
        count, said = (self._part(scale, key).shape or (0,))[-1], f"{self._name(key)}_shape"
        if len(known) == 1 and (group := min(known)[1]):
            shape = (*words.shape[:-1], count * group)
        else:
            self._part(said, key)
            shape = tuple(map(int, self.stored.read(said).flatten().tolist()))
        fitting = [
            (bits, group)
            for bits, group in known
            if words.shape == (*shape[:-1], cdiv(shape[-1], 32 // bits))
            and count == cdiv(shape[-1], group or shape[-1])
        ]
        if len(fitting) != 1 or words.dtype != torch.int32:
            raise _misfit(key, words, f"int32 of codes that {scale} and {said} go with")
        bits, group = fitting[0]
        kind = "int4" if bits == 4 else "words of int8"
        return self._quantized(key, shape, scale, [(1, group)], FLOAT_SCALES, kind)

    def _of_fp4(self, key: str, scale: str) -> Quantized:
        """Return bytes of two codes, whose FP8 scales have a scale; gpt-oss's are transposed."""
        info, turned, others = self.stored[key], self.method == MXFP4, dict[str, str]()
        shape = (*info.shape[:2], prod(info.shape[2:])) if turned else info.shape or (0,)
        shape = (*shape[:-1], shape[-1] * 2)
        if turned and (info.shape[3:] != (MX_BLOCK // 2,) or info.dtype != torch.uint8):
            raise _misfit(key, info, "bytes of shape (experts, rows, groups, 16)")
        wide, dtypes = MX_BLOCK, MXFP4_SCALES
        if self._part(scale, key).dtype == torch.float8_e4m3fn:
            wide, dtypes = 16, (torch.float8_e4m3fn,)
            is_factor = self.method == MODELOPT
            role, end = (FACTOR, "_scale_2") if is_factor else (DIVISOR, "_global_scale")
            others[role] = other = f"{self._name(key)}{end}"
            own = self._part(other, key)
            if prod(own.shape) != 1 or own.dtype not in FLOAT_SCALES:
                raise _misfit(other, own, f"one floating-point value for {key}")
        found = self._quantized(key, shape, scale, [(1, wide)], dtypes, "e2m1", **others)
        shape = (shape[0], shape[2], shape[1]) if turned else shape
        return replace(found, shape=shape, transposed=turned)

    def _part(self, part: str, key: str) -> TensorInfo:
        if part not in self.stored:
            raise CheckpointError(f"{part} is missing, and {key} needs it: copy the whole folder.")
        return self.stored[part]


def open_plain(
    folder: str | Path,
    files: Sequence[Path] | None = None,
    quantization_config: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """Open the tensors of a folder in 16 bits: a `PrequantizedCheckpoint` of a maker's folder.

    Without `files`, those that its index names; without `quantization_config`, that of its
    config.json, or of modelopt's hf_quant_config.json. What is decoded has config.json's dtype,
    bfloat16 where that has none of 16 bits or more.
    """
    folder = Path(folder)
    config, own = _configs(folder)
    own = quantization_config or own
    checkpoint = Checkpoint(files) if files is not None else open_checkpoint(folder)
    try:
        for key, info in checkpoint.items() if own is None else ():
            is_float, ends = info.dtype.is_floating_point, ("_blocks", "_packed")
            if info.dtype.itemsize == 1 if is_float else key.endswith(ends):
                raise CheckpointError(
                    f"{key} is {dtype_name(info.dtype)}, and {CONFIG} has no quantization_config "
                    "that says how it was quantized: put the maker's back."
                )
        if own is None or method_of(own) is None:
            return checkpoint
        inner = config.get("text_config")
        places = (config, inner if isinstance(inner, Mapping) else {})
        said = [_named_dtype(one.get(key)) for one in places for key in ("dtype", "torch_dtype")]
        wide = (one for one in said if one and one.is_floating_point and one.itemsize > 1)
        return PrequantizedCheckpoint(checkpoint, own, next(wide, torch.bfloat16))
    except CheckpointError as error:
        checkpoint.close()
        raise CheckpointError(f"{folder}: {error}") from error


def codes_of_source(config: Any) -> tuple[int | None, str]:
    """Return bytes on disk and a note on the codes of a folder that its maker quantized."""
    name = getattr(config, "name_or_path", "")
    if not name or not any(Path(name).glob("*.safetensors")):
        return None, ""
    try:
        if method_of(_configs(Path(name))[1]) is None:
            return None, ""
        with open_plain(name) as opened:
            assert isinstance(opened, PrequantizedCheckpoint)
            nbytes, count = sum(info.nbytes for info in opened.stored.values()), len(opened.stored)
            return nbytes, (
                f"{sum(map(opened.is_dequantized, opened))} weights of the folder are codes "
                f"({opened.method}), which are dequantized when they are read; its {count} "
                f"tensors take {human_bytes(nbytes)} on disk."
            )
    except CheckpointError as error:
        return None, str(error)


def _configs(folder: Path) -> tuple[Mapping[str, Any], Mapping[str, Any] | None]:
    config = read_json(inside(folder, CONFIG)) if (folder / CONFIG).is_file() else {}
    own = _maker_config(config)
    if own is not None or not (folder / MODELOPT_CONFIG).is_file():
        return config, own
    inner = read_json(inside(folder, MODELOPT_CONFIG)).get("quantization")
    inner = inner if isinstance(inner, dict) else {}
    said = inner.get("quant_algo") or inner.get("quantized_layers")  # else of the KV cache alone
    return config, {**inner, "quant_method": MODELOPT} if said else None


def _named_dtype(name: Any) -> torch.dtype | None:
    dtype = getattr(torch, str(name).removeprefix("torch."), None)
    return dtype if isinstance(dtype, torch.dtype) else None


def describe_plain(config: Any) -> None:
    """Change a transformers configuration to one of the 16-bit folder.

    What the maker said of its quantization goes, of bitsandbytes stays. A dtype that is none to
    compute in (FP8, or none at all) becomes bfloat16, which such folders stand for.
    """
    for part in parts_of(config):
        strip(part)
        dtype = part.get("dtype")
        if dtype is not None and _named_dtype(dtype) is None:
            raise CheckpointError(f"config.json says dtype {dtype!r:.80}, which is no dtype here.")
    config.dtype = config.dtype or torch.bfloat16


def strip(part: dict[str, Any]) -> None:
    """Remove from part of a configuration what its maker said of the quantization."""
    if method_of(part.get(_SETTINGS)) is not None:
        del part[_SETTINGS]
    part.pop("expert_dtype", None)  # of DeepSeek-V4's experts as they lie on disk
    for key in ("dtype", "torch_dtype"):
        said = part.get(key)
        if (dtype := _named_dtype(said)) is not None and dtype.itemsize == 1:
            part[key] = "bfloat16" if isinstance(said, str) else torch.bfloat16
