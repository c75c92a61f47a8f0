"""Write safetensors files, one tensor at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Self, TypeVar

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..layout import parse_bytes
from .reader import DTYPE_NAMES

_Key = TypeVar("_Key")

_PIECE = 16 << 20


class _Shard:
    """A safetensors file being written; complete when its block ends without an exception."""

    _file: BinaryIO

    def __init__(self, path: Path, metadata: Mapping[str, str] | None) -> None:
        self.path = path
        self._header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}

    def _describe(self, key: str, dtype: torch.dtype, shape: Sequence[int], begin: int) -> int:
        if dtype not in DTYPE_NAMES:
            raise CheckpointError(f"{key} is {dtype}, which safetensors cannot store.")
        span = [begin, begin + prod(shape) * dtype.itemsize]
        entry = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": span}
        self._header[key] = entry
        return span[1]

    def _put(self, tensor: Tensor, begin: int) -> None:
        self._file.seek(begin)
        flat = tensor.detach().contiguous().view(-1)
        for piece in torch.split(flat, max(_PIECE // tensor.dtype.itemsize, 1)):
            # bytes by way of uint8: numpy has no bfloat16
            self._file.write(piece.cpu().view(torch.uint8).numpy().data)

    def _finish(self) -> None:
        """Write the end of the file."""

    def close(self) -> None:
        with self._file:
            self._finish()
            self._file.flush()
            os.fsync(self._file.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is None and not self._file.closed:
            self.close()
        self._file.close()


class ShardWriter(_Shard):
    """A safetensors file with known tensors: dtypes and shapes by key, in the order of the file.

    Apart from the order of keys it equals the output of `safetensors.torch.save_file`.
    """

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(path, metadata)
        end = 0
        for key, (dtype, shape) in tensors.items():
            end = self._describe(key, dtype, shape, end)
        raw = json.dumps(self._header, separators=(",", ":")).encode()
        raw += b" " * (-len(raw) % 8)
        self._tensors = {key: (dtype, tuple(shape)) for key, (dtype, shape) in tensors.items()}
        spans = {key: self._header[key]["data_offsets"] for key in tensors}
        self._left = {
            key: (8 + len(raw) + begin, end - begin) for key, (begin, end) in spans.items()
        }
        self._file = path.open("xb")
        self._file.write(len(raw).to_bytes(8, "little") + raw)
        self._file.truncate(8 + len(raw) + end)

    def write(self, key: str, tensor: Tensor) -> None:
        """Write the next rows of a tensor, or all of it, from any device."""
        (dtype, shape), (begin, left) = self._tensors[key], self._left[key]
        rows = (tensor.dtype, tuple(tensor.shape[1:]))
        assert rows == (dtype, shape[1:]) and tensor.nbytes <= left, (key, tensor.shape, shape)
        self._left[key] = begin + tensor.nbytes, left - tensor.nbytes
        self._put(tensor, begin)

    def _finish(self) -> None:
        missing = [key for key, (_, left) in self._left.items() if left]
        assert not missing, f"{self.path}: {missing[0]} was not written."


class GrowingShard(_Shard):
    """A safetensors file to which tensors are appended, unknown before.

    Space for the header is reserved from all possible keys; the header is written last, padded with
    spaces.
    """

    def __init__(self, path: Path, keys: Sequence[str], metadata: Mapping[str, str]) -> None:
        super().__init__(path, metadata)
        # for each tensor: its key, escaped at worst, and the longest dtype, shape and offsets
        room = len(json.dumps(self._header)) + sum(len(json.dumps(key)) + 192 for key in keys)
        self._room = room + -room % 8
        self._file = path.open("xb")
        self._file.write(b" " * (8 + self._room))
        self._end = 0

    def add(self, key: str, tensor: Tensor) -> None:
        """Append a tensor, from any device."""
        begin, self._end = self._end, self._describe(key, tensor.dtype, tensor.shape, self._end)
        self._put(tensor, 8 + self._room + begin)

    def _finish(self) -> None:
        raw = json.dumps(self._header, separators=(",", ":")).encode()
        assert len(raw) <= self._room, f"{self.path}: the header needs {len(raw)} bytes."
        self._file.seek(0)
        self._file.write(self._room.to_bytes(8, "little") + raw)


def plan_shards(nbytes: Mapping[_Key, int], max_shard_size: int | str) -> list[list[_Key]]:
    """Divide keys in order into shards of at most this size; a larger tensor gets its own."""
    try:
        limit = parse_bytes(max_shard_size) if isinstance(max_shard_size, str) else max_shard_size
        if limit < 1:
            raise ValueError(f"{limit} is no positive number of bytes")
    except ValueError as error:
        raise CheckpointError(f"max_shard_size: {error}.") from None
    shards: list[list[_Key]] = []
    room = 0
    for key, size in nbytes.items():
        if not shards or size > room:
            shards.append([])
            room = limit
        shards[-1].append(key)
        room -= size
    return shards
