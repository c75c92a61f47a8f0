"""Which of a `BitsAndBytesConfig`'s fields decide how a weight is packed.

The config is read by its attributes or keys, so that nothing here needs transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import ConfigError

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
STORAGE_DTYPES = (torch.uint8, torch.float16, torch.bfloat16, torch.float32)


def _dtype(value: Any, name: str) -> torch.dtype:
    dtype = getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else value
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(
            f"{name} is {value!r}, which is no torch dtype: give one such as torch.bfloat16."
        )
    return dtype


@dataclass(frozen=True)
class CodecSettings:
    """What of a `BitsAndBytesConfig` decides how a weight is packed.

    Attributes:
        kind: "nf4", "fp4" or "int8".
        double_quant: Whether the 4-bit statistics are quantized as well.
        storage_dtype: The dtype that the 4-bit codes are viewed in; it holds bytes, not numbers.
        compute_dtype: What this package computes in; None leaves it to the activations. It never
            changes what a decoded tensor's dtype is.
        blocksize: Weights to a first-level block.
        skip_modules: The caller's `llm_int8_skip_modules`.
    """

    kind: str
    double_quant: bool = False
    storage_dtype: torch.dtype = torch.uint8
    compute_dtype: torch.dtype | None = None
    blocksize: int = 64
    skip_modules: tuple[str, ...] = ()

    @classmethod
    def from_config(cls, config: Any) -> CodecSettings:
        """Read a `BitsAndBytesConfig` or its dict; absent fields have that class's defaults.

        Raises:
            ConfigError: The config is of another method, asks for neither 4 nor 8 bit, or has a
                field that bitsandbytes does not know.
        """
        if isinstance(config, type):
            raise ConfigError(
                f"The quantization config is the class {config.__name__}: give an instance of it."
            )
        if not isinstance(config, Mapping) and not hasattr(config, "load_in_4bit"):
            method = getattr(config, "quant_method", None)
            _refuse_method(method if method is not None else type(config).__name__)

        def get(name: str, default: Any = None) -> Any:
            if isinstance(config, Mapping):
                value = config.get(name, config.get("_" + name))
            else:
                value = getattr(config, name, None)
            return default if value is None else value

        method = get("quant_method")
        if method is not None:
            _refuse_method(method)
        four, eight = bool(get("load_in_4bit", False)), bool(get("load_in_8bit", False))
        if four == eight:
            asked = "both 4 and 8 bit" if four else "neither 4 nor 8 bit"
            raise ConfigError(
                f"The quantization config asks for {asked}: set exactly one of load_in_4bit=True "
                "and load_in_8bit=True."
            )
        skip = get("llm_int8_skip_modules", ())
        if isinstance(skip, str):
            raise ConfigError(
                f"llm_int8_skip_modules is the string {skip!r}: give a list of module names."
            )
        skip = tuple(skip)
        odd = next((item for item in skip if not isinstance(item, str)), "")
        if odd != "":
            raise ConfigError(f"llm_int8_skip_modules holds {odd!r}: give a list of module names.")
        if eight:
            if get("llm_int8_has_fp16_weight", False):
                raise ConfigError(
                    "llm_int8_has_fp16_weight=True keeps 8-bit weights in 16 bit, so that nothing "
                    "would be packed: set it to False."
                )
            return cls("int8", storage_dtype=torch.int8, skip_modules=skip)
        kind = get("bnb_4bit_quant_type", "fp4")
        if kind not in ("nf4", "fp4"):
            raise ConfigError(
                f"bnb_4bit_quant_type is {kind!r}: bitsandbytes knows 'nf4' and 'fp4'."
            )
        storage = _dtype(get("bnb_4bit_quant_storage", torch.uint8), "bnb_4bit_quant_storage")
        if storage not in STORAGE_DTYPES:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in STORAGE_DTYPES)
            raise ConfigError(
                f"bnb_4bit_quant_storage is {storage}: packed codes can be stored as {known}."
            )
        compute = _dtype(get("bnb_4bit_compute_dtype", torch.float32), "bnb_4bit_compute_dtype")
        if compute not in FLOAT_DTYPES:
            raise ConfigError(
                f"bnb_4bit_compute_dtype is {compute}: give torch.bfloat16, torch.float16 or "
                "torch.float32."
            )
        return cls(
            kind, bool(get("bnb_4bit_use_double_quant", False)), storage, compute, skip_modules=skip
        )


def _refuse_method(method: Any) -> None:
    method = str(getattr(method, "value", method))
    if not method.startswith("bitsandbytes"):
        raise ConfigError(
            f"The quantization config is of the method {method!r}: this package packs experts "
            "with bitsandbytes; give a BitsAndBytesConfig."
        )
