"""A folder that its maker quantized, read as the 16-bit folder that it stands for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ...errors import CheckpointError
from ..reader import Checkpoint, TensorInfo
from .config import MakerConfig
from .decode import CODES, SHAPE, Quantized, dequantize
from .fp8 import described
from .int4 import check_shape
from .plan import plan_tensors


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
        tensor = self._tensors.get(key)
        if tensor is None:
            self.info(key)
            return self._disk.read(key, start, stop, device)
        start, stop, _ = slice(start, stop).indices(tensor.shape[0])
        stop = max(start, stop)
        if SHAPE in tensor.parts:
            check_shape(tensor, self._stored_shape(tensor.parts[SHAPE]))
        parts = {
            role: self._disk.read(part, *self._rows(tensor, role, start, stop), device)
            for role, part in tensor.parts.items()
            if role != SHAPE
        }
        return dequantize(tensor, parts, start, stop, self.dtype)

    def read_stored(
        self, key: str, start: int = 0, stop: int | None = None, device: Any = None
    ) -> Tensor:
        """Read a tensor on disk, or its rows [start, stop), as it is: codes, or what goes with."""
        return self._disk.read(key, start, stop, device)

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
    """Return what a configuration says; an error names one of the tensors that it is about."""
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
