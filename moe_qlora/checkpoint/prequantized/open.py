"""Opening of a folder as 16 bits, whoever quantized it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ...errors import CheckpointError
from ...layout import dtype_name, human_bytes
from ...models.files import read_json
from ..manifest import CONFIG, open_checkpoint
from ..reader import Checkpoint, TensorInfo, inside
from .config import MODELOPT, MakerConfig, maker_config, maker_method
from .formats import CODES, SHAPE, Quantized, check_shape, dequantize, described, plan_tensors


class PrequantizedCheckpoint(Checkpoint):
    """The plain tensors that the quantized ones of a checkpoint stand for, read-only.

    Keys, shapes and dtypes are those of the 16-bit checkpoint. A tensor, or rows of it, is decoded
    when it is read: in fp32, in pieces, with one rounding.

    Args:
        checkpoint: What lies on disk; it is closed with this one.
        config: The folder's `quantization_config`.
        dtype: Of the plain tensors.

    Raises:
        CheckpointError: The format is not read, or a part of a tensor is missing or foreign.
    """

    def __init__(
        self, checkpoint: Checkpoint, config: Mapping[str, Any], dtype: torch.dtype
    ) -> None:
        super().__init__(())
        self.stored: Mapping[str, TensorInfo] = MappingProxyType(
            {key: checkpoint.info(key) for key in checkpoint}
        )
        maker = _read_config(config, self.stored)
        maker.check_patterns({key.rpartition(".")[0] for key in self.stored})
        self.files, self.dtype, self.method = checkpoint.files, dtype, maker.method
        self._disk = checkpoint
        self._tensors, plain = plan_tensors(self.stored, maker, self._stored_shape)
        self._names = {key: key for key in plain}
        self._names |= {tensor.parts[CODES]: name for name, tensor in self._tensors.items()}
        for key, info in self.stored.items():  # in the order of the files
            if key in self._names:
                name = self._names[key]
                self._infos[name] = self._plain_info(name, info)

    def _stored_shape(self, key: str) -> tuple[int, ...]:
        info = self.stored[key]
        if info.dtype not in (torch.int32, torch.int64) or info.shape not in ((2,), (3,)):
            raise CheckpointError(
                f"{key} is {described(info)}, which is no shape of a weight: copy the file again."
            )
        return tuple(int(size) for size in self._disk.read(key).tolist())

    def _plain_info(self, name: str, info: TensorInfo) -> TensorInfo:
        tensor = self._tensors.get(name)
        if tensor is None:
            return info
        nbytes = prod(tensor.shape) * self.dtype.itemsize
        return replace(info, dtype=self.dtype, shape=tensor.shape, nbytes=nbytes)

    def plain_name(self, stored_key: str) -> str | None:
        """Return the plain name of a tensor on disk; None for what only goes with one."""
        return self._names.get(stored_key)

    def is_dequantized(self, name: str) -> bool:
        """Whether a plain tensor is decoded from codes."""
        return name in self._tensors

    def parts(self, name: str) -> Mapping[str, str]:
        """Return the keys on disk that make a plain tensor, by their role."""
        tensor = self._tensors.get(name)
        return {CODES: name} if tensor is None else MappingProxyType(dict(tensor.parts))

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
            return self._disk.fetch(key, start, stop, device)
        start, stop, _ = slice(start, stop).indices(tensor.shape[0])
        stop = max(start, stop)
        if SHAPE in tensor.parts:
            check_shape(tensor, self._stored_shape(tensor.parts[SHAPE]))
        parts = {
            role: self._disk.fetch(part, *self._rows(tensor, role, start, stop), device)
            for role, part in tensor.parts.items()
            if role != SHAPE
        }
        return lambda: dequantize(
            tensor, {role: part() for role, part in parts.items()}, start, stop, self.dtype
        )

    def fetch_stored(
        self, key: str, start: int = 0, stop: int | None = None, device: Any = None
    ) -> Callable[[], Tensor]:
        """Fetch a tensor on disk, or its rows [start, stop), as it is: codes, or what goes with."""
        return self._disk.fetch(key, start, stop, device)

    def _rows(self, tensor: Quantized, role: str, start: int, stop: int) -> tuple[int, int | None]:
        rows = tensor.rows(role, start, stop)
        return (0, None) if rows is None else rows

    def read_bytes(self, key: str, start: int, stop: int) -> Tensor:
        """Read bytes of a tensor that is plain on disk; what is decoded has none there."""
        self.info(key)
        if key in self._tensors:
            raise CheckpointError(
                f"{key} is stored as codes ({self.method}), whose bytes are not those of the plain "
                "tensor: read its rows."
            )
        return self._disk.read_bytes(key, start, stop)

    def expect(self, keys: Sequence[str], start: int = 0, stop: int | None = None) -> None:
        """Ask the system to read ahead what the tensors, or rows of them, are made from."""
        for key in keys:
            tensor = self._tensors.get(key)
            if tensor is None:
                self._disk.expect([key], start, stop)
                continue
            last = tensor.shape[0] if stop is None else stop
            for role, part in tensor.parts.items():
                self._disk.expect([part], *self._rows(tensor, role, start, last))

    def close(self) -> None:
        """Close the files."""
        self._disk.close()
        super().close()


def _read_config(config: Mapping[str, Any], stored: Mapping[str, TensorInfo]) -> MakerConfig:
    try:
        return MakerConfig(config)
    except CheckpointError as error:
        codes = (
            key
            for key, info in stored.items()
            if not info.dtype.is_floating_point or info.dtype.itemsize == 1
        )
        example = next(codes, None)
        about = "" if example is None else f"; {example} is one of its tensors"
        raise CheckpointError(f"{str(error).removesuffix('.')}{about}.") from error


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
            for key in checkpoint:
                kind = checkpoint.info(key).dtype
                is_float8 = kind.is_floating_point and kind.itemsize == 1
                base = key.removesuffix("_blocks").removesuffix("_packed")
                is_packed = base != key and (
                    f"{base}_scales" in checkpoint or f"{base}_scale" in checkpoint
                )
                if is_float8 or is_packed:
                    raise CheckpointError(
                        f"{key} is {dtype_name(kind)}, and {CONFIG} has no quantization_config "
                        "that says how it was quantized: put the maker's back."
                    )
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
    return config, maker_config(config) or _modelopt_config(folder)


def _modelopt_config(folder: Path) -> Mapping[str, Any] | None:
    if not (folder / MODELOPT_CONFIG).is_file():
        return None
    said = read_json(inside(folder, MODELOPT_CONFIG))
    inner = said.get("quantization")
    if not isinstance(inner, dict) or not (
        inner.get("quant_algo") or inner.get("quantized_layers")
    ):
        return None  # only the KV cache is quantized
    return {**inner, "quant_method": MODELOPT}


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
    for part in json_parts(plain):
        if _method(part.get(_SETTINGS)) is not None:
            del part[_SETTINGS]
        part.pop(_STORED_DTYPE, None)
        for key in ("dtype", "torch_dtype"):
            dtype = getattr(torch, str(part.get(key)).removeprefix("torch."), None)
            if isinstance(dtype, torch.dtype) and dtype.itemsize == 1:
                part[key] = dtype_name(torch.bfloat16)
    return plain


def json_parts(value: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a configuration, and the configurations in it."""
    yield value
    for inner in list(value.values()):
        if isinstance(inner, dict):
            yield from json_parts(inner)


def _method(settings: Any) -> str | None:
    if hasattr(settings, "to_dict"):
        settings = settings.to_dict()
    return maker_method({_SETTINGS: settings}) if isinstance(settings, Mapping) else None
