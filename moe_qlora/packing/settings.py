"""How weights are packed: the fields of a `BitsAndBytesConfig`, and the tensors that result.

0.5625 bytes a weight in 4 bit, 0.5159 with double quantization, and 0.53125 for mxfp4. Decoding
trusts tensors: those from outside pass `problems`.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, cast

import torch
from torch import Tensor

from ..errors import ConfigError
from ..kernels.weights import PackedWeight
from ..layout import dtype_name
from .codecs import Codec, TensorSpec, codec_of, codecs, kinds

BLOCKSIZES = tuple(2**power for power in range(5, 13))  # those of bitsandbytes' kernels
FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
STORAGE_DTYPES = (torch.uint8, torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class CodecSettings:
    """How weights are packed, by a `BitsAndBytesConfig`; the codec fixes some of the fields."""

    kind: str
    double_quant: bool = False  # 4-bit statistics are quantized as well
    storage_dtype: torch.dtype = torch.uint8  # that 4-bit codes are viewed in; int8 for int8
    compute_dtype: torch.dtype | None = None  # None: the activations'; never a decoded tensor's
    blocksize: int = 64  # weights in a first-level block
    skip_modules: tuple[str, ...] = ()  # `llm_int8_skip_modules`
    # of native codes of a checkpoint: codes and blocks run along the decoded weight's columns,
    # whose last two dimensions are swapped in storage
    stored_transposed: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        if self.kind not in kinds():
            raise ValueError(f"kind is {self.kind!r}; expected one of {', '.join(kinds())}")
        for pattern in self.skip_modules:
            try:
                re.compile(f"(?:{pattern})")
            except (re.error, OverflowError, RecursionError) as error:
                raise ConfigError(
                    f"llm_int8_skip_modules holds {pattern!r}, which is no valid pattern: {error}."
                ) from error
        for name, value in self.codec.settle(self).items():
            object.__setattr__(self, name, value)

    @property
    def codec(self) -> Codec:
        return codec_of(self.kind)

    @classmethod
    def from_config(cls, config: Any) -> Self:
        """Read a `BitsAndBytesConfig` or its dict; absent fields have that class's defaults."""

        def get(name: str, default: Any = None) -> Any:
            if isinstance(config, Mapping):
                value = config.get(name, config.get("_" + name))
            else:
                value = getattr(config, name, None)
            return default if value is None else value

        known = isinstance(config, Mapping) or hasattr(config, "load_in_4bit")
        method = get("quant_method", "bitsandbytes" if known else type(config).__name__)
        method = str(getattr(method, "value", method))
        if not method.startswith("bitsandbytes"):
            raise ConfigError(
                f"The quantization config is of the method {method!r}: this package packs experts "
                "with bitsandbytes; give a BitsAndBytesConfig."
            )
        four, eight = bool(get("load_in_4bit", False)), bool(get("load_in_8bit", False))
        if four == eight:
            asked = "both 4 and 8 bit" if four else "neither 4 nor 8 bit"
            raise ConfigError(
                f"The quantization config asks for {asked}: set exactly one of load_in_4bit=True "
                "and load_in_8bit=True."
            )
        given = get("llm_int8_skip_modules", ())
        skips = tuple(given) if isinstance(given, (list, tuple, set, frozenset)) else (None,)
        if not all(isinstance(skip, str) for skip in skips):
            raise ConfigError(f"llm_int8_skip_modules is {given!r}: give a list of module names.")
        if eight and get("llm_int8_has_fp16_weight", False):
            raise ConfigError(
                "llm_int8_has_fp16_weight=True keeps 8-bit weights in 16 bit, so that nothing "
                "would be packed: set it to False."
            )
        by_config = [c for c in codecs() if c.loads_in_8bit == eight and not c.is_kept]
        if eight:
            return cls(by_config[0].kind, skip_modules=skips)
        kind = get("bnb_4bit_quant_type", next(c.kind for c in by_config if c.is_default))
        names = [codec.kind for codec in by_config]
        if kind not in names:
            both = f"{', '.join(map(repr, names[:-1]))} and {names[-1]!r}"
            raise ConfigError(f"bnb_4bit_quant_type is {kind!r}: bitsandbytes knows {both}.")
        storage = _dtype(get, "bnb_4bit_quant_storage", STORAGE_DTYPES)
        compute = _dtype(get, "bnb_4bit_compute_dtype", FLOAT_DTYPES)
        double_quant = bool(get("bnb_4bit_use_double_quant", False))
        return cls(kind, double_quant, storage, compute, skip_modules=skips)

    @classmethod
    def of(cls, packed: PackedWeight) -> Self:
        form = packed.nested is not None, packed.codes.dtype, packed.compute_dtype
        return cls(
            packed.kind, *form, packed.blocksize or 64, stored_transposed=packed.stored_transposed
        )

    def describe(self) -> str:
        """Return the codec in words, such as "nf4 with double quantization"."""
        plain = self.storage_dtype in (torch.uint8, torch.int8)
        stored = "" if plain else f", stored as {dtype_name(self.storage_dtype)}"
        return self.kind + (" with double quantization" if self.double_quant else "") + stored

    def bnb_fields(self) -> dict[str, Any]:
        skips = {"llm_int8_skip_modules": list(self.skip_modules)} if self.skip_modules else {}
        if self.codec.loads_in_8bit:
            return skips | {"load_in_8bit": True}
        return skips | {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": self.kind,
            "bnb_4bit_use_double_quant": self.double_quant,
            "bnb_4bit_quant_storage": self.storage_dtype,
            "bnb_4bit_compute_dtype": self.compute_dtype,
        }

    def to_dict(self) -> dict[str, Any]:
        """Return how a weight is packed as JSON values, under the keys of a folder's manifest."""
        keys = ["kind", "double_quant", "blocksize", "storage_dtype", "compute_dtype"]
        keys += ["stored_transposed"] * self.codec.is_kept
        values = {key: getattr(self, key) for key in keys}
        return {k: dtype_name(v) if isinstance(v, torch.dtype) else v for k, v in values.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Read the result of `to_dict`, or raise ValueError; dtypes may be left out."""
        options = {
            "blocksize": BLOCKSIZES,
            "storage_dtype": (torch.int8, *STORAGE_DTYPES),
            "compute_dtype": (None, *FLOAT_DTYPES),
        }
        fields = dict(values)
        for key in options.keys() & values.keys():
            value = values[key]
            fields[key] = getattr(torch, value, 0) if isinstance(value, str) else value
            if fields[key] not in options[key]:
                raise ValueError(f"{key} is {value!r:.80}; expected one of {options[key]}")
        try:
            return cls(**fields)
        except TypeError as error:
            raise ValueError(str(error)) from error


def _dtype(get: Callable[..., Any], field: str, allowed: Sequence[torch.dtype]) -> torch.dtype:
    value = get(field, allowed[0])
    dtype = getattr(torch, value.removeprefix("torch."), 0) if isinstance(value, str) else value
    if dtype not in allowed:
        raise ConfigError(f"{field} is {value!r}: give one of {', '.join(map(str, allowed))}.")
    return cast(torch.dtype, dtype)


def packed_tensors(shape: Sequence[int], settings: CodecSettings) -> dict[str, TensorSpec]:
    """Return the tensors of a packed weight of this shape, by the end of their key."""
    return settings.codec.tensors(shape, settings)


def packed_nbytes(shape: Sequence[int], settings: CodecSettings) -> int:
    """Return the bytes of a packed weight in memory: codes, statistics and code tables together."""
    stored = sum(spec.nbytes for spec in packed_tensors(shape, settings).values())
    return stored + settings.codec.constant_nbytes(settings)


def why_not(weight: Tensor, settings: CodecSettings) -> str | None:
    """Return why this tensor cannot be packed, to follow its name in a sentence; None if it can."""
    plain = weight.detach()
    if hasattr(weight, "ds_id") or hasattr(weight, "ds_status"):
        return "is partitioned by DeepSpeed ZeRO-3: pack the model before DeepSpeed takes it over"
    if type(plain) is not Tensor:
        kind = type(plain).__name__
        return f"is a {kind} and no plain tensor: pack it before it is sharded, packed or traced"
    if plain.is_meta:
        return "is on the meta device and has no values: load the weights first"
    return why_not_packed(plain.shape, plain.dtype, settings)


def why_not_packed(
    shape: Sequence[int], weight_dtype: torch.dtype, settings: CodecSettings
) -> str | None:
    """Return the same from shape and dtype alone."""
    if weight_dtype not in FLOAT_DTYPES:
        dtype = dtype_name(weight_dtype)
        if weight_dtype.is_floating_point and weight_dtype.itemsize > 1:
            return f"is {dtype}: bitsandbytes packs float32, float16 and bfloat16; cast it first"
        return (
            f"is {dtype}, so that it is packed already by another tool or is no weight: "
            "dequantize it to float32, float16 or bfloat16 first"
        )
    numel = math.prod(shape)
    if len(shape) < 2 or numel == 0:
        return f"has the shape {tuple(shape)}: a weight has two or more dimensions and no empty one"
    return settings.codec.why_not(shape, settings)


def problems(
    tensors: Mapping[str, Tensor], shape: Sequence[int], settings: CodecSettings,
    dtype: torch.dtype | None = None,
) -> Iterator[str]:  # fmt: skip
    """Yield faults of a packed weight's tensors, by the end of their key, to follow its name.

    `shape` and `dtype` are those of the decoded weight; None: any that a record may say. Values are
    not looked at where a tensor is on meta or sharded.
    """
    specs = packed_tensors(shape, settings)
    sound = True
    for end, spec in specs.items():
        tensor = tensors.get(end)
        form = None if tensor is None else (tensor.dtype, tuple(tensor.shape))
        if form is None or form[0] != spec.dtype or spec.shape not in (None, form[1]):
            sound = False
            seen = "nothing" if form is None else f"{dtype_name(form[0])} of shape {form[1]}"
            yield (
                f"has {seen} as its {end or 'codes'}; a weight of shape {tuple(shape)} has "
                f"{dtype_name(spec.dtype)} of shape {spec.shape or '(any,)'} there"
            )
    for end in sorted(tensors.keys() - specs.keys()):
        sound = False
        yield f"has {end}, which a weight packed with {settings.to_dict()} has not"
    if sound and not any(t.is_meta or hasattr(t, "device_mesh") for t in tensors.values()):
        yield from settings.codec.value_problems(tensors, shape, settings, dtype)
