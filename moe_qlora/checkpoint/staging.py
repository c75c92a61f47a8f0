"""Writing: safetensors files, and folders that appear whole or not at all.

Files are written to a staging folder, next to the target or, if that is a folder, inside it, and
renamed when all are on the disk. One process at a time writes to a target: it locks a file there
(`flock`), which the system frees when a process is killed; the next save removes what it has left.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from math import prod
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from torch import Tensor

from ..errors import CheckpointError
from ..layout import parse_bytes
from .reader import DTYPE_NAMES

_PIECE = 4 << 20  # bytes written at once: twice as quick as a whole tensor from a GPU
WRITE_ERRORS = (OSError, SafetensorError)
"""Exceptions of a failed write: safetensors wraps those of the system in its own."""


@contextmanager
def new_folder(destination: str | Path) -> Iterator[Path]:
    """Build a folder that appears whole or not at all; it must not exist, or be empty."""
    destination = absolute(destination)
    with staging(destination) as work:
        check_new(destination)
        yield work
        for file in (*work.rglob("*"), work):
            flush(file)
        work.rename(destination)  # which fails if something is there meanwhile
        with suppress(OSError):  # the rename is done, even if the parent cannot be flushed
            flush(destination.parent)


def move_files(work: Path, folder: Path, last: str) -> None:
    """Move a finished save's files into a folder, those named `last` at the end."""
    files = [file for file in work.rglob("*") if file.is_file()]
    for file in files:
        flush(file)
    for file in sorted(files, key=lambda file: (file.name == last, -len(file.parts), file)):
        target = folder / file.relative_to(work)
        target.parent.mkdir(parents=True, exist_ok=True)
        if file.name == last:
            flush(folder)
        file.replace(target)
    flush(folder)


def _places(target: Path, inside: bool) -> tuple[Path, Path]:
    start = target / ".moe_qlora" if inside else target.parent / f".{target.name}.moe_qlora"
    return start.with_name(f"{start.name}.partial"), start.with_name(f"{start.name}.lock")


def left_behind(target: Path) -> list[Path]:
    """List what interrupted saves, or one that still runs, have next to a target and inside it."""
    places = (*_places(target, inside=False), *_places(target, inside=True))
    return [path for path in places if os.path.lexists(path)]


@contextmanager
def staging(target: Path, *, inside: bool = False) -> Iterator[Path]:
    """Yield an empty staging folder next to a target or `inside` it; other writers are refused."""
    work, lock = _places(target, inside)
    try:
        work.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            # do not follow a link, nor wait for a pipe
            handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
            stack.callback(os.close, handle)
            _lock(handle, lock, target)
            stack.callback(discard, lock)  # forked processes have this one open too
            if os.path.lexists(work):
                shutil.rmtree(work)  # which refuses a link
            work.mkdir()
            stack.callback(shutil.rmtree, work, ignore_errors=True)
            yield work
    except WRITE_ERRORS as error:
        raise CheckpointError(not_written(target, error)) from error


def _lock(handle: int, lock: Path, target: Path) -> None:
    import fcntl

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # a process that has just ended may have removed the file that is locked here
        if lock.exists() and os.path.samestat(os.fstat(handle), lock.stat()):
            return
    except BlockingIOError:
        pass
    except OSError as error:
        text = f"{target}'s file system has no locks ({error}): let one process write there."
        warnings.warn(text, UserWarning, stacklevel=2)
        return
    raise CheckpointError(
        f"Another process is writing to {target}: wait for it, or name another folder. In a "
        "distributed run, pass is_main_process=False in all processes but one."
    )


def not_written(target: str | Path, error: OSError | SafetensorError) -> str:
    """Return the sentence for a failed write, which may also be of a file that is copied."""
    reason = getattr(error, "strerror", None) or str(error).rpartition("I/O error: ")[2]
    file = getattr(error, "filename", None)
    at = f" ({os.fsdecode(file)})" if isinstance(file, (str, bytes)) else ""
    return f"{target} cannot be written: {reason}{at}; make room there, or name another folder."


def absolute(path: str | Path) -> Path:
    """Return the path, absolute and without a trailing slash."""
    return Path(os.path.abspath(Path(path).expanduser()))  # noqa: PTH100 - links stay as they are


def check_new(destination: Path) -> None:
    """Check that a new folder can be renamed to its destination."""
    free = destination.is_dir() and not destination.is_symlink() and not destination.is_mount()
    if os.path.lexists(destination) and not (free and not any(destination.iterdir())):
        raise CheckpointError(
            f"{destination} exists and is no empty folder, or is a mount, which no rename "
            "replaces: name a new folder, nothing is overwritten."
        )


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file at once: its readers see the old content or the new one."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        temporary.write_bytes(content)
        flush(temporary)
        temporary.replace(path)
    except BaseException:  # Ctrl-C too leaves nothing
        discard(temporary)
        raise
    with suppress(OSError):  # as in new_folder
        flush(path.parent)


def discard(*files: Path) -> None:
    """Remove files; ignore errors of the system."""
    for file in files:
        with suppress(OSError):
            file.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Flush a file or folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class ShardWriter:
    """A safetensors file being written in rows, from any device.

    `tensors` has dtypes and shapes by key, in the order of the file, which apart from that order
    equals the output of `safetensors.torch.save_file`. With `room`, so many bytes are reserved for
    the header, and tensors that are not known before follow, each as a whole.
    """

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]],
        metadata: Mapping[str, str] | None = None,
        room: int | None = None,
    ) -> None:
        self._header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
        self._left: dict[str, tuple[int, int]] = {}  # what is to be written: from, to
        self._end = 0
        for key, (dtype, shape) in tensors.items():
            self._add(key, self._entry(key, dtype, shape))
        self._used = len(self._encoded())
        self._room = self._used + -self._used % 8 if room is None else room
        self._file = path.open("xb")

    def _encoded(self) -> bytes:
        return json.dumps(self._header, separators=(",", ":")).encode()

    def _entry(self, key: str, dtype: torch.dtype, shape: Sequence[int]) -> dict[str, Any]:
        """Return the header's entry of the tensor that would come next."""
        if dtype not in DTYPE_NAMES:
            raise CheckpointError(f"{key} is {dtype}, which safetensors cannot store.")
        span = [self._end, self._end + prod(shape) * dtype.itemsize]
        return {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": span}

    def _add(self, key: str, entry: dict[str, Any]) -> None:
        begin, self._end = entry["data_offsets"]
        self._header[key], self._left[key] = entry, (begin, self._end)

    def append(self, key: str, tensor: Tensor, limit: int) -> bool:
        """Write one more tensor if `limit` bytes of data and the header hold it, or it is alone."""
        entry = self._entry(key, tensor.dtype, tensor.shape)
        used = self._used + len(json.dumps({key: entry}))
        if self._left and (entry["data_offsets"][1] > limit or used > self._room):
            return False
        self._used = used
        self._add(key, entry)
        self.write(key, tensor)
        return True

    def write(self, key: str, tensor: Tensor) -> None:
        """Write the next rows of a tensor, or all of it."""
        begin, end = self._left[key]
        assert tensor.nbytes <= end - begin, (key, tensor.shape)
        self._left[key] = begin + tensor.nbytes, end
        self._file.seek(8 + self._room + begin)
        flat = tensor.detach().contiguous().view(-1)
        for piece in torch.split(flat, max(_PIECE // tensor.dtype.itemsize, 1)):
            # bytes by way of uint8: numpy has no bfloat16
            self._file.write(piece.cpu().view(torch.uint8).numpy().data)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        with self._file:
            if kind is None:
                assert all(begin == end for begin, end in self._left.values()), self._left
                raw = self._encoded()
                assert len(raw) <= self._room, f"{self._file.name}: a header of {len(raw)} bytes"
                self._file.seek(0)
                self._file.write(self._room.to_bytes(8, "little") + raw.ljust(self._room))
                self._file.flush()
                os.fsync(self._file.fileno())


def shard_limit(max_shard_size: int | str) -> int:
    """Return the bytes of a shard, given as a number or as "5GB"."""
    try:
        limit = parse_bytes(max_shard_size) if isinstance(max_shard_size, str) else max_shard_size
        if limit < 1:
            raise ValueError(f"{limit} is no positive number of bytes")
    except ValueError as error:
        raise CheckpointError(f"max_shard_size: {error}.") from None
    return limit


def plan_shards(nbytes: Mapping[str, int], max_shard_size: int | str) -> list[list[str]]:
    """Divide keys in order into shards of at most this size; a larger tensor gets its own."""
    limit, room, shards = shard_limit(max_shard_size), 0, list[list[str]]()
    for key, size in nbytes.items():
        if not shards or size > room:
            shards.append([])
            room = limit
        shards[-1].append(key)
        room -= size
    return shards
