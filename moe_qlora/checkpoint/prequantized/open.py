"""Opening of a folder as 16 bits, whoever quantized it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import CheckpointError
from ...layout import dtype_name, human_bytes
from ...models.files import read_json
from ..manifest import CONFIG, open_checkpoint
from ..reader import Checkpoint, TensorInfo, inside
from .config import MODELOPT, MakerConfig, maker_config, method_of
from .formats import CODES, SHAPE, Plan, dequantize, described


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
        self.stored: dict[str, TensorInfo] = {key: checkpoint.info(key) for key in checkpoint}
        try:
            maker = MakerConfig(config)
        except CheckpointError as error:
            infos = self.stored.items()
            codes = (f"; {key} is one of its tensors" for key, i in infos if not _is_wide(i.dtype))
            said = str(error).removesuffix(".") + next(codes, "")
            raise CheckpointError(f"{said}.") from error
        maker.check_patterns({key.rpartition(".")[0] for key in self.stored})
        self.files, self.dtype, self.method = checkpoint.files, dtype, maker.method
        self._disk = checkpoint
        plan = Plan(self.stored, maker, self._stored_shape)
        self._tensors = plan.tensors
        self._names = {key: key for key in plan.plain}
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
        return tuple(int(size) for size in self._disk.read(key).tolist())

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
            return self._disk.fetch(key, start, stop, device)
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
            role: self._disk.fetch(part, *tensor.rows(role, start, stop), device)
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

    def read_bytes(self, key: str, start: int, stop: int) -> Tensor:
        """Read bytes of a tensor that is plain on disk; what is decoded has none there."""
        if key in self._tensors:
            raise CheckpointError(
                f"{key} is stored as codes ({self.method}), whose bytes are not those of the plain "
                "tensor: read its rows."
            )
        return super().read_bytes(key, start, stop)

    def close(self) -> None:
        """Close the files."""
        self._disk.close()
        super().close()


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
        return PrequantizedCheckpoint(checkpoint, own, dtype or _dtype(config))
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
