"""Writing of safetensors files and checkpoint folders, so that a crash loses nothing.

    ShardWriter     a safetensors file whose tensors are known beforehand
    GrowingShard    one whose tensors become known one after the other
    new_folder      a folder built beside its destination and renamed when it is whole
    replace_file    a file written beside its destination and renamed

Everything is flushed to the disk before the rename that makes it visible.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..layout import parse_bytes
from .reader import DTYPE_NAMES

_Key = TypeVar("_Key")

_PIECE = 16 << 20


class ShardWriter:
    """A safetensors file that is written tensor by tensor; one at a time is in memory.

    The file equals what `safetensors.torch.save_file` writes for the same tensors, but for the
    order of keys, which is the caller's.

    Args:
        path: The file; must not exist.
        tensors: Dtype and shape by key, in the order in which they shall lie in the file.
        metadata: Of the file.

    Raises:
        CheckpointError: A dtype that the format does not have, or the file exists.
    """

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self.path = Path(path)
        header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
        self._tensors = {key: (dtype, tuple(shape)) for key, (dtype, shape) in tensors.items()}
        self._spans: dict[str, tuple[int, int]] = {}
        end = 0
        for key, (dtype, shape) in self._tensors.items():
            self._spans[key] = (end, end + prod(shape) * dtype.itemsize)
            header[key] = _header_entry(key, dtype, shape, self._spans[key])
            end = self._spans[key][1]
        raw = json.dumps(header, separators=(",", ":")).encode()
        raw += b" " * (-len(raw) % 8)
        self._written: dict[str, list[tuple[int, int]]] = {key: [] for key in self._tensors}
        try:
            self._file = self.path.open("xb")
        except FileExistsError as error:
            raise CheckpointError(f"{path} exists already.") from error
        self._begin = 8 + len(raw)
        self._file.write(len(raw).to_bytes(8, "little") + raw)
        self._file.truncate(self._begin + end)

    def write(self, key: str, tensor: Tensor, start: int | None = None) -> None:
        """Write a whole tensor, or its rows from `start` on, from any device, in any order.

        Raises:
            CheckpointError: It is not of the dtype and shape that were announced, or some of its
                rows are written already.
        """
        shape, begin = self._tensors[key][1], 0
        if start is None and tuple(tensor.shape) != shape:
            raise CheckpointError(f"{key} has the shape {tuple(tensor.shape)}, not {shape}.")
        if start is not None:
            if tuple(tensor.shape[1:]) != shape[1:] or start + len(tensor) > shape[0]:
                raise CheckpointError(
                    f"{key}: rows of shape {tuple(tensor.shape)} are not of {shape}."
                )
            begin = start * prod(shape[1:]) * tensor.dtype.itemsize
        self._put(key, begin, tensor)

    def _put(self, key: str, begin: int, tensor: Tensor) -> None:
        dtype = self._tensors[key][0]
        if tensor.dtype != dtype:
            raise CheckpointError(f"{key} is {tensor.dtype}, not {dtype}.")
        end = begin + tensor.nbytes
        if any(begin < stop and start < end for start, stop in self._written[key]):
            raise CheckpointError(f"{self.path}: {key} is written twice.")
        self._written[key].append((begin, end))
        self._file.seek(self._begin + self._spans[key][0] + begin)
        _write_tensor(self._file, tensor)

    def close(self) -> None:
        """Flush the file to the disk.

        Raises:
            CheckpointError: A tensor was not written, or not all of it.
        """
        for key, (begin, end) in self._spans.items():
            if sum(stop - start for start, stop in self._written[key]) < end - begin:
                self._file.close()
                raise CheckpointError(f"{self.path}: {key} was not written.")
        _close(self._file)

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is None:
            self.close()
        else:
            self._file.close()


class GrowingShard:
    """A safetensors file that is written while its tensors become known one after the other.

    Room for the header, which comes first in the file, is reserved beforehand; the header is
    written last and filled up with spaces, which the format allows.

    Args:
        path: The file; must not exist.
        keys: Every key that may come; they decide how much room the header gets.
        metadata: Of the file.
    """

    def __init__(self, path: Path, keys: Sequence[str], metadata: Mapping[str, str]) -> None:
        self.path = Path(path)
        self._header: dict[str, Any] = {"__metadata__": dict(metadata)}
        # per tensor: its key, escaped at worst, and dtype, shape and offsets at their longest
        room = len(json.dumps(self._header)) + sum(len(json.dumps(key)) + 192 for key in keys)
        self._room = room + -room % 8
        self._file = self.path.open("xb")
        self._file.write(b" " * (8 + self._room))
        self._end = 0

    def add(self, key: str, tensor: Tensor) -> None:
        """Append a tensor, from any device.

        Raises:
            CheckpointError: Of a dtype that the format does not have.
        """
        span = (self._end, self._end + tensor.nbytes)
        self._header[key] = _header_entry(key, tensor.dtype, tensor.shape, span)
        _write_tensor(self._file, tensor)
        self._end = span[1]

    def close(self) -> None:
        """Write the header, and flush the file to the disk."""
        raw = json.dumps(self._header, separators=(",", ":")).encode()
        if len(raw) > self._room:
            raise CheckpointError(f"{self.path}: the header needs {len(raw)} bytes.")
        self._file.seek(0)
        self._file.write(self._room.to_bytes(8, "little") + raw)
        _close(self._file)

    def abandon(self) -> None:
        """Close the file without its header."""
        self._file.close()


def _header_entry(
    key: str, dtype: torch.dtype, shape: Sequence[int], span: tuple[int, int]
) -> dict[str, Any]:
    if dtype not in DTYPE_NAMES:
        raise CheckpointError(f"{key} is {dtype}, which safetensors cannot store.")
    return {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": list(span)}


def _close(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()


def _write_tensor(file: BinaryIO, tensor: Tensor) -> None:
    flat = tensor.detach().contiguous().view(-1)
    for piece in torch.split(flat, max(_PIECE // tensor.dtype.itemsize, 1)):
        # bytes by way of uint8: numpy has no bfloat16
        file.write(piece.cpu().view(torch.uint8).numpy().data)


def shard_bytes(size: int | str) -> int:
    """Return the bytes of a `max_shard_size` such as "5GB", "500MiB" or a number.

    Raises:
        CheckpointError: It is no size.
    """
    if isinstance(size, str):
        try:
            size = parse_bytes(size)
        except ValueError as error:
            raise CheckpointError(f"max_shard_size: {error}.") from None
    if size < 1:
        raise CheckpointError(f"max_shard_size is {size}: give a positive number of bytes.")
    return size


def plan_shards(nbytes: Mapping[_Key, int], max_shard_size: int | str) -> list[list[_Key]]:
    """Cut keys, in their order, into shards of at most so many bytes; a larger tensor is alone."""
    limit = shard_bytes(max_shard_size)
    shards: list[list[_Key]] = []
    room = 0
    for key, size in nbytes.items():
        if not shards or size > room:
            shards.append([])
            room = limit
        shards[-1].append(key)
        room -= size
    return shards


def partial_of(destination: Path) -> Path:
    """Return where a folder is built before it is renamed to its destination."""
    return destination.with_name(f".{destination.name}.partial")


@contextmanager
def new_folder(destination: str | Path, *, keep_partial: bool = False) -> Iterator[Path]:
    """Build a folder that appears whole or not at all.

    The context's value is the folder to write into; when the block ends without an exception it is
    renamed to its destination.

    Args:
        destination: Must not exist, or be an empty folder.
        keep_partial: Keep what an interrupted build has left, and leave it again on an exception;
            otherwise it is removed in both cases.

    Raises:
        CheckpointError: The destination is there already, or cannot be written.
    """
    destination = absolute(destination)
    partial = partial_of(destination)
    try:
        check_new(destination)
        if partial.exists() and not keep_partial:
            shutil.rmtree(partial)
        partial.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{destination} cannot be written: {error}.") from error
    try:
        yield partial
        for file in partial.rglob("*"):
            flush(file)
        flush(partial)
        check_new(destination)
        partial.rename(destination)
        flush(destination.parent)
    except BaseException as error:
        if not keep_partial:
            shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError):
            raise CheckpointError(f"{destination} cannot be written: {error}.") from error
        raise


def absolute(path: str | Path) -> Path:
    """Return the path, absolute and without a trailing slash."""
    return Path(os.path.abspath(Path(path).expanduser()))  # noqa: PTH100 - links stay as they are


def check_new(destination: Path) -> None:
    """Check that a new folder can be renamed to its destination.

    Raises:
        CheckpointError: The destination exists and is no empty folder.
    """
    if destination.is_dir() and not destination.is_symlink():
        if any(destination.iterdir()):
            raise CheckpointError(
                f"{destination} exists and is not empty: name a new folder, nothing is overwritten."
            )
    elif destination.exists() or destination.is_symlink():
        raise CheckpointError(f"{destination} exists and is no folder: name a new one.")


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file at once: its readers see the old content or the new one."""
    temporary = path.with_name(f".{path.name}.partial")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        discard(temporary)
        raise
    temporary.replace(path)
    flush(path.parent)


def discard(*files: Path) -> None:
    """Remove files as far as the system lets."""
    for file in files:
        with suppress(OSError):
            file.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Flush a file or folder to the disk."""
    if path.is_symlink():
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
