"""The manifest of a packed folder: its files, its packed weights and their codecs.

FORMAT.md in this folder specifies every file and key. In short:

    config.json             names the manifest (the "mark", under `moe_qlora`)
    moe_qlora-<hash>.json   the manifest, named by a checksum of its content; names the shards
    model-<hash>-00001-of-0000N.safetensors
                            the shards, named by a checksum of their content

A file's name changes with its content, so that a save into a folder never touches a file of the
model that is there. Renaming the new config.json over the old one turns the one into the other.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

from ..errors import CheckpointError
from ..models.files import MAX_JSON, parse_json, read_json, read_raw, reading
from ..packing.settings import CodecSettings
from .reader import (
    DTYPE_NAMES,
    Checkpoint,
    TensorInfo,
    header_bytes,
    incomplete,
    inside,
    parse_fields,
)

CONFIG = "config.json"
CONFIG_KEY = "moe_qlora"
FORMAT_VERSION, NATIVE_VERSION = 2, 3
"""Folders packed by one bitsandbytes codec, and folders that also have native (MXFP4) codes.

A reader of version 2 would call the latter damaged.
"""
SENTENCE = (
    "The experts in this folder are packed by moe_qlora: install that package, and load the folder "
    "inside `with moe_qlora.enabled():`."
)
"""Stock transformers quotes it in its error when it is asked to load a packed folder."""
OF_TEXT = (
    "This folder holds a packed {0}: load it by that class, or by AutoModelForImageTextToText, "
    "inside `with moe_qlora.enabled():`. AutoModelForCausalLM can load the text model alone from "
    "an unpacked folder, not from this one."
)
"""Quoted likewise by a load of the text model of a multimodal folder."""

SHARD_NAME = re.compile(r"model-[0-9a-f]{8}-[0-9]{5}-of-[0-9]{5}\.safetensors")
MANIFEST_NAME = re.compile(r"moe_qlora-([0-9a-f]{16})\.json")

_READ = 1 << 20

_T = TypeVar("_T")
_Size = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
_Positive = Annotated[int, Field(strict=True, ge=1, lt=2**63)]
_EXACT = ConfigDict(extra="forbid")


def _check_codec(codec: dict[str, Any]) -> dict[str, Any]:
    known = CodecSettings.from_dict(codec).to_dict()
    if codec != known:
        raise ValueError(f"expected {known}")
    return codec


def _check_native_codec(codec: dict[str, Any] | None) -> dict[str, Any] | None:
    if codec is not None and not CodecSettings.from_dict(_check_codec(codec)).codec.is_kept:
        raise ValueError("expected a codec of native codes")
    return codec


@dataclass(frozen=True, slots=True, config=_EXACT)
class PackedEntry:
    """A packed expert weight: its decoded shape and dtype ("bfloat16"), and its tied names.

    `codec` is set for native codes; None stands for the manifest's codec.
    """

    shape: Annotated[tuple[_Positive, ...], Field(min_length=2, max_length=64)]
    dtype: Annotated[str, Field(pattern="^(float32|float16|bfloat16)$")]
    aliases: tuple[str, ...] = ()
    codec: Annotated[dict[str, Any] | None, AfterValidator(_check_native_codec)] = None


@dataclass(frozen=True, slots=True, config=_EXACT)
class TensorEntry:
    """A stored tensor: its shard, dtype name of the safetensors format, shape, and checksum."""

    file: str
    dtype: str
    shape: Annotated[tuple[_Size, ...], Field(max_length=64)]
    sha256: str


@dataclass(frozen=True, slots=True, config=_EXACT)
class ShardEntry:
    """A shard: its size in bytes, and the checksum of its header."""

    nbytes: _Size
    header_sha256: str


@dataclass(frozen=True, config=_EXACT)
class Manifest:
    """The content of a manifest; FORMAT.md has each key's meaning."""

    id: str
    written_by: str
    model_type: str
    codec: Annotated[dict[str, Any], AfterValidator(_check_codec)]
    experts: dict[str, PackedEntry]  # by name
    shards: Annotated[dict[str, ShardEntry], Field(min_length=1)]  # by file name, in order
    tensors: dict[str, TensorEntry]  # by key
    config: dict[str, Any]  # config.json without what this package adds to it
    source: dict[str, Any] | None = None  # of FORMAT.md; None where a model in memory was saved

    @property
    def settings(self) -> CodecSettings:
        """`codec` as the settings that packed the weights."""
        return CodecSettings.from_dict(self.codec)

    def settings_of(self, name: str) -> CodecSettings:
        """Return the codec of a packed weight, an expert's or a Linear layer's."""
        entry = self.experts.get(name)
        own = None if entry is None else entry.codec
        return self.settings if own is None else CodecSettings.from_dict(own)

    def native_codecs(self) -> dict[str, CodecSettings]:
        """Return the codecs of weights that have their checkpoint's native codes, by name."""
        names = [name for name, entry in self.experts.items() if entry.codec is not None]
        return {name: self.settings_of(name) for name in names}

    @property
    def version(self) -> int:
        """Return the version of the format that the folder needs."""
        native = any(entry.codec is not None for entry in self.experts.values())
        return NATIVE_VERSION if native else FORMAT_VERSION

    @property
    def entry(self) -> str:
        """Return the first shard's name, to which config.json sends transformers."""
        return next(iter(self.shards))

    def to_bytes(self) -> bytes:
        """Return the file's content."""
        value = {"format_version": self.version, **asdict(self)}
        for entry in value["experts"].values():
            if entry["codec"] is None:
                del entry["codec"]
        if self.source is None:
            del value["source"]
        return (json.dumps(value, indent=1) + "\n").encode()

    @property
    def file_name(self) -> str:
        """Return the name of the file, which its content decides."""
        return manifest_name(self.to_bytes())

    def config_bytes(self) -> bytes:
        """Return the content of config.json, with the mark."""
        mark = Mark(self.id, self.file_name, self.entry, self.version)
        ours: dict[str, Any] = {CONFIG_KEY: asdict(mark), "transformers_weights": SENTENCE}
        text, classes = self.config.get("text_config"), self.config.get("architectures")
        if isinstance(text, dict) and classes:
            # AutoModelForCausalLM may load the text model alone, and reads its configuration only.
            ours["text_config"] = text | {"transformers_weights": OF_TEXT.format(classes[0])}
        return (json.dumps(self.config | ours, indent=2, sort_keys=True) + "\n").encode()


@dataclass(frozen=True, slots=True, config=_EXACT)
class Mark:
    """The entry `moe_qlora` of config.json: names the manifest and its first shard."""

    id: str
    manifest: Annotated[str, Field(pattern=f"^{MANIFEST_NAME.pattern}$")]
    entry: Annotated[str, Field(pattern=f"^{SHARD_NAME.pattern}$")]
    format_version: int = FORMAT_VERSION


def manifest_name(content: bytes) -> str:
    """Return the file name of a manifest with this content."""
    return f"moe_qlora-{hashlib.sha256(content).hexdigest()[:16]}.json"


def manifest_id(
    tensors: Mapping[str, TensorEntry],
    codec: Mapping[str, Any],
    experts: Mapping[str, PackedEntry] | None = None,
) -> str:
    """Return the id of a save, a hash of tensors, their names and codecs."""
    table = {key: [t.dtype, list(t.shape), t.sha256] for key, t in tensors.items()}
    own = {name: entry.codec for name, entry in (experts or {}).items() if entry.codec is not None}
    return _digest({"tensors": table, "codec": dict(codec), **({"experts": own} if own else {})})


def shard_names(identity: str, shards: Sequence[ShardEntry]) -> list[str]:
    """Return the names of a save's shards, which contain a hash of the files."""
    tag = _digest({"id": identity, "shards": [asdict(shard) for shard in shards]})[:8]
    of = len(shards)
    return [f"model-{tag}-{number:05d}-of-{of:05d}.safetensors" for number in range(1, of + 1)]


def _digest(value: Mapping[str, Any]) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def tensor_entries(files: Sequence[Path]) -> dict[str, TensorEntry]:
    """Describe every tensor of some safetensors files, checksums included."""
    checkpoint = Checkpoint(files)
    infos = [checkpoint.info(key) for key in checkpoint]
    with ThreadPoolExecutor(reading_threads()) as pool:
        return {
            key: TensorEntry(info.file.name, DTYPE_NAMES[info.dtype], info.shape, digest)
            for key, info, digest in zip(checkpoint, infos, pool.map(checksum, infos), strict=True)
        }


def reading_threads() -> int:
    """Return how many threads read and check files: one for each usable CPU, at most 8."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux alone has it
    return min(8, len(affinity(0)) if affinity else os.cpu_count() or 1)


def checksum(info: TensorInfo) -> str:
    """Return the sha256 of a tensor's bytes, read in pieces."""
    digest = hashlib.sha256()
    with reading(info.file), info.file.open("rb") as file:
        left, offset = info.nbytes, info.offset
        while left:
            piece = os.pread(file.fileno(), min(_READ, left), offset)
            if not piece:
                raise incomplete(info.file, offset, info.offset + info.nbytes)
            digest.update(piece)
            left -= len(piece)
            offset += len(piece)
    return digest.hexdigest()


def shard_entry(file: Path) -> ShardEntry:
    """Describe a shard as the manifest does."""
    header = header_bytes(file)
    with reading(file):
        return ShardEntry(file.stat().st_size, hashlib.sha256(header).hexdigest())


def read_mark(folder: str | Path) -> Mark | None:
    """Return the mark in a folder's config.json; None if there is no config.json or no mark."""
    if not os.path.lexists(Path(folder) / CONFIG):
        return None
    file = inside(Path(folder), CONFIG)
    value = read_json(file)
    return parse_mark(value[CONFIG_KEY], file) if CONFIG_KEY in value else None


def parse_mark(value: Any, file: Path = Path(CONFIG)) -> Mark:
    """Check the entry `moe_qlora` of a config."""
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} is damaged: {CONFIG_KEY} is {value!r:.80}, and no object.")
    return _parse(Mark, value, file, f"{CONFIG_KEY}.")


def read_manifest(folder: str | Path, mark: Mark | None = None) -> Manifest | None:
    """Return the manifest that `mark`, or else config.json, names; None without a mark."""
    folder = Path(folder)
    mark = mark or read_mark(folder)
    if mark is None:
        return None
    file = inside(folder, mark.manifest)
    raw = read_raw(file, MAX_JSON)
    if manifest_name(raw) != mark.manifest:
        raise CheckpointError(f"{file} is damaged: its name is not that of its content.")
    manifest = _parse(Manifest, parse_json(file, raw), file)
    for name in manifest.shards:
        inside(folder, name)
    identity = manifest_id(manifest.tensors, manifest.codec, manifest.experts)
    named = Mark(identity, mark.manifest, manifest.entry, manifest.version)
    if mark != named or manifest.id != identity:
        raise CheckpointError(
            f"{folder / CONFIG} has {CONFIG_KEY} {asdict(mark)}, and that of {mark.manifest} is "
            f"{asdict(named)}: copy the whole folder again."
        )
    return manifest


def is_packed(folder: str | Path) -> bool:
    """True if the folder's config.json has the mark of a packed folder."""
    return read_mark(folder) is not None


def has_manifest(folder: Path) -> bool:
    """True if the folder contains a manifest, whatever config.json says."""
    return any(MANIFEST_NAME.fullmatch(file.name) for file in folder.glob("moe_qlora-*.json"))


def _parse(kind: type[_T], value: dict[str, Any], file: Path, prefix: str = "") -> _T:
    version = value.pop("format_version", None)
    if version not in (FORMAT_VERSION, NATIVE_VERSION) or isinstance(version, bool):
        raise CheckpointError(
            f"{file} has {prefix}format_version {version!r:.80}, and this version of moe_qlora "
            f"reads {FORMAT_VERSION} and {NATIVE_VERSION}: pack the model again, or install the "
            "version that wrote it."
        )
    if kind is Mark:
        value["format_version"] = version
    return parse_fields(kind, value, file, prefix)
