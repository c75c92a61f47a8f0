"""Reading of safetensors files and their index, which may be damaged.

Files are mapped, not read: a tensor costs memory when it is used. Whatever is wrong with a file
raises a `CheckpointError` that names the file and, where there is one, the key.
"""

from __future__ import annotations

import hashlib
import json
import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
from pydantic import Field, TypeAdapter, ValidationError
from safetensors import safe_open
from torch import Tensor

from ..errors import CheckpointError, UnsupportedWeightError
from ..layout import dtype_name
from ..models.files import MAX_JSON, once, read_json, reading, size_of

INDEX_SUFFIX = ".safetensors.index.json"
INDEX = f"model{INDEX_SUFFIX}"
SINGLE = "model.safetensors"
_MAX_HEADER = 100 << 20  # bytes, of the format
_SAMPLE = 1 << 16  # bytes of each of the samples of a file
_MOST_LOCKED = 64 << 20  # bytes of a tensor; a slice has some MiB
_T = TypeVar("_T")
_WeightMap: Any = Annotated[dict[str, str], Field(min_length=1)]

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
    """The tensors of a folder's safetensors files, read-only: what is known of each, by its key.

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
        """Return what is known of a tensor without reading it."""
        if key not in self:
            place = self.files[0].parent if self.files else "the checkpoint"
            raise CheckpointError(f"{place} has no tensor {key}.")
        return self[key]

    def is_dequantized(self, key: str) -> bool:
        """Whether a plain tensor is decoded from a maker's codes."""
        return False

    def read(self, key: str, start: int = 0, stop: int | None = None, device: Any = None) -> Tensor:
        """Read a tensor, or its rows `[start, stop)`, to a device (default: the CPU)."""
        info = self.info(key)
        with reading(info.file):
            if info.file not in self._open:
                mapped = self._stack.enter_context(safe_open(str(info.file), "pt"))
                handle = self._stack.enter_context(info.file.open("rb"))
                self._open[info.file] = mapped, handle.fileno()
            mapped, descriptor = self._open[info.file]
            if hasattr(os, "posix_fadvise"):  # the whole range at once, and not page by page
                rows = info.shape[0] if info.shape else 1
                first, last, _ = slice(start, stop).indices(rows)
                row = info.nbytes // max(rows, 1)
                place = (info.offset + row * first, row * max(last - first, 0))
                os.posix_fadvise(descriptor, *place, os.POSIX_FADV_WILLNEED)
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
                raise incomplete(info.file, size_of(info.file), info.offset + info.nbytes)
        return torch.frombuffer(raw, dtype=torch.uint8)

    def close(self) -> None:
        """Close the files."""
        self._open.clear()
        self._stack.close()

    def __enter__(self) -> Checkpoint:
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


def index_of(folder: Path) -> Path | None:
    """Return the folder's index file, None where it has none of the weights to read."""
    names = [file.name for file in folder.glob(f"*{INDEX_SUFFIX}")]
    names = [INDEX] if INDEX in names else names
    if not names or (names != [INDEX] and os.path.lexists(folder / SINGLE)):
        return None  # another layout's, beside the weights that transformers reads
    if len(names) > 1:
        raise CheckpointError(f"{folder} holds {len(names)} index files: leave one.")
    return inside(folder, names[0])


def read_index(file: Path) -> dict[str, str]:
    """Return the `weight_map` of an index: key -> file name."""
    value = read_json(file, MAX_JSON).get("weight_map")
    return parse_fields(_WeightMap, value, file, "weight_map.")


def header_bytes(file: Path) -> bytes:
    """Return the JSON header of a safetensors file, its length not included."""
    with reading(file):
        size = size_of(file)
        with file.open("rb") as handle:
            start = handle.read(8)
            length = int.from_bytes(start, "little")
            if start == b"version ":
                raise CheckpointError(f"{file} is a pointer of Git LFS: run git lfs pull.")
            if length > _MAX_HEADER:
                raise CheckpointError(f"{file} is no safetensors file, or cut off in its header.")
            if size < 8 + length:
                raise incomplete(file, size, 8 + length)
            return handle.read(length)


def incomplete(file: Path, size: int, least: int) -> CheckpointError:
    """Return the error for a file of `size` bytes that should have `least`, or more."""
    found = f"{size:,} of {least:,} bytes or more are there"
    return CheckpointError(f"{file}: download incomplete, {found}: copy the file again.")


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Return what a safetensors file holds, by key in the order of the header."""
    raw = header_bytes(file)
    begin, infos = 8 + len(raw), {}
    with reading(file):
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=once)
        header.pop("__metadata__", None)
        end = begin + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if size_of(file) < end:
            raise incomplete(file, size_of(file), end)
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
    facts, names = {}, ("config.json", "hf_quant_config.json")
    for file in sorted(folder.glob("*")):
        if file.name not in names and not file.name.endswith(
            (".safetensors", ".safetensors.index.json")
        ):
            continue
        if file.is_file():  # opening a pipe would wait for its writer
            size, sample = file.stat().st_size, hashlib.sha256()
            with reading(file), file.open("rb") as handle:
                for number in range(64):
                    handle.seek(max(size - _SAMPLE, 0) * number // 63)
                    sample.update(handle.read(_SAMPLE))
            facts[f"{file.name} of the checkpoint"] = f"{size:,} bytes, {sample.hexdigest()[:16]}"
    return facts
