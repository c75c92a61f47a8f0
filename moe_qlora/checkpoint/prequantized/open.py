"""Opening of a folder as 16 bits, whoever quantized it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from .plain_config import MODELOPT_CONFIG, described_method
from .reader import PrequantizedCheckpoint


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
    """Return a folder's config.json, and what it or modelopt's file says of its quantization."""
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
