"""The manifest of a packed folder: what belongs to it, what is packed, and how to know it is whole.

A packed folder holds, besides what transformers writes:

    config.json                      two more keys: `moe_qlora` (format_version, id, entry), and
                                     `transformers_weights`, a sentence that stock transformers,
                                     which cannot read the folder, quotes in its error
    model-<hash>-00001-of-0000N.safetensors
                                     tensors under the model's own names; a packed stack has the
                                     keys that bitsandbytes gives a packed Linear (`<name>`,
                                     `<name>.absmax`, ...), or `<name>` and `<name>.SCB` for int8
    moe_qlora.json                   this manifest

Shards are named after a checksum of all that is in them and of how it is cut, so that a second save
into a folder never touches a file of the first. The next manifest is written beside the old one,
then config.json is replaced, which decides, then the manifest. Between the two, the manifest beside
is the one that config.json names.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from .errors import CheckpointError
from .folder import DTYPE_NAMES, DTYPES, TensorInfo, header_bytes, inside, read_header, read_json
from .folder import reading as reading_file
from .folder_write import beside, flush, replace_file

MANIFEST = "moe_qlora.json"
NEXT = beside(Path(MANIFEST)).name
"""Where a save writes the manifest before it is renamed."""
CONFIG = "config.json"
CONFIG_KEY = "moe_qlora"
FORMAT_VERSION = 1
SENTENCE = (
    "The experts in this folder are packed by moe_qlora: pip install moe-qlora, and load it inside "
    "`with moe_qlora.enabled():`."
)
"""What stock transformers quotes when it is asked to load a packed folder."""

_READ = 1 << 20
_SMALL = 1 << 16
_NESTED_BLOCK = 256
_KINDS = ("nf4", "fp4", "int8")
_FLOATS = ("float32", "float16", "bfloat16")
_MAX_DIMENSIONS = 64


@dataclass(frozen=True, slots=True)
class PackedEntry:
    """A packed stack: shape and dtype name (as in "bfloat16") decoded, and its other names."""

    shape: tuple[int, ...]
    dtype: str
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A stored tensor: its shard, dtype name of the safetensors format, shape, and checksum."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    sha256: str


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """A file of the folder: its size in bytes, and the checksum of its header."""

    nbytes: int
    header_sha256: str


@dataclass(frozen=True)
class Manifest:
    """What `moe_qlora.json` says; the module's docstring has the folder around it.

    Attributes:
        id: Checksum of all tensors and of how they are packed.
        written_by: Program and version.
        model_type: Of the config.
        codec: kind, double_quant, blocksize, storage_dtype, compute_dtype (None, or a name).
        experts: Packed stacks by name.
        shards: Files by name, in order.
        tensors: Stored tensors by key.
        config_sha256: Of config.json.
        source_config: The model's config as a dict.
    """

    id: str
    written_by: str
    model_type: str
    codec: dict[str, Any]
    experts: dict[str, PackedEntry]
    shards: dict[str, ShardEntry]
    tensors: dict[str, TensorEntry]
    config_sha256: str
    source_config: dict[str, Any] = field(default_factory=dict)

    @property
    def entry(self) -> str:
        """The first shard's name, which config.json sends transformers to."""
        return next(iter(self.shards))

    def to_bytes(self) -> bytes:
        """The file's content, its own checksum included."""
        value = {"format_version": FORMAT_VERSION, **asdict(self)}
        return (json.dumps(value | {"sha256": _sum(value)}, indent=1) + "\n").encode()


def _sum(value: Mapping[str, Any]) -> str:
    """Checksum of a JSON value in a form that whitespace and the order of keys do not change."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def manifest_id(tensors: Mapping[str, TensorEntry], codec: Mapping[str, Any]) -> str:
    """The id of a save: equal for equal tensors under equal names that were packed alike."""
    table = {key: [t.dtype, list(t.shape), t.sha256] for key, t in tensors.items()}
    return _sum({"tensors": table, "codec": dict(codec)})


SHARD_NAME = re.compile(r"model-[0-9a-f]{8}-[0-9]{5}-of-[0-9]{5}\.safetensors")


def shard_names(identity: str, shards: Sequence[ShardEntry]) -> list[str]:
    """Names of a save's shards: equal names for equal files, others for all others."""
    tag = _sum({"id": identity, "shards": [asdict(shard) for shard in shards]})[:8]
    of = len(shards)
    return [f"model-{tag}-{number:05d}-of-{of:05d}.safetensors" for number in range(1, of + 1)]


def tensor_entries(files: Sequence[Path], workers: int | None = None) -> dict[str, TensorEntry]:
    """Read files and say what is in them, checksums included.

    Raises:
        CheckpointError: A file cannot be read, or two hold the same key.
    """
    infos: dict[str, TensorInfo] = {}
    for file in files:
        for key, info in read_header(file).items():
            if key in infos:
                raise CheckpointError(f"{file}: {key} is in {infos[key].file.name} as well.")
            infos[key] = info
    sums = tensor_checksums(infos, workers)
    return {
        key: TensorEntry(info.file.name, DTYPE_NAMES[info.dtype], info.shape, sums[key])
        for key, info in infos.items()
    }


def tensor_checksums(infos: Mapping[str, TensorInfo], workers: int | None = None) -> dict[str, str]:
    """sha256 of each tensor's bytes, several at a time."""
    with ThreadPoolExecutor(workers or min(8, os.cpu_count() or 1)) as pool:
        return dict(zip(infos, pool.map(_checksum, infos.values()), strict=True))


def _checksum(info: TensorInfo) -> str:
    digest = hashlib.sha256()
    with reading_file(info.file), info.file.open("rb") as file:
        left, offset = info.nbytes, info.offset
        while left:
            piece = os.pread(file.fileno(), min(_READ, left), offset)
            if not piece:
                raise CheckpointError(f"{info.file} is cut off.")
            digest.update(piece)
            left -= len(piece)
            offset += len(piece)
    return digest.hexdigest()


def shard_entry(file: Path) -> ShardEntry:
    """What the manifest says of a file."""
    header = header_bytes(file)
    with reading_file(file):
        return ShardEntry(file.stat().st_size, hashlib.sha256(header).hexdigest())


def config_text(config: Mapping[str, Any], identity: str, entry: str) -> bytes:
    """config.json of a packed folder: the model's, and what leads to the manifest."""
    mark = {"format_version": FORMAT_VERSION, "id": identity, "entry": entry}
    value = {**config, CONFIG_KEY: mark, "transformers_weights": SENTENCE}
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write or replace a folder's manifest, at once."""
    replace_file(folder / MANIFEST, manifest.to_bytes())


def read_manifest(folder: str | Path) -> Manifest | None:
    """A folder's manifest, None where there is none.

    Raises:
        CheckpointError: It is damaged, of another format, or names files outside the folder.
    """
    folder = Path(folder)
    if os.path.lexists(folder / NEXT):
        manifest = of_interrupted_save(folder)
        if manifest is not None:
            return manifest
    return _read(folder, MANIFEST) if os.path.lexists(folder / MANIFEST) else None


def finish_interrupted_save(folder: Path) -> None:
    """Put the manifest beside in its place, where config.json is of its save already.

    To be called before another one is written beside: that one would take the place of the only
    manifest that the folder has.
    """
    if os.path.lexists(folder / NEXT) and of_interrupted_save(folder) is not None:
        (folder / NEXT).replace(folder / MANIFEST)
        flush(folder)


def of_interrupted_save(folder: Path) -> Manifest | None:
    """The manifest beside, where config.json is of its save already; None otherwise."""
    try:
        mark = read_json(inside(folder, CONFIG)).get(CONFIG_KEY)
        manifest = _read(folder, NEXT)
    except CheckpointError:
        return None
    return manifest if isinstance(mark, dict) and mark.get("id") == manifest.id else None


def _read(folder: Path, name: str) -> Manifest:
    file = inside(folder, name)
    value = read_json(file)
    version = value.get("format_version")
    if version != FORMAT_VERSION or isinstance(version, bool):
        raise CheckpointError(
            f"{file} has format_version {version!r}, and this version of moe_qlora reads "
            f"{FORMAT_VERSION}: install the version that wrote it ({value.get('written_by')!r})."
        )
    said = value.pop("sha256", None)
    with reading_file(file):
        if said != _sum(value):
            raise CheckpointError(f"{file} is damaged: its checksum does not fit.")
        try:
            return _parse(folder, value)
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise CheckpointError(
                f"{file} is damaged: a field is missing or is of another type ({error!r})."
            ) from error


def _parse(folder: Path, value: dict[str, Any]) -> Manifest:
    """The manifest in a JSON value; KeyError, TypeError or ValueError where it is none."""
    experts = {name: _packed_entry(name, entry) for name, entry in value["experts"].items()}
    shards = {
        name: ShardEntry(_size(entry["nbytes"]), _text(entry["header_sha256"]))
        for name, entry in value["shards"].items()
    }
    tensors = {
        key: TensorEntry(
            _text(e["file"]), _text(e["dtype"]), _shape(e["shape"]), _text(e["sha256"])
        )
        for key, e in value["tensors"].items()
    }
    file = folder / MANIFEST
    for name in shards:
        inside(folder, name)
    if not shards:
        raise CheckpointError(f"{file} names no file.")
    for key, entry in tensors.items():
        if entry.file not in shards:
            raise CheckpointError(f"{file}: {key} is said to be in {entry.file!r}, no file of it.")
    for name, packed in experts.items():
        other = next((alias for alias in packed.aliases if alias in tensors.keys() - experts), None)
        if other is not None:
            raise CheckpointError(f"{file}: {other} is a tensor, and said to be the stack {name}.")
    _check_codec(value["codec"])
    if not isinstance(value["source_config"], dict):
        raise TypeError("source_config is no object")
    if value["id"] != manifest_id(tensors, value["codec"]):
        raise CheckpointError(f"{file} has the id of other tensors.")
    return Manifest(
        value["id"],
        _text(value["written_by"]),
        _text(value["model_type"]),
        dict(value["codec"]),
        experts,
        shards,
        tensors,
        _text(value["config_sha256"]),
        value["source_config"],
    )


def _packed_entry(name: str, value: dict[str, Any]) -> PackedEntry:
    shape, dtype, aliases = _shape(value["shape"]), value["dtype"], value["aliases"]
    if len(shape) < 2 or not all(shape) or dtype not in _FLOATS:
        raise ValueError(f"{name} of shape {shape} and dtype {dtype!r} is no packed stack")
    if not isinstance(aliases, list) or not all(isinstance(alias, str) for alias in aliases):
        raise ValueError(f"{name} is also called {aliases!r}, which are no names")
    return PackedEntry(shape, dtype, tuple(aliases))


def _check_codec(codec: dict[str, Any]) -> None:
    kind, blocksize = codec["kind"], codec["blocksize"]
    storage, compute = codec["storage_dtype"], codec["compute_dtype"]
    if kind not in _KINDS:
        raise ValueError(f"the codec {kind!r} is unknown")
    if type(blocksize) is not int or blocksize < 1 or not isinstance(codec["double_quant"], bool):
        raise ValueError(f"{codec!r} is no codec")
    if storage not in ("int8", "uint8", *_FLOATS) or compute not in (None, *_FLOATS):
        raise ValueError(f"{codec!r} is no codec")


def _shape(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > _MAX_DIMENSIONS:
        raise ValueError(f"{value!r:.80} is no shape")
    return tuple(_size(size) for size in value)


def _size(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value!r:.80} is no size")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.80} is no text")
    return value


def check_folder(
    folder: str | Path, *, checksums: bool = True, workers: int | None = None
) -> Manifest:
    """Check everything that can be checked without building the model.

    Args:
        folder: A packed folder.
        checksums: Read all tensors and compare their checksums, too.
        workers: Threads that do so; None is up to 8.

    Raises:
        CheckpointError: Something is missing, damaged or foreign; the message names it.
    """
    check = FolderCheck(folder, workers, large=checksums)
    check.finish()
    _check_config(check.folder, check.manifest)
    return check.manifest


def _check_config(folder: Path, manifest: Manifest) -> None:
    """Refuse a config.json that says to be of another save; it may also be absent, or plain."""
    if os.path.lexists(folder / CONFIG):
        mark = read_json(folder / CONFIG).get(CONFIG_KEY)
        if mark is not None and (not isinstance(mark, dict) or mark.get("id") != manifest.id):
            raise CheckpointError(
                f"{folder / CONFIG} and {MANIFEST} are of different saves: a save was interrupted, "
                "or files were copied from elsewhere; save again."
            )


def packed_files(folder: Path) -> list[Path] | None:
    """The files of a packed folder, None where it is another: config.json decides, if there is one.

    Raises:
        CheckpointError: It is packed, and something but large tensors' checksums does not fit.
    """
    config = folder / CONFIG
    if os.path.lexists(config):
        if CONFIG_KEY not in read_json(config):
            return None
    elif read_manifest(folder) is None:
        return None
    return [folder / name for name in check_folder(folder, checksums=False).shards]


class FolderCheck:
    """A check of a packed folder whose longest part runs while its files are loaded.

    What is small, which is all that a loader has to make sense of, is checked at once; the
    checksums of large tensors, whose bytes no loader trips over, are compared in threads.

    Args:
        folder: A packed folder.
        workers: Threads; None is up to 8.
        large: Whether to compare large tensors' checksums at all.

    Raises:
        CheckpointError: As `check_folder`.
    """

    def __init__(
        self, folder: str | Path, workers: int | None = None, *, large: bool = True
    ) -> None:
        self.folder = folder = Path(folder)
        manifest = read_manifest(folder)
        if manifest is None:
            raise CheckpointError(f"{folder} has no {MANIFEST}: it was not packed by moe_qlora.")
        self.manifest = manifest
        self._infos: dict[str, TensorInfo] = {}
        for name, shard in manifest.shards.items():
            self._infos |= _check_shard(folder, name, shard, manifest)
        for key in manifest.tensors:
            if key not in self._infos:
                raise CheckpointError(f"{folder / manifest.tensors[key].file} lacks {key}.")
        for name in manifest.experts:
            check_stack(folder, name, manifest)
        small = {k: info for k, info in self._infos.items() if info.nbytes <= _SMALL}
        for key, info in small.items():
            self._compare(key, _checksum(info))
        self._pool = ThreadPoolExecutor(workers or min(8, os.cpu_count() or 1))
        rest = {k: i for k, i in self._infos.items() if large and k not in small}
        # largest first, so that none is left over at the end
        order = sorted(rest, key=lambda key: -rest[key].nbytes)
        self._sums = {key: self._pool.submit(_checksum, rest[key]) for key in order}

    def __deepcopy__(self, memo: dict[int, Any]) -> FolderCheck:
        return self  # transformers copies its quantizer for every tensor

    def _compare(self, key: str, found: str) -> None:
        if found != self.manifest.tensors[key].sha256:
            raise CheckpointError(
                f"{self._infos[key].file}: the bytes of {key} are not those that were written "
                "(their checksum differs): copy the file again."
            )

    def finish(self) -> None:
        """Wait for the rest.

        Raises:
            CheckpointError: A checksum differs.
        """
        try:
            for key, found in self._sums.items():
                self._compare(key, found.result())
        finally:
            self._pool.shutdown(wait=False, cancel_futures=True)


def _check_shard(
    folder: Path, name: str, shard: ShardEntry, manifest: Manifest
) -> dict[str, TensorInfo]:
    file = inside(folder, name)
    with reading_file(file):
        size = file.stat().st_size
    if size != shard.nbytes:
        raise CheckpointError(
            f"{file} has {size} bytes, {shard.nbytes} were written: copy it again."
        )
    if hashlib.sha256(header_bytes(file)).hexdigest() != shard.header_sha256:
        raise CheckpointError(f"{file}: its header is not the one that was written: copy it again.")
    infos = read_header(file)
    for key, info in infos.items():
        entry = manifest.tensors.get(key)
        if entry is None or entry.file != name:
            raise CheckpointError(f"{file} holds {key}, which the manifest does not know of there.")
        if DTYPES.get(entry.dtype) != info.dtype or entry.shape != info.shape:
            raise CheckpointError(
                f"{file}: {key} is {info.dtype} of shape {info.shape}, the manifest says "
                f"{entry.dtype} {entry.shape}."
            )
    return infos


def check_stack(folder: Path, name: str, manifest: Manifest) -> None:
    """Check that a packed stack has the codes and statistics that its shape needs.

    Raises:
        CheckpointError: One is missing, or has another size.
    """
    entry = manifest.experts[name]
    for suffix, (dtype, count) in stack_tensors(entry.shape, manifest.codec).items():
        found = manifest.tensors.get(name + suffix)
        if found is None:
            raise CheckpointError(f"{folder}: the packed stack {name} lacks {name + suffix}.")
        right = math.prod(found.shape) == count or count < 0
        if found.dtype != DTYPE_NAMES[dtype] or not right:
            raise CheckpointError(
                f"{folder}: {name + suffix} is {found.dtype} of shape {found.shape}; a stack of "
                f"shape {entry.shape} has {count} of {DTYPE_NAMES[dtype]} there."
            )


def stack_tensors(
    shape: Sequence[int], codec: Mapping[str, Any]
) -> dict[str, tuple[torch.dtype, int]]:
    """Dtype and number of elements of a packed stack's tensors, by the end of their key.

    A number of -1 stands for any: bitsandbytes' record of what is no tensor is JSON of any length.
    """
    numel = math.prod(shape)
    if codec["kind"] == "int8":
        return {"": (torch.int8, numel), ".SCB": (torch.float32, numel // shape[-1])}
    storage = getattr(torch, codec["storage_dtype"])
    blocks = -(-numel // codec["blocksize"])
    double = codec["double_quant"]
    tensors = {
        "": (storage, (numel + 1) // 2 // storage.itemsize),
        ".absmax": (torch.uint8 if double else torch.float32, blocks),
        ".quant_map": (torch.float32, 16),
        f".quant_state.bitsandbytes__{codec['kind']}": (torch.uint8, -1),
    }
    if double:
        tensors[".nested_absmax"] = (torch.float32, -(-blocks // _NESTED_BLOCK))
        tensors[".nested_quant_map"] = (torch.float32, 256)
    return tensors
