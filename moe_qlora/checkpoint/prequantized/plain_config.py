"""Configurations of quantized folders, changed to those of the 16-bit folders they stand for."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ...errors import CheckpointError
from ...layout import dtype_name
from .config import maker_method

MODELOPT_CONFIG = "hf_quant_config.json"
"""What modelopt writes beside config.json; a 16-bit folder has none."""

_SETTINGS = "quantization_config"
_STORED_DTYPE = "expert_dtype"
"""Of DeepSeek-V4's experts as they lie on disk."""


def describe_plain(config: Any) -> None:
    """Change a transformers configuration to one of the 16-bit folder.

    What the maker said of its quantization goes from it and its parts; what is said of bitsandbytes
    stays. A dtype that is none to compute in (FP8, or none at all) becomes bfloat16, which such
    folders stand for.
    """
    for part in _parts(config):
        if _method(getattr(part, _SETTINGS, None)) is not None:
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
    methods = (_method(getattr(part, _SETTINGS, None)) for part in _parts(config))
    return next((method for method in methods if method is not None), None)


def _parts(config: Any) -> list[Any]:
    parts = [getattr(config, name, None) for name in config.sub_configs]
    return [config, *(part for part in parts if part is not None)]


def plain_json(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of the 16-bit folder, given that of the quantized one."""
    plain = copy.deepcopy(dict(config))
    for part in _dicts(plain):
        if _method(part.get(_SETTINGS)) is not None:
            del part[_SETTINGS]
        part.pop(_STORED_DTYPE, None)
        for key in ("dtype", "torch_dtype"):
            dtype = getattr(torch, str(part.get(key)).removeprefix("torch."), None)
            if isinstance(dtype, torch.dtype) and dtype.itemsize == 1:
                part[key] = dtype_name(torch.bfloat16)
    return plain


def _dicts(value: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield value
    for inner in list(value.values()):
        if isinstance(inner, dict):
            yield from _dicts(inner)


def _method(settings: Any) -> str | None:
    if hasattr(settings, "to_dict"):
        settings = settings.to_dict()
    return maker_method({_SETTINGS: settings}) if isinstance(settings, Mapping) else None
