"""Which of a `BitsAndBytesConfig`'s fields decide how a weight is packed.

The config is read by its attributes or keys, so that nothing here needs transformers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import ConfigError
from ..kernels.weights import PackedWeight
from ..layout import dtype_name
from .codecs import Codec, PackingFormat, codec_of, codecs, kinds

BLOCKSIZES = tuple(2**power for power in range(5, 13))  # those of bitsandbytes' kernels
FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
STORAGE_DTYPES = (torch.uint8, torch.float16, torch.bfloat16, torch.float32)

_FLOAT_NAMES = {dtype_name(dtype): dtype for dtype in FLOAT_DTYPES}
_STORAGE_NAMES = {dtype_name(dtype): dtype for dtype in (torch.int8, *STORAGE_DTYPES)}


@dataclass(frozen=True)
class CodecSettings(PackingFormat):
    """How weights are packed, and which are not: what of a `BitsAndBytesConfig` decides it.

    `skip_modules` are its `llm_int8_skip_modules`. What a codec forces is set, whatever is given.
    """

    skip_modules: tuple[str, ...] = ()

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
        """What packs and decodes."""
        return codec_of(self.kind)

    @classmethod
    def from_config(cls, config: Any) -> CodecSettings:
        """Read a `BitsAndBytesConfig` or its dict; absent fields have that class's defaults.

        A config that cannot be followed is a `ConfigError`.
        """
        if isinstance(config, type):
            raise ConfigError(
                f"The quantization config is the class {config.__name__}: give an instance of it."
            )

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
        skips = get("llm_int8_skip_modules", ())
        listed = isinstance(skips, (list, tuple, set, frozenset))
        if not listed or not all(isinstance(skip, str) for skip in skips):
            raise ConfigError(f"llm_int8_skip_modules is {skips!r}: give a list of module names.")
        skips = tuple(skips)
        if eight and get("llm_int8_has_fp16_weight", False):
            raise ConfigError(
                "llm_int8_has_fp16_weight=True keeps 8-bit weights in 16 bit, so that nothing "
                "would be packed: set it to False."
            )
        by_config = [c for c in codecs() if c.loads_in_8bit == eight and not c.is_kept]
        if eight:
            return cls(by_config[0].kind, skip_modules=skips)
        kind = get("bnb_4bit_quant_type", next(c.kind for c in by_config if c.is_default))
        names = [repr(codec.kind) for codec in by_config]
        if repr(kind) not in names:
            both = f"{', '.join(names[:-1])} and {names[-1]}"
            raise ConfigError(f"bnb_4bit_quant_type is {kind!r}: bitsandbytes knows {both}.")
        storage = _dtype(get, "bnb_4bit_quant_storage", STORAGE_DTYPES)
        compute = _dtype(get, "bnb_4bit_compute_dtype", FLOAT_DTYPES)
        double_quant = bool(get("bnb_4bit_use_double_quant", False))
        return cls(kind, double_quant, storage, compute, skip_modules=skips)

    @classmethod
    def of(cls, packed: PackedWeight) -> CodecSettings:
        """Return how this weight was packed, so that another can be packed the same way."""
        return cls(packed.kind, **codec_of(packed.kind).fields_of(packed))

    def describe(self) -> str:
        """Return the codec in words, such as "nf4 with double quantization"."""
        parts = [self.kind, " with double quantization" if self.double_quant else ""]
        if self.storage_dtype not in (torch.uint8, torch.int8):
            parts.append(f", stored as {dtype_name(self.storage_dtype)}")
        return "".join(parts)

    def bnb_fields(self) -> dict[str, Any]:
        """Return the arguments of the `BitsAndBytesConfig` that asks for this."""
        skips = {"llm_int8_skip_modules": list(self.skip_modules)} if self.skip_modules else {}
        if self.codec.loads_in_8bit:
            return {"load_in_8bit": True, **skips}
        return skips | {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": self.kind,
            "bnb_4bit_use_double_quant": self.double_quant,
            "bnb_4bit_quant_storage": self.storage_dtype,
            "bnb_4bit_compute_dtype": self.compute_dtype,
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as JSON values, under the keys of a packed folder's manifest.

        `skip_modules` are not among them: they do not say how a weight is packed.
        """
        compute = self.compute_dtype
        return {
            "kind": self.kind,
            "double_quant": self.double_quant,
            "blocksize": self.blocksize,
            "storage_dtype": dtype_name(self.storage_dtype),
            "compute_dtype": None if compute is None else dtype_name(compute),
            **({"stored_transposed": self.stored_transposed} if self.codec.is_kept else {}),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CodecSettings:
        """Read what `to_dict` gave, or raise ValueError; the two dtypes may be left out."""
        options: dict[str, tuple[Any, ...]] = {
            "kind": kinds(),
            "double_quant": (False, True),
            "storage_dtype": tuple(_STORAGE_NAMES),
            "compute_dtype": (None, *_FLOAT_NAMES),
            "stored_transposed": (False, True),
        }
        absent = {"storage_dtype": "uint8", "compute_dtype": None, "stored_transposed": False}
        values = {**absent, **values}
        missing = [key for key in ("blocksize", *options) if key not in values]
        if missing:
            raise ValueError(f"{missing[0]} is missing")
        for key, allowed in options.items():
            value = values[key]
            if not any(value == one and type(value) is type(one) for one in allowed):
                shown = ", ".join(map(repr, allowed))
                raise ValueError(f"{key} is {value!r:.80}; expected one of {shown}")
        blocksize, compute = values["blocksize"], values["compute_dtype"]
        if type(blocksize) is not int or blocksize not in BLOCKSIZES:
            raise ValueError(
                f"blocksize is {blocksize!r:.80}; expected a power of two from 32 to 4096"
            )
        compute_dtype = None if compute is None else _FLOAT_NAMES[compute]
        storage = _STORAGE_NAMES[values["storage_dtype"]]
        return cls(
            values["kind"], values["double_quant"], storage, compute_dtype, blocksize,
            stored_transposed=values["stored_transposed"],
        )  # fmt: skip


def _dtype(get: Callable[..., Any], field: str, allowed: Sequence[torch.dtype]) -> torch.dtype:
    """Read a dtype, of which the first one allowed is the default."""
    value = get(field, allowed[0])
    dtype: Any = (
        getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else value
    )
    if dtype not in allowed:
        raise ConfigError(f"{field} is {value!r}: give one of {', '.join(map(str, allowed))}.")
    return dtype
