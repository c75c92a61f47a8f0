"""Write safetensors files, one tensor at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..layout import parse_bytes
from .reader import DTYPE_NAMES

_Key = TypeVar("_Key")

_PIECE = 16 << 20


class ShardWriter:
    """A safetensors file being written, from any device.

    `tensors` has dtypes and shapes by key, in the order of the file, to be written in rows. Tensors
    of the keys `later` are unknown before, and follow, each as a whole: space for their entries is
    reserved in the header, which is written last, padded with spaces. Without them, apart from the
    order of keys, the file equals the output of `safetensors.torch.save_file`.
    """

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]],
        metadata: Mapping[str, str] | None = None,
        later: Sequence[str] = (),
    ) -> None:
        self._path, self._end = path, 0
        self._header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
        self._left: dict[str, tuple[int, int]] = {}  # offset and number of bytes to be written
        for key, (dtype, shape) in tensors.items():
            self._describe(key, dtype, shape)
        # for each tensor: its key, escaped at worst, and the longest dtype, shape and offsets
        room = len(self._encoded()) + sum(len(json.dumps(key)) + 192 for key in later)
        self._room = room + -room % 8
        self._file = path.open("xb")
        self._file.truncate(8 + self._room + self._end)

    def _encoded(self) -> bytes:
        return json.dumps(self._header, separators=(",", ":")).encode()

    def _describe(self, key: str, dtype: torch.dtype, shape: Sequence[int]) -> None:
        if dtype not in DTYPE_NAMES:
            raise CheckpointError(f"{key} is {dtype}, which safetensors cannot store.")
        nbytes = prod(shape) * dtype.itemsize
        span = [self._end, self._end + nbytes]
        entry = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": span}
        self._header[key], self._left[key] = entry, (self._end, nbytes)
        self._end += nbytes

    def write(self, key: str, tensor: Tensor) -> None:
        """Write the next rows of a tensor, or all of it."""
        if key not in self._left:
            self._describe(key, tensor.dtype, tensor.shape)
        entry, (begin, left) = self._header[key], self._left[key]
        rows = [DTYPE_NAMES.get(tensor.dtype), *tensor.shape[1:]]
        assert rows == [entry["dtype"], *entry["shape"][1:]] and tensor.nbytes <= left, (
            key, tensor.shape, entry,
        )  # fmt: skip
        self._left[key] = begin + tensor.nbytes, left - tensor.nbytes
        self._put(tensor, 8 + self._room + begin)

    def _put(self, tensor: Tensor, begin: int) -> None:
        self._file.seek(begin)
        flat = tensor.detach().contiguous().view(-1)
        for piece in torch.split(flat, max(_PIECE // tensor.dtype.itemsize, 1)):
            # bytes by way of uint8: numpy has no bfloat16
            self._file.write(piece.cpu().view(torch.uint8).numpy().data)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        with self._file:
            if kind is not None:
                return
            missing = [key for key, (_, left) in self._left.items() if left]
            assert not missing, f"{self._path}: {missing[0]} was not written."
            raw = self._encoded()
            assert len(raw) <= self._room, f"{self._path}: the header needs {len(raw)} bytes."
            self._file.seek(0)
            self._file.write(self._room.to_bytes(8, "little") + raw.ljust(self._room))
            self._file.flush()
            os.fsync(self._file.fileno())


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
