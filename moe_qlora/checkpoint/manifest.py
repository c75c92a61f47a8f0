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
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..packing.settings import CodecSettings
from .reader import DTYPE_NAMES, TensorInfo, header_bytes, inside, read_header, read_json
from .reader import reading as reading_file
from .writer import beside, flush, replace_file

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
    def settings(self) -> CodecSettings:
        """`codec` as the settings that packed the weights."""
        return CodecSettings.from_dict(self.codec)

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
        return dict(zip(infos, pool.map(checksum, infos.values()), strict=True))


def checksum(info: TensorInfo) -> str:
    """sha256 of a tensor's bytes, read a piece at a time."""
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
    CodecSettings.from_dict(value["codec"])
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
