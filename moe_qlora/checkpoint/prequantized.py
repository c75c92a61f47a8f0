"""Folders that their makers quantized, read as the 16-bit folders that they stand for.

    MakerConfig             a `quantization_config`: schemes, targets, modules not converted
    Quantized, dequantize   how one plain tensor is stored; codes times scales, in pieces
    PrequantizedCheckpoint  a `Checkpoint` of the plain tensors that stored ones make
    open_plain              any folder in 16 bits; config.json, as that of the 16-bit folder

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
https://github.com/NVIDIA/Model-Optimizer, modelopt/torch/quantization/qtensor/nvfp4_tensor.py and
modelopt/torch/export/convert_hf_config.py (quant_algo, exclude_modules, quantized_layers). Of the
configuration: transformers' utils/quantization_config.py and should_convert_module;
compressed-tensors' quantization/quant_config.py and utils/match.py (groups, targets, ignore).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import translate
from functools import partial
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked
from torch import Tensor

from ..errors import CheckpointError
from ..kernels.limits import cdiv
from ..kernels.weights import MX_BLOCK, TABLES
from ..layout import dtype_name, human_bytes
from ..models.files import check_patterns, read_json
from .manifest import CONFIG, open_checkpoint
from .reader import Checkpoint, TensorInfo, inside

FP8, MXFP8, MXFP4 = "fp8", "mxfp8", "mxfp4"
COMPRESSED, MODELOPT = "compressed-tensors", "modelopt"
METHODS = (FP8, MXFP8, MXFP4, COMPRESSED, MODELOPT)

FLOAT, INT = "float", "int"

Block = tuple[int | None, int | None]
TENSOR: Block = (None, None)
CHANNEL: Block = (1, None)

ADVICE = "name the model's 16-bit checkpoint instead"


@dataclass(frozen=True)
class Scheme:
    """How a group of weights is stored."""

    kind: str  # `FLOAT` or `INT`
    bits: int  # of a code
    blocks: tuple[Block, ...]  # rows and columns of one scale, any of these; None: all of them
    setting: str  # what the configuration says, for messages
    nested: bool = False  # FP8 scales have a scale of their own, as in NVFP4


Groups = Iterator[tuple[Iterable[str] | None, Scheme]]


def maker_method(config: Mapping[str, Any]) -> str | None:
    """Return the method of a maker's config.json; None for 16 bits and for bitsandbytes."""
    return method_of(maker_config(config))


def maker_config(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the `quantization_config` of a config.json, or that of its text model."""
    for place in (config, config.get("text_config")):
        if isinstance(place, Mapping) and place.get("quantization_config"):
            return _parse(_Mapping, place["quantization_config"])
    return None


def method_of(own: Any) -> str | None:
    """Return the method of a `quantization_config`, as `maker_method` does of a config.json."""
    own = own.to_dict() if hasattr(own, "to_dict") else own
    if not isinstance(own, Mapping) or not own:
        return None
    method = str(own.get("quant_method") or "").lower()
    if method.startswith("bitsandbytes") or own.get("load_in_4bit") or own.get("load_in_8bit"):
        return None
    unnamed = not method and ("quant_algo" in own or own.get("quant_library") == MODELOPT)
    if unnamed or method.startswith(MODELOPT):  # modelopt_fp4 and others are names of vLLM
        return MODELOPT
    return method or "no quant_method"


_SKIPPED = r"(?:{})(?:(?<=\.)|(?=\.|$))"  # transformers' should_convert_module


class MakerConfig:
    """A `quantization_config` of a method that is read; what is not read is refused by name."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.method = method_of(config) or "bitsandbytes"
        if self.method not in METHODS:
            raise _unread(self.method, f"read are {', '.join(METHODS)}")
        inner = config.get("quantization")
        inner = config if inner is None else _parse(_Mapping, inner, "quantization")
        self._ignored: dict[str, re.Pattern[str] | None] = {}
        for key in ("ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules"):
            for name in _parse(list[str], {**config, **inner}.get(key) or (), key):
                pattern = None
                if self.method == COMPRESSED:
                    pattern = _pattern(name) if name.startswith("re:") else None
                else:
                    own = translate(name) if self.method == MODELOPT else _SKIPPED.format(name)
                    with suppress(re.error):
                        pattern = re.compile(own)
                self._ignored[name] = pattern
        self._by_name: dict[str, Scheme] = {}
        self._by_pattern: list[tuple[re.Pattern[str], Scheme]] = []
        self._default: Scheme | None = None
        groups: Groups = iter(())  # MXFP4 has one layout
        if self.method == COMPRESSED:
            groups = _compressed_groups(config)
        elif self.method == MODELOPT:
            groups = _modelopt_groups(inner)
        elif self.method != MXFP4:
            blocks: tuple[Block, ...] = (TENSOR, CHANNEL)
            if (size := config.get("weight_block_size")) is not None:
                blocks = (_parse(_Pair, size, "weight_block_size"),)
            elif "weight_block_size" not in config:
                # transformers takes 128 x 128, vLLM one for a tensor
                blocks = ((1, 32),) if self.method == MXFP8 else ((128, 128), *blocks)
            groups = iter([(None, Scheme(FLOAT, 8, blocks, f"weight_block_size {size}"))])
        for targets, scheme in groups:
            for target in targets or ("Linear",):
                if target.startswith("re:"):
                    self._by_pattern.append((_pattern(target), scheme))
                elif re.fullmatch(r"[A-Z]\w*", target):
                    self._default = self._default or scheme
                else:
                    self._by_name.setdefault(target, scheme)

    def check_patterns(self, modules: Iterable[str]) -> None:
        """Raise where a pattern of the configuration may run for ever on these modules' names."""
        found = [pattern for pattern, _ in self._by_pattern]
        if self.method != MODELOPT:  # whose names are globs
            found += filter(None, self._ignored.values())
        check_patterns([one.pattern for one in found], modules, "quantization_config")

    def scheme(self, module: str) -> Scheme | None:
        """Return the scheme of a module's weights; None where no group is for it.

        A group that names the module goes before one whose pattern it matches, and that before one
        of a class, such as Linear, which modules on disk are not told by.
        """
        matches = (scheme for pattern, scheme in self._by_pattern if pattern.match(module))
        return self._by_name.get(module) or next(matches, self._default)

    def is_ignored(self, module: str) -> bool:
        """Whether the configuration says that a module is not converted."""
        is_named: Callable[[str, str], bool] = {
            COMPRESSED: str.__eq__,
            MODELOPT: lambda module, name: module.startswith(f"{name}."),
        }.get(self.method, str.endswith)
        return any(
            is_named(module, name) or (pattern is not None and pattern.match(module) is not None)
            for name, pattern in self._ignored.items()
        )


def _pattern(target: str) -> re.Pattern[str]:
    try:
        return re.compile(target.removeprefix("re:"))
    except re.error as error:
        raise _unread(f"{target!r:.80}", f"no regular expression: {error}") from error


_Mapping = dict[str, Any]
_Size = Annotated[int, Field(strict=True, ge=1)]
_Pair = tuple[_Size, _Size]


def _parse(kind: Any, value: Any, place: str = "") -> Any:
    """Return a setting as a type that pydantic checks; `place` is its path in the configuration."""
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = ".".join(str(part) for part in (place, *first["loc"]) if part != "")
        raise _unread(f"{path} {first['input']!r:.80}".lstrip(), first["msg"]) from error


def _unread(setting: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"quantization_config says {setting}, which is not read here ({why}): {ADVICE}."
    )


def _sizes(text: Any) -> Any:
    if not isinstance(text, str):
        return text
    return [int(n) if n.isdigit() else n for n in text.split("x")]


@checked(frozen=True)
class _Weights:
    type: Annotated[Literal["int", "float"], BeforeValidator(lambda v: str(v).lower())] = "int"
    num_bits: Literal[4, 8] = 8
    symmetric: Literal[True] | None = None
    # "weight", or "static", stores columns in order
    actorder: Literal["weight", "static", False] | None = None
    strategy: Literal["tensor", "channel", "group", "tensor_group", "block"] | None = None
    group_size: Annotated[int, Field(strict=True)] | None = None
    block_structure: Annotated[_Pair | None, BeforeValidator(_sizes)] = None


@checked(frozen=True)
class _Group:
    weights: Annotated[_Weights | None, BeforeValidator(lambda v: v or None)] = None
    targets: list[str] | None = None


@checked(frozen=True)
class _Compressed:
    config_groups: dict[str, _Group] | None = None
    sparsity_config: _Mapping | None = None
    transform_config: _Mapping | None = None


def _compressed_groups(config: Mapping[str, Any]) -> Groups:
    own: _Compressed = _parse(_Compressed, config)
    for key, value in (
        ("sparsity_config.format", (own.sparsity_config or {}).get("format", "dense") or "dense"),
        ("transform_config.config_groups", (own.transform_config or {}).get("config_groups")),
    ):
        if value and value != "dense":
            raise _unread(f"{key} {value!r:.80}", "weights are stored otherwise")
    for name, group in (own.config_groups or {}).items():
        if group.weights is None:
            continue
        weights, place = group.weights, f"config_groups.{name}.weights"
        kind, bits, asked = weights.type, weights.num_bits, weights.group_size
        per = "tensor" if asked is None else "channel" if asked == -1 else "group"
        strategy = weights.strategy or per
        nested = strategy == "tensor_group"  # NVFP4's
        if nested and (kind, bits) != (FLOAT, 4):
            raise _unread(f"{place}.strategy {strategy!r}", f"of {bits} bits of type {kind}")
        if strategy == "block":
            block: Block = _parse(_Pair, weights.block_structure, f"{place}.block_structure")
        elif strategy in ("group", "tensor_group"):
            block = (1, _parse(_Size, asked, f"{place}.group_size"))
        else:
            block = CHANNEL if strategy == "channel" else TENSOR
        said = f"{place} ({kind}, {bits} bits, {strategy} {'' if asked is None else asked}"
        yield group.targets, Scheme(kind, bits, (block,), f"{said.rstrip()})", nested)


_FP8_ALGORITHMS: dict[str, tuple[Block, ...]] = {
    "FP8": (TENSOR, CHANNEL),
    "FP8_PER_CHANNEL_PER_TOKEN": (CHANNEL,),
    "FP8_PB": ((128, 128),),
    "FP8_PB_WO": ((128, 128),),
    "MXFP8": ((1, 32),),
}
_FP4_ALGORITHMS = ("NVFP4", "NVFP4_W4A16", "W4A16_NVFP4")


def _modelopt_groups(config: Mapping[str, Any]) -> Groups:
    layers = _parse(dict[str, _Mapping], config.get("quantized_layers") or {}, "quantized_layers")
    for module, entry in layers.items():
        yield (module,), _modelopt_scheme(entry, f"quantized_layers.{module}.quant_algo")
    if not layers or str(config.get("quant_algo")).upper() != "MIXED_PRECISION":
        yield None, _modelopt_scheme(config, "quant_algo")


def _modelopt_scheme(entry: Mapping[str, Any], place: str) -> Scheme:
    name = str(entry.get("quant_algo")).upper()
    if name in _FP4_ALGORITHMS:
        size = _parse(_Size, entry.get("group_size") or 16, f"{place}, group_size")
        return Scheme(FLOAT, 4, ((1, size),), f"{place} {name}", nested=True)
    if name in _FP8_ALGORITHMS:
        return Scheme(FLOAT, 8, _FP8_ALGORITHMS[name], f"{place} {name}")
    raise _unread(f"{place} {entry.get('quant_algo')!r:.80}", "it is not known")


PIECE = 1 << 20
"""Most values that are in fp32 at a time on the CPU, in whose cache they stay; on other devices it
is four times as many, which start fewer kernels."""

CODES, SCALE, FACTOR, DIVISOR, SHAPE = "codes", "scale", "factor", "divisor", "shape"
"""Roles of stored tensors: scales of scales are multiplied (factor) or divided by (divisor)."""


@dataclass(frozen=True)
class Quantized:
    """How one plain tensor is stored."""

    parts: Mapping[str, str]  # keys on disk by role; `CODES` is the one that it is known by
    shape: tuple[int, ...]  # plain: (rows, columns) or (experts, rows, columns)
    block: tuple[int, int]  # rows and columns of the matrix of codes that share a scale
    unpack: Callable[[Tensor], Tensor]  # codes (r, any width) -> fp32 values (r, columns or more)
    one_scale: bool = False  # a single scale belongs to all of the tensor
    transposed: bool = False  # the plain tensor has the codes' rows as its last dimension

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


class PrequantizedCheckpoint(Checkpoint):
    """The plain tensors that the quantized ones of a checkpoint stand for, read-only.

    Keys, shapes and dtypes are those of the 16-bit checkpoint. A tensor, or rows of it, is decoded
    when it is read: in fp32, in pieces, with one rounding. `disk` is what lies there.

    That decides: codes with their scales are decoded, tensors of 16 bits or more are read as they
    are, whatever the configuration lists. It says how codes are laid out, and of which modules
    bytes are no codes and a tensor called scale is a weight.
    """

    def __init__(
        self, checkpoint: Checkpoint, config: Mapping[str, Any], dtype: torch.dtype
    ) -> None:
        super().__init__(())
        self.stored: dict[str, TensorInfo] = {key: checkpoint.info(key) for key in checkpoint}
        try:
            maker = MakerConfig(config)
        except CheckpointError as error:
            infos = self.stored.items()
            named = (f"; {key} is one of its tensors" for key, i in infos if not _is_wide(i.dtype))
            said = str(error).removesuffix(".") + next(named, "")
            raise CheckpointError(f"{said}.") from error
        maker.check_patterns({key.rpartition(".")[0] for key in self.stored})
        self.files, self.dtype, self.method = checkpoint.files, dtype, maker.method
        self.disk, self._maker = checkpoint, maker
        self._tensors: dict[str, Quantized] = {}
        for key, info in self.stored.items():
            if (tensor := self._of_codes(key, info)) is not None:
                name = self._name(key)
                if name in self._tensors or (name in self.stored and name != key):
                    raise CheckpointError(f"{name} is stored twice, once as {key}: remove one.")
                self._tensors[name] = tensor
        used = {key for tensor in self._tensors.values() for key in tensor.parts.values()}
        plain = [key for key in self.stored if key not in used and not self._is_idle(key)]
        codes = list(filter(self._holds_codes, plain))
        for key in (*codes, *filter(self._is_scale, plain)):
            raise CheckpointError(
                f"{key} is {described(self.stored[key])}, a part of a quantized weight, and "
                f"{self._other(key, key in codes)} is missing, or does not go with it in "
                f"{maker.method}: copy the whole folder, or {ADVICE}."
            )
        self._names = {key: key for key in plain}
        self._names |= {tensor.parts[CODES]: name for name, tensor in self._tensors.items()}
        for key, info in self.stored.items():  # in the order of the files
            if key in self._names:
                name = self._names[key]
                shape = self._tensors[name].shape if name in self._tensors else None
                nbytes = prod(shape or ()) * dtype.itemsize
                self._infos[name] = (
                    replace(info, dtype=dtype, shape=shape, nbytes=nbytes) if shape else info
                )

    def _stored_shape(self, key: str) -> tuple[int, ...]:
        info = self.stored[key]
        if info.dtype not in (torch.int32, torch.int64) or info.shape not in ((2,), (3,)):
            raise CheckpointError(
                f"{key} is {described(info)}, which is no shape of a weight: copy the file again."
            )
        return tuple(int(size) for size in self.disk.read(key).tolist())

    def plain_name(self, stored_key: str) -> str | None:
        """Return the plain name of a tensor on disk; None for what only goes with one."""
        return self._names.get(stored_key)

    def is_dequantized(self, name: str) -> bool:
        """Whether a plain tensor is decoded from codes."""
        return name in self._tensors

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
            return self.disk.fetch(key, start, stop, device)
        start, stop, _ = slice(start, stop).indices(tensor.shape[0])
        stop = max(start, stop)
        if SHAPE in tensor.parts:
            shape = self._stored_shape(tensor.parts[SHAPE])
            if shape != tensor.shape:
                raise CheckpointError(
                    f"{tensor.parts[SHAPE]} says {shape}, and {tensor.parts[CODES]} and its scales "
                    f"are of {tensor.shape}: copy the files again."
                )
        parts = {
            role: self.disk.fetch(part, *tensor.rows(role, start, stop), device)
            for role, part in tensor.parts.items()
            if role != SHAPE
        }
        return lambda: dequantize(
            tensor, {role: part() for role, part in parts.items()}, start, stop, self.dtype
        )

    def close(self) -> None:
        """Close the files."""
        self.disk.close()
        super().close()

    def _name(self, key: str) -> str:
        ends = {MXFP4: "_blocks", COMPRESSED: "_packed"}
        return key.removesuffix(ends.get(self._maker.method, ""))

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
            for tensor in self._tensors.values()
        )
        like = next((f"{module}.{end[role]}" for end in ends if last in end.values()), None)
        if not is_codes:
            return like or "the other part"
        end = "_scale_inv" if self._maker.method in (FP8, MXFP8) else "_scale"
        return self._scale_of(key) or like or f"{key}{end}"

    def _of_codes(self, key: str, info: TensorInfo) -> Quantized | None:
        method, last = self._maker.method, key.rpartition(".")[2]
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
        shape = (
            (*words.shape[:-1], (scales or (0,))[-1] * group) if group else self._stored_shape(said)
        )
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
        is_factor = self._maker.method == MODELOPT
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
        scheme = self._maker.scheme(key.rpartition(".")[0])
        if scheme is None or scheme.kind != kind or scheme.bits not in (bits or scheme.bits,):
            said = "no group of it is for them" if scheme is None else f"it says {scheme.setting}"
            what = kind if bits is None else f"{kind}, {bits} bits"
            raise CheckpointError(
                f"{key} holds codes ({what}) that quantization_config ({self._maker.method}) does "
                f"not tell of: {said}; put the maker's config.json back."
            )
        return scheme

    def _is_idle(self, key: str) -> bool:
        """Whether a tensor that is no part is for activations, or the zero points of 0 of codes."""
        last = key.rpartition(".")[2]
        if last in _ACTIVATIONS or last.endswith(_ACTIVATION_ENDS):
            return True
        return last.endswith("_zero_point") and key.removesuffix("_zero_point") in self._tensors

    def _holds_codes(self, key: str) -> bool:
        info, (module, _, last) = self.stored[key], key.rpartition(".")
        if info.dtype.is_floating_point:
            return info.dtype.itemsize == 1 and info.dtype != torch.float8_e8m0fnu
        is_bytes = info.dtype in (torch.int8, torch.uint8) and len(info.shape) > 1
        is_codes = is_bytes and not last.endswith(_SCALES)
        is_codes = is_codes or last.endswith(("_packed", "_blocks"))
        return is_codes and not self._maker.is_ignored(module)

    def _is_scale(self, key: str) -> bool:
        module, _, last = key.rpartition(".")
        is_exponent = self.stored[key].dtype == torch.float8_e8m0fnu
        return is_exponent or (last.endswith(_SCALES) and not self._maker.is_ignored(module))


def _is_wide(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize > 1


MODELOPT_CONFIG = "hf_quant_config.json"
"""What modelopt writes beside config.json; a 16-bit folder has none."""

_SETTINGS = "quantization_config"
_STORED_DTYPE = "expert_dtype"
"""Of DeepSeek-V4's experts as they lie on disk."""


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
        if own is None:
            for key in checkpoint:
                kind = checkpoint.info(key).dtype
                base = key.removesuffix("_blocks").removesuffix("_packed")
                scaled = f"{base}_scales" in checkpoint or f"{base}_scale" in checkpoint
                is_float8 = kind.is_floating_point and not _is_wide(kind)
                if is_float8 or (base != key and scaled):
                    raise CheckpointError(
                        f"{key} is {dtype_name(kind)}, and {CONFIG} has no quantization_config "
                        "that says how it was quantized: put the maker's back."
                    )
        if own is None or method_of(own) is None:
            return checkpoint
        return PrequantizedCheckpoint(checkpoint, own, _dtype(config))
    except CheckpointError as error:
        checkpoint.close()
        raise CheckpointError(f"{folder}: {error}") from error


def unread_method(folder: str | Path) -> str:
    """Return why a folder's `quantization_config` is not read; "" where it is, or there is none."""
    _, own = _configs(Path(folder))
    if own is None or method_of(own) is None:
        return ""
    try:
        MakerConfig(own)
    except CheckpointError as error:
        return str(error)
    return ""


def codes_of_source(config: Any) -> tuple[int | None, str]:
    """Return the bytes of the folder that a transformers configuration is of, and a note on it.

    Nothing where the maker of the folder did not quantize it, or it has no safetensors files; a
    note alone where it is not read.
    """
    name = getattr(config, "name_or_path", "")
    folder = Path(name)
    if not name or not folder.is_dir() or not any(folder.glob("*.safetensors")):
        return None, ""
    if described_method(config) is None and not (folder / MODELOPT_CONFIG).is_file():
        return None, ""
    try:
        with open_plain(folder) as checkpoint:
            if not isinstance(checkpoint, PrequantizedCheckpoint):
                return None, ""
            nbytes = sum(info.nbytes for info in checkpoint.stored.values())
            return nbytes, (
                f"{sum(map(checkpoint.is_dequantized, checkpoint))} weights of the folder are "
                f"codes ({checkpoint.method}), which are dequantized when they are read; its "
                f"{len(checkpoint.stored)} tensors take {human_bytes(nbytes)} on disk."
            )
    except CheckpointError as error:
        return None, str(error)


def _configs(folder: Path) -> tuple[Mapping[str, Any], Mapping[str, Any] | None]:
    config = read_json(inside(folder, CONFIG)) if (folder / CONFIG).is_file() else {}
    own = maker_config(config)
    if own is not None or not (folder / MODELOPT_CONFIG).is_file():
        return config, own
    inner = read_json(inside(folder, MODELOPT_CONFIG)).get("quantization")
    inner = inner if isinstance(inner, dict) else {}
    if not (inner.get("quant_algo") or inner.get("quantized_layers")):
        return config, None  # only the KV cache is quantized
    return config, {**inner, "quant_method": MODELOPT}


def _named_dtype(name: Any) -> torch.dtype | None:
    dtype = getattr(torch, str(name).removeprefix("torch."), None)
    return dtype if isinstance(dtype, torch.dtype) else None


def _dtype(config: Mapping[str, Any]) -> torch.dtype:
    inner = config.get("text_config")
    places = (config, inner if isinstance(inner, Mapping) else {})
    named = (_named_dtype(one.get(key)) for one in places for key in ("dtype", "torch_dtype"))
    return next((dtype for dtype in named if dtype and _is_wide(dtype)), torch.bfloat16)


def describe_plain(config: Any) -> None:
    """Change a transformers configuration to one of the 16-bit folder.

    What the maker said of its quantization goes from it and its parts; what is said of bitsandbytes
    stays. A dtype that is none to compute in (FP8, or none at all) becomes bfloat16, which such
    folders stand for.
    """
    for part in _parts(config):
        if method_of(getattr(part, _SETTINGS, None)) is not None:
            delattr(part, _SETTINGS)
        part.__dict__.pop(_STORED_DTYPE, None)
        dtype = getattr(part, "dtype", None)
        dtype = getattr(torch, dtype, dtype) if isinstance(dtype, str) else dtype
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise CheckpointError(
                f"config.json says dtype {dtype!r:.80}, which is no dtype of torch: put the "
                "maker's config.json back."
            )
        if (dtype is None and part is config) or (dtype is not None and dtype.itemsize == 1):
            part.dtype = torch.bfloat16


def described_method(config: Any) -> str | None:
    """Return by what method its maker quantized, as a transformers configuration or part says."""
    methods = (method_of(getattr(part, _SETTINGS, None)) for part in _parts(config))
    return next((method for method in methods if method is not None), None)


def _parts(config: Any) -> list[Any]:
    parts = [getattr(config, name, None) for name in config.sub_configs]
    return [config, *(part for part in parts if part is not None)]


def plain_json(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of the 16-bit folder, given that of the quantized one."""
    plain = copy.deepcopy(dict(config))
    for part in json_parts(plain):
        if method_of(part.get(_SETTINGS)) is not None:
            del part[_SETTINGS]
        part.pop(_STORED_DTYPE, None)
        for key in ("dtype", "torch_dtype"):
            dtype = _named_dtype(part.get(key))
            if dtype is not None and dtype.itemsize == 1:
                part[key] = dtype_name(torch.bfloat16)
    return plain


def json_parts(value: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a configuration, and the configurations in it."""
    yield value
    for inner in list(value.values()):
        if isinstance(inner, dict):
            yield from json_parts(inner)
