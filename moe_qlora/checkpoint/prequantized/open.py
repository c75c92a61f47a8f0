"""Opening of a folder as 16 bits, whoever quantized it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...errors import CheckpointError
from ...layout import dtype_name, human_bytes
from ...models.files import read_json
from ..integrity import open_checkpoint
from ..manifest import CONFIG
from ..reader import Checkpoint, inside
from .config import MODELOPT, MakerConfig, maker_config, maker_method
from .reader import PrequantizedCheckpoint

MODELOPT_CONFIG = "hf_quant_config.json"
"""What modelopt writes beside config.json; a 16-bit folder has none."""

_SETTINGS = "quantization_config"
_STORED_DTYPE = "expert_dtype"
"""Of DeepSeek-V4's experts as they lie on disk."""


def open_plain(
    folder: str | Path,
    files: Sequence[Path] | None = None,
    quantization_config: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
) -> Checkpoint:
    """Open the tensors of a folder in 16 bits.

    Args:
        folder: That holds the checkpoint.
        files: Safetensors files to read; default: those of its index.
        quantization_config: Of the checkpoint; default: that of its config.json, or of modelopt's
            hf_quant_config.json.
        dtype: Of tensors that are decoded; default: that of config.json, bfloat16 where it has no
            dtype of 16 bits or more.

    Returns:
        A `Checkpoint` of a 16-bit folder, a `PrequantizedCheckpoint` of one that its maker
        quantized.

    Raises:
        CheckpointError: A file is damaged, or the folder is quantized in a way that is not read.
    """
    folder = Path(folder)
    config, own = _configs(folder)
    own = quantization_config or own
    checkpoint = Checkpoint(files) if files is not None else open_checkpoint(folder)
    try:
        if own is None:
            _check_unnamed(checkpoint)
        if own is None or maker_method({"quantization_config": own}) is None:
            return checkpoint
        return PrequantizedCheckpoint(checkpoint, own, dtype or _dtype(config))
    except CheckpointError as error:
        checkpoint.close()
        raise CheckpointError(f"{folder}: {error}") from error


def unread_method(folder: str | Path) -> str:
    """Return why a folder's `quantization_config` is not read; "" where it is, or there is none."""
    _, own = _configs(Path(folder))
    if own is None or maker_method({"quantization_config": own}) is None:
        return ""
    try:
        MakerConfig(own)
    except CheckpointError as error:
        return str(error)
    return ""


@dataclass(frozen=True)
class StoredCodes:
    """What a folder that its maker quantized holds, without reading a tensor."""

    method: str
    weights: int  # stored as codes
    tensors: int  # in all its files, scales included
    nbytes: int  # of these

    def __str__(self) -> str:
        return (
            f"{self.weights} weights of the folder are codes ({self.method}), which are "
            f"dequantized when they are read; its {self.tensors} tensors take "
            f"{human_bytes(self.nbytes)} on disk."
        )


def stored_codes(folder: str | Path) -> StoredCodes | None:
    """Return what a folder holds of its maker's codes; None for any other folder.

    Raises:
        CheckpointError: As `open_plain`.
    """
    with open_plain(folder) as checkpoint:
        if not isinstance(checkpoint, PrequantizedCheckpoint):
            return None
        return StoredCodes(
            checkpoint.method,
            sum(checkpoint.is_dequantized(name) for name in checkpoint),
            len(checkpoint.stored),
            sum(info.nbytes for info in checkpoint.stored.values()),
        )


def codes_of_source(config: Any) -> tuple[StoredCodes | None, str]:
    """Return what lies in the folder that a transformers configuration is of, and a note on it.

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
        codes = stored_codes(folder)
    except CheckpointError as error:
        return None, str(error)
    return codes, "" if codes is None else str(codes)


def _configs(folder: Path) -> tuple[Mapping[str, Any], Mapping[str, Any] | None]:
    config = read_json(inside(folder, CONFIG)) if (folder / CONFIG).is_file() else {}
    return config, maker_config(config) or _modelopt_config(folder)


def _modelopt_config(folder: Path) -> Mapping[str, Any] | None:
    """Return what modelopt wrote beside a config.json without a quantization_config."""
    if not (folder / MODELOPT_CONFIG).is_file():
        return None
    said = read_json(inside(folder, MODELOPT_CONFIG))
    inner = said.get("quantization")
    if not isinstance(inner, dict) or not (
        inner.get("quant_algo") or inner.get("quantized_layers")
    ):
        return None  # only the KV cache is quantized
    return {**inner, "quant_method": MODELOPT}


def _check_unnamed(checkpoint: Checkpoint) -> None:
    """Refuse codes that no configuration says the meaning of."""
    for key in checkpoint:
        dtype = checkpoint.info(key).dtype
        is_float8 = dtype.is_floating_point and dtype.itemsize == 1
        base = key.removesuffix("_blocks").removesuffix("_packed")
        is_packed = base != key and (
            f"{base}_scales" in checkpoint or f"{base}_scale" in checkpoint
        )
        if is_float8 or is_packed:
            raise CheckpointError(
                f"{key} is {dtype_name(dtype)}, and {CONFIG} has no quantization_config that says "
                "how it was quantized: put the maker's back."
            )


def _dtype(config: Mapping[str, Any]) -> torch.dtype:
    inner = config.get("text_config")
    for place in (config, inner if isinstance(inner, Mapping) else {}):
        for key in ("dtype", "torch_dtype"):
            dtype = getattr(torch, str(place.get(key)).removeprefix("torch."), None)
            if isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1:
                return dtype
    return torch.bfloat16


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
