"""Files of a checkpoint folder: read, where they may be damaged, and written.

Safetensors files are mapped, not read: a tensor costs memory when it is used. Whatever is wrong
with a file raises a `CheckpointError` that names the file and, where there is one, the key.

A folder appears whole or not at all: it is written to a staging folder, next to the target or, if
that is a folder, inside it, whose files are renamed when all are on the disk. One process at a time
writes to a target: it locks a file there (`flock`), which the system frees when a process is
killed; the next save removes what it has left.
"""

import hashlib
import json
import os
import secrets
import shutil
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import CheckpointError, UnsupportedWeightError, first_line
from ..layout import dtype_name, parse_bytes
from ..models.files import once, reading, size_of

INDEX_SUFFIX = ".safetensors.index.json"
INDEX = f"model{INDEX_SUFFIX}"
SINGLE = "model.safetensors"
_MAX_HEADER = 100 << 20  # bytes, of the format
_MOST_LOCKED = 64 << 20  # bytes of a tensor; a slice has some MiB
_T = TypeVar("_T")

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool, "C64": torch.complex64, "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64,
    "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
    "U8": torch.uint8, "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64,
}  # fmt: skip
"""The format's dtype names. Source: https://github.com/huggingface/safetensors."""

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A stored tensor: its file, dtype, shape, offset of its first byte, and length in bytes."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def check_plain(name: str, dtype: torch.dtype) -> None:
    """Refuse codes of another tool where a 16-bit weight belongs."""
    if not dtype.is_floating_point or dtype.itemsize == 1:
        raise UnsupportedWeightError(
            f"{name} is {dtype_name(dtype)} in the checkpoint, codes of another tool: load 16 bit."
        )


class Checkpoint(dict[str, TensorInfo]):
    """The tensors of a folder's safetensors files, read-only: dtype, shape and place, by key.

    Use as a context manager, or `close` it; tensors that were read stay valid.
    """

    method: str = ""  # How the folder's maker quantized it; nothing of a plain one

    def __init__(self, files: Sequence[Path]) -> None:
        super().__init__()
        self.files = tuple(files)
        for file in files:
            for key, info in read_header(file).items():
                if key in self:
                    raise CheckpointError(f"{file}: {key} is in {self[key].file.name} as well.")
                self[key] = info
        self._stack = ExitStack()
        weakref.finalize(self, self._stack.close)  # a failed load does not close it
        # of each file: as the library maps it, and its descriptor
        self._open: dict[Path, tuple[Any, int]] = {}

    def info(self, key: str) -> TensorInfo:
        """Return a tensor's dtype, shape and place in its file."""
        if key not in self:
            raise CheckpointError(f"{self.files[0].parent} has no tensor {key}.")
        return self[key]

    def is_dequantized(self, key: str) -> bool:
        """Whether a plain tensor is decoded from a maker's codes."""
        return False

    def read(self, key: str, start: int = 0, stop: int | None = None, device: Any = None) -> Tensor:
        """Read a tensor, or its rows `[start, stop)`, to a device (default: the CPU)."""
        info = self.info(key)
        rows = info.shape[0] if info.shape else 1
        first, last, _ = slice(start, stop).indices(rows)
        with reading(info.file):
            if info.file not in self._open:
                mapped = self._stack.enter_context(safe_open(str(info.file), "pt"))
                handle = self._stack.enter_context(info.file.open("rb"))
                self._open[info.file] = mapped, handle.fileno()
            mapped, descriptor = self._open[info.file]
            if hasattr(os, "posix_fadvise"):  # the whole range at once, and not page by page
                row = info.nbytes // max(rows, 1)
                place, length = info.offset + row * first, row * max(last - first, 0)
                os.posix_fadvise(descriptor, place, length, os.POSIX_FADV_WILLNEED)
            whole = not start and stop is None
            tensor: Tensor = mapped.get_tensor(key) if whole else mapped.get_slice(key)[start:stop]
        return tensor if device is None else tensor.to(device)

    def fetch(
        self, key: str, start: int = 0, stop: int | None = None, device: Any = None
    ) -> Callable[[], Tensor]:
        """Read a tensor, or rows, to the host; return what brings it to the device, as `read` does.

        For a GPU, slices are read to page-locked memory, from which they are copied without
        waiting; larger tensors, which would lock it for good, go to the device at once.
        """
        tensor = Checkpoint.read(self, key, start, stop)
        on_gpu = device is not None and torch.device(device).type == "cuda"
        if on_gpu and tensor.nbytes <= _MOST_LOCKED:
            locked = tensor.pin_memory()
            return lambda: locked.to(device, non_blocking=True)
        moved = tensor if device is None else tensor.to(device)
        return lambda: moved

    def read_bytes(self, key: str, start: int, stop: int) -> Tensor:
        """Read the bytes `[start, stop)` of a tensor, uint8, and no others."""
        info, raw = self.info(key), bytearray(stop - start)
        if not raw:
            return torch.empty(0, dtype=torch.uint8)
        with reading(info.file), info.file.open("rb") as handle:
            handle.seek(info.offset + start)
            if handle.readinto(raw) < len(raw):
                raise CheckpointError(f"{info.file} was cut off meanwhile: copy the file again.")
        return torch.frombuffer(raw, dtype=torch.uint8)

    def close(self) -> None:
        """Close the files."""
        self._open.clear()
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def check_folder(folder: Path) -> None:
    """Raise where a path is no folder."""
    with reading(folder):
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is no folder: name one that holds a checkpoint.")


def inside(folder: Path, name: Any) -> Path:
    """Return a file of a folder by its bare name; for links see `check_link`."""
    plain = isinstance(name, str) and name not in ("", ".", "..") and not set(name) & set("/\\\0")
    if not plain or Path(name).is_absolute() or ":" in name:
        raise CheckpointError(f"{folder} names {name!r}: only files of the folder are read.")
    check_link(folder / name, folder)
    return folder / name


def check_link(path: Path, folder: Path) -> None:
    """Check that a link leads nowhere but into its folder, or to blobs of the hub's cache."""
    with reading(path):
        if not path.is_symlink():
            return
        with suppress(OSError, RuntimeError):
            target, root = path.resolve(), folder.resolve()
            in_cache = root.parent.name == "snapshots"
            places = [root, *([root.parent.parent / "blobs"] if in_cache else [])]
            if any(place in target.parents for place in places):
                return
        raise CheckpointError(f"{path} is a link that leads out of its folder: put the file there.")


def parse_fields(kind: type[_T], value: Any, file: Path, prefix: str = "") -> _T:
    """Build a pydantic dataclass from JSON; in errors, `prefix` stands before the fields' keys."""
    with reading(file):
        try:
            return TypeAdapter(kind).validate_python(value)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            key = (prefix + ".".join(str(part) for part in first["loc"])).rstrip(".")
            seen = f"{first['input']!r:.80}: {first['msg']}"
            seen = "missing" if first["type"] == "missing" else seen
            raise CheckpointError(f"{file} is damaged: {key} is {seen}.") from error


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Return the tensors of a safetensors file, by key in the order of the header."""
    infos: dict[str, TensorInfo] = {}
    with reading(file):
        size, header = size_of(file), {}
        with file.open("rb") as handle:
            start = handle.read(8)
            length = int.from_bytes(start, "little")
            if start == b"version ":
                raise CheckpointError(f"{file} is a pointer of Git LFS: run git lfs pull.")
            if length > _MAX_HEADER:
                raise CheckpointError(f"{file} is no safetensors file, or cut off in its header.")
            least = begin = 8 + length
            if size >= least:
                header = json.loads(handle.read(length).decode("utf-8"), object_pairs_hook=once)
                header.pop("__metadata__", None)
                least += max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if size < least:
            raise CheckpointError(
                f"{file}: download incomplete, {size:,} of {least:,} bytes or more are there: "
                "copy the file again."
            )
        # The library checks the rest: offsets without gaps, sizes that agree with shapes.
        with safe_open(str(file), "pt"):
            pass
        for key, entry in header.items():
            (first, last), kind, shape = entry["data_offsets"], entry["dtype"], entry["shape"]
            if kind not in DTYPES:
                raise CheckpointError(f"{file}: {key} has the unknown dtype {kind!r}.")
            infos[key] = TensorInfo(file, DTYPES[kind], tuple(shape), begin + first, last - first)
    return infos


def file_facts(folder: Path) -> dict[str, str]:
    """Return size and hash of samples of each file, to tell whether ranks read equal copies."""
    # object stores and reproducible archives give equal sizes and times to different files
    facts = {}
    configs = (folder / name for name in ("config.json", "hf_quant_config.json"))
    for file in (*configs, *sorted(folder.glob("*.safetensors*"))):
        if file.is_file():  # opening a pipe would wait for its writer
            size, sample = file.stat().st_size, hashlib.sha256()
            with reading(file), file.open("rb") as handle:
                for number in range(64):
                    handle.seek(max(size - (1 << 16), 0) * number // 63)
                    sample.update(handle.read(1 << 16))
            facts[f"{file.name} of the checkpoint"] = f"{size:,} bytes, {sample.hexdigest()[:16]}"
    return facts


_PIECE = 4 << 20  # bytes written at once: twice as quick as a whole tensor from a GPU
_ENDLESS = 1 << 62


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


def left_behind(target: Path) -> list[Path]:
    """List what interrupted saves, or one that still runs, have next to a target and inside it."""
    places = (place for inside in (False, True) for place in _places(target, inside))
    return [place for place in places if os.path.lexists(place)]


def _places(target: Path, inside: bool) -> tuple[Path, Path]:
    start = str(target / ".moe_qlora" if inside else target.parent / f".{target.name}.moe_qlora")
    return Path(f"{start}.partial"), Path(f"{start}.lock")


@contextmanager
def staging(target: Path, *, inside: bool = False) -> Iterator[Path]:
    """Yield an empty staging folder next to a target or `inside` it; other writers are refused."""
    import fcntl

    work, lock = _places(target, inside)
    try:
        work.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            # do not follow a link, nor wait for a pipe
            handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
            stack.callback(os.close, handle)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # a process that has just ended may have removed the file that is locked here
                is_ours = lock.exists() and os.path.samestat(os.fstat(handle), lock.stat())
            except BlockingIOError:
                is_ours = False
            except OSError as error:
                text = f"{target}'s file system has no locks ({error}): let one process write there"
                warnings.warn(f"{text}.", UserWarning, stacklevel=2)
                is_ours = True
            if not is_ours:
                raise CheckpointError(
                    f"Another process is writing to {target}: wait for it, or name another folder. "
                    "In a distributed run, pass is_main_process=False in all processes but one."
                )
            stack.callback(discard, lock)  # forked processes have this one open too
            if os.path.lexists(work):
                shutil.rmtree(work)  # which refuses a link
            work.mkdir()
            stack.callback(shutil.rmtree, work, ignore_errors=True)
            yield work
    except (OSError, SafetensorError) as error:  # safetensors wraps those of the system
        raise CheckpointError(
            f"{target} cannot be written: {first_line(error)}; make room there, or name another "
            "folder."
        ) from error


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
        room: int | None = None,
    ) -> None:
        self._header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._left: dict[str, tuple[int, int]] = {}  # bytes to be written: from, to
        self._end, self._used, self._room = 0, len(self._encoded()), room or _ENDLESS
        for key, (dtype, shape) in tensors.items():
            self._add(key, dtype, shape)
        if room is None:
            self._room = -(-len(self._encoded()) // 8) * 8
        self._file = path.open("xb")

    def _encoded(self) -> bytes:
        return json.dumps(self._header, separators=(",", ":")).encode()

    def _add(
        self, key: str, dtype: torch.dtype, shape: Sequence[int], limit: int = _ENDLESS
    ) -> bool:
        if dtype not in DTYPE_NAMES:
            raise CheckpointError(f"{key} is {dtype}, which safetensors cannot store.")
        span = self._end, self._end + prod(shape) * dtype.itemsize
        entry = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": list(span)}
        used = self._used + len(json.dumps({key: entry}))
        if self._left and (span[1] > limit or used > self._room):
            return False
        self._header[key], self._left[key], self._end, self._used = entry, span, span[1], used
        return True

    def append(self, key: str, tensor: Tensor, limit: int) -> bool:
        """Write one more tensor if `limit` bytes of data and the header hold it, or it is alone."""
        if added := self._add(key, tensor.dtype, tensor.shape, limit):
            self.write(key, tensor)
        return added

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
    except ValueError as error:
        raise CheckpointError(f"max_shard_size: {error}.") from None
    if limit < 1:
        raise CheckpointError(f"max_shard_size: {limit} is no positive number of bytes.")
    return limit
