"""Packed folders: the manifest, and a check of the folder against it, its parts and its model.

FORMAT.md in this folder specifies every file and key: config.json names the manifest (the "mark",
under `moe_qlora`), which names the shards. A file's name changes with its content, so that a save
into a folder never touches a file of the model that is there. Checksums find accidental damage;
further checks cover all that decoding and loading rely on.
"""

import hashlib
import json
import os
import re
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from functools import lru_cache, partial
from pathlib import Path
from typing import Annotated, Any, Self

import torch
from pydantic import AfterValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from ..errors import CheckpointError
from ..kernels.weights import PackedWeight
from ..models.files import MAX_JSON, parse_json, read_json, read_raw, reading
from ..packing.bnb4bit import RECORD, SCALES
from ..packing.codec import restore
from ..packing.settings import CodecSettings
from ..versions import installed_version
from ..world import world
from .folder import (
    DTYPE_NAMES,
    INDEX,
    INDEX_SUFFIX,
    SINGLE,
    Checkpoint,
    ShardWriter,
    check_folder,
    inside,
    parse_fields,
    shard_limit,
)

CONFIG = "config.json"
CONFIG_KEY = "moe_qlora"
# Stock transformers quotes it when it is asked to load a packed folder.
SENTENCE = (
    "The experts in this folder are packed by moe_qlora: install that package, and load the folder "
    "inside `with moe_qlora.enabled():`."
)
OF_TEXT = (
    "This folder holds a packed {0}: load it by that class, or by AutoModelForImageTextToText, "
    "inside `with moe_qlora.enabled():`. AutoModelForCausalLM can load the text model alone from "
    "an unpacked folder, not from this one."
)

SHARD_NAME = re.compile(r"model-[0-9a-f]{8}-[0-9]{5}-of-[0-9]{5}\.safetensors")
MANIFEST_NAME = re.compile(r"moe_qlora-([0-9a-f]{16})\.json")
OURS = re.compile(f"{SHARD_NAME.pattern}|{MANIFEST_NAME.pattern}")  # names of packed saves

_PIECE = 4 << 20  # that is hashed at once
_SMALL = 1 << 16
_HEADER = 1 << 18  # bytes reserved in a shard: some 1,500 tensors
_THREADS = 8  # that hash
INT8_FORMAT = ".weight_format"  # tensor of bitsandbytes' int8 Linear layers

_Positive = Annotated[int, Field(strict=True, ge=1, lt=2**63)]
_Codec = Annotated[dict[str, Any], AfterValidator(lambda v: CodecSettings.from_dict(v).to_dict())]
_WeightMap: Any = Annotated[dict[str, str], Field(min_length=1)]  # of an index: file by key
_EXACT = ConfigDict(extra="forbid")


@dataclass(frozen=True, slots=True, config=_EXACT)
class PackedEntry:
    """A packed expert weight, decoded; `codec` is that of native codes, None the manifest's."""

    shape: Annotated[tuple[_Positive, ...], Field(min_length=2, max_length=64)]
    dtype: Annotated[str, Field(pattern="^(float32|float16|bfloat16)$")]
    aliases: tuple[str, ...] = ()
    codec: _Codec | None = None


@dataclass(frozen=True, slots=True, config=_EXACT)
class TensorEntry:
    """A stored tensor: its shard, dtype name of the safetensors format, shape, and checksum."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    sha256: str


@dataclass(frozen=True, slots=True, config=_EXACT)
class Mark:
    """The entry `moe_qlora` of config.json: names the manifest and its first shard."""

    id: str
    manifest: Annotated[str, Field(pattern=f"^{MANIFEST_NAME.pattern}$")]
    entry: Annotated[str, Field(pattern=f"^{SHARD_NAME.pattern}$")]
    format_version: int


@dataclass(frozen=True, config=_EXACT)
class Manifest:
    """The content of a manifest; FORMAT.md has each key's meaning."""

    id: str
    written_by: str
    model_type: str
    codec: _Codec
    experts: dict[str, PackedEntry]  # by name
    shards: Annotated[dict[str, dict[str, Any]], Field(min_length=1)]  # by file name, in order
    tensors: dict[str, TensorEntry]  # by key
    config: dict[str, Any]  # config.json without what this package adds to it
    source: dict[str, Any] | None = None  # by earlier versions: the checkpoint that was packed

    @property
    def settings(self) -> CodecSettings:
        """`codec` as the settings that packed the weights."""
        return CodecSettings.from_dict(self.codec)

    def settings_of(self, name: str) -> CodecSettings:
        """Return the codec of a packed weight, an expert's or a Linear layer's."""
        entry = self.experts.get(name)
        return CodecSettings.from_dict((entry and entry.codec) or self.codec)

    def native_codecs(self) -> dict[str, CodecSettings]:
        """Return the codecs of weights that have their checkpoint's native codes, by name."""
        names = [name for name, entry in self.experts.items() if entry.codec is not None]
        return {name: self.settings_of(name) for name in names}

    @property
    def version(self) -> int:
        """The version of the format: 3 with native (MXFP4) codes, else 2."""
        return 3 if self.native_codecs() else 2

    def to_bytes(self) -> bytes:
        given = asdict(self, dict_factory=lambda items: {k: v for k, v in items if v is not None})
        return (json.dumps({"format_version": self.version, **given}, indent=1) + "\n").encode()

    @property
    def file_name(self) -> str:
        return manifest_name(self.to_bytes())

    def config_bytes(self) -> bytes:
        mark = Mark(self.id, self.file_name, next(iter(self.shards)), self.version)
        ours: dict[str, Any] = {CONFIG_KEY: asdict(mark), "transformers_weights": SENTENCE}
        text, classes = self.config.get("text_config"), self.config.get("architectures")
        if isinstance(text, dict) and classes:
            # AutoModelForCausalLM may load the text model alone, and reads its configuration only.
            ours["text_config"] = text | {"transformers_weights": OF_TEXT.format(classes[0])}
        return (json.dumps(self.config | ours, indent=2, sort_keys=True) + "\n").encode()


def manifest_name(content: bytes) -> str:
    """Return the file name of a manifest with this content."""
    return f"moe_qlora-{hashlib.sha256(content).hexdigest()[:16]}.json"


def _digest(value: Mapping[str, Any]) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _checksum(files: Checkpoint, key: str) -> str:
    digest, nbytes = hashlib.sha256(), files[key].nbytes
    for start in range(0, nbytes, _PIECE):
        digest.update(files.read_bytes(key, start, min(start + _PIECE, nbytes)).numpy().data)
    return digest.hexdigest()


def write_packed(
    work: Path,
    tensors: Iterable[tuple[str, Tensor]],
    max_shard_size: int | str,
    experts: Mapping[str, PackedEntry],
    settings: CodecSettings,
    model: nn.Module,
) -> Manifest:
    """Write shards, manifest and config.json of a save, one tensor at a time."""
    files, limit = list[Path](), shard_limit(max_shard_size)
    with ExitStack() as stack:
        writer: ShardWriter | None = None
        for key, tensor in tensors:
            while writer is None or not writer.append(key, tensor, limit):
                files.append(work / f"shard-{len(files):05d}.safetensors")
                writer = ShardWriter(files[-1], {}, _HEADER)
                stack.enter_context(writer)
            del tensor  # before the next is packed
    codec, written = settings.to_dict(), Checkpoint(files)
    with ThreadPoolExecutor(_THREADS) as pool:
        sums = pool.map(partial(_checksum, written), written)
        table = {
            key: (DTYPE_NAMES[info.dtype], info.shape, digest)
            for (key, info), digest in zip(written.items(), sums, strict=True)
        }
    own = {name: entry.codec for name, entry in experts.items() if entry.codec is not None}
    identity = _digest({"tensors": table, "codec": codec, **({"experts": own} if own else {})})
    # which tensors lie in which file decides the names, as much as their content
    tag = _digest({"id": identity, "files": [info.file.name for info in written.values()]})[:8]
    names = {
        file: f"model-{tag}-{number:05d}-of-{len(files):05d}.safetensors"
        for number, file in enumerate(files, 1)
    }
    for file, name in names.items():
        file.rename(work / name)
    config = own_config(work)
    quantization = config["quantization_config"] = dict(config.get("quantization_config") or {})
    # Linear layers that stay unpacked
    stock = world().stock_class
    plain = [name for name, module in model.named_modules() if stock(module) is nn.Linear]
    old = [n for n in quantization.get("llm_int8_skip_modules") or [] if n not in plain]
    exact = [rf"{re.escape(name)}$" for name in plain]
    quantization["llm_int8_skip_modules"] = list(dict.fromkeys([*old, *exact])) or None
    manifest = Manifest(
        id=identity,
        # A plain checkout on the path has no metadata to ask.
        written_by=f"moe_qlora {installed_version('moe-qlora') or '(not installed)'}",
        model_type=str(config.get("model_type", "")),
        codec=codec,
        experts=dict(experts),
        shards={name: {"nbytes": (work / name).stat().st_size} for name in names.values()},
        tensors={k: TensorEntry(names[i.file], *table[k]) for k, i in written.items()},
        config=config,
    )
    (work / manifest.file_name).write_bytes(manifest.to_bytes())
    (work / CONFIG).write_bytes(manifest.config_bytes())
    return manifest


def own_config(folder: Path) -> dict[str, Any]:
    """Return a folder's config.json without what this package adds to it."""
    config = read_json(inside(folder, CONFIG))
    if isinstance(text := config.get("text_config"), dict):
        text.pop("transformers_weights", None)
    return {k: v for k, v in config.items() if k not in (CONFIG_KEY, "transformers_weights")}


def is_packed(folder: str | Path) -> bool:
    """True if the folder's config.json has the mark of a packed folder."""
    return _read_mark(Path(folder)) is not None


def parse_mark(value: Any, file: Path = Path(CONFIG)) -> Mark:
    """Check the entry `moe_qlora` of a config."""
    version = value.get("format_version") if isinstance(value, dict) else value
    if version not in (2, 3):
        raise CheckpointError(
            f"{file} has {CONFIG_KEY}.format_version {version!r:.80}; this version of moe_qlora "
            "reads 2 and 3: pack the model again, or install the version that wrote it."
        )
    return parse_fields(Mark, value, file, f"{CONFIG_KEY}.")


def _read_mark(folder: Path) -> Mark | None:
    if not os.path.lexists(folder / CONFIG):
        return None
    value = read_json(file := inside(folder, CONFIG))
    return parse_mark(value[CONFIG_KEY], file) if CONFIG_KEY in value else None


def read_manifest(folder: str | Path) -> Manifest | None:
    """Return the manifest that config.json names; None without a mark."""
    if (mark := _read_mark(folder := Path(folder))) is None:
        return None
    raw = read_raw(file := inside(folder, mark.manifest), MAX_JSON)
    if manifest_name(raw) != mark.manifest:
        raise CheckpointError(f"{file} is damaged: its name is not that of its content.")
    value = parse_json(file, raw)
    value.pop("format_version", None)  # the mark's
    manifest = parse_fields(Manifest, value, file)
    for name in manifest.shards:
        inside(folder, name)
    return manifest


class FolderCheck:
    """A packed folder, open and checked against its manifest.

    Checksums are compared while files are loaded, only those of small tensors if not `large`.
    """

    def __init__(self, folder: str | Path, *, large: bool = True) -> None:
        self.folder = folder = Path(folder)
        manifest = read_manifest(folder)
        if manifest is None:
            raise CheckpointError(f"{folder} was not packed by moe_qlora: see its {CONFIG}.")
        self.manifest = manifest
        self.checkpoint = files = Checkpoint([folder / name for name in manifest.shards])
        held = {k: (i.file.name, DTYPE_NAMES[i.dtype], i.shape) for k, i in files.items()}
        said = {k: (t.file, t.dtype, t.shape) for k, t in manifest.tensors.items()}
        for key in held.keys() | said:
            if held.get(key) != said.get(key):
                raise CheckpointError(
                    f"{folder}: the shards hold {key} as {held.get(key)}, the manifest says "
                    f"{said.get(key)}: copy the whole folder again."
                )
        keys = [key for key, info in files.items() if large or info.nbytes <= _SMALL]
        self._pool = ThreadPoolExecutor(_THREADS)
        self._sums = zip(keys, self._pool.map(partial(_checksum, files), keys), strict=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # transformers copies its quantizer for every tensor

    def check_model(self, model: Any) -> None:
        """Compare the manifest with the meta model."""
        from ..packing.parametrize import is_packed_linear  # imports bitsandbytes, which prints

        manifest, state = self.manifest, model.state_dict()
        layers = {f"{n}.weight": m for n, m in model.named_modules() if hasattr(m, "out_features")}
        # In a load, bitsandbytes has replaced its layers already, if its config packs any.
        linears = {name for name, module in layers.items() if is_packed_linear(module)}
        packed, known, problem = packed_names(manifest), set[str](), ""
        for name, entry in manifest.tensors.items():
            own, expert = canonical_name(model, name, state), manifest.experts.get(name)
            if own is None:  # a statistic, or of a larger model than this one
                continue
            known.add(own)
            shape, stored = tuple(state[own].shape), (expert or entry).shape
            if expert is None and name in packed:
                if own not in (linears or layers):
                    problem = f"{name} is packed, and neither config.json nor the manifest says so"
            elif stored != shape:
                problem = f"{name} has the shape {stored}, the model's config gives {shape}"
        if type(model).__name__ in (manifest.config.get("architectures") or ()):
            # A folder of this very class has all tensors but tied ones.
            known |= {alias for entry in manifest.experts.values() for alias in entry.aliases}
            known |= set(getattr(model, "all_tied_weights_keys", None) or ())
            if missing := missing_names(model, known):
                problem = f"{missing[0]} is missing"
        if problem:
            raise CheckpointError(
                f"{self.folder}: {problem}: config.json is not the one it was saved with, or files "
                "are damaged."
            )

    def damage(self) -> Iterator[str]:
        """Wait for the checksums; yield a sentence for each that differs."""
        for key, digest in self._sums:
            if digest != self.manifest.tensors[key].sha256:
                yield (
                    f"{self.checkpoint[key].file}: the bytes of {key} are not those that were "
                    "written (their checksum differs): copy the file again."
                )
        self._pool.shutdown(wait=False)

    def finish(self) -> Manifest:
        """Wait for the checksums; return the manifest."""
        for problem in self.damage():
            raise CheckpointError(problem)
        return self.manifest


def open_checkpoint(folder: str | Path) -> Checkpoint:
    """Open the files that manifest or index name, or the only one; compare no large checksums."""
    folder = Path(folder)
    check_folder(folder)
    if is_packed(folder):
        check = FolderCheck(folder, large=False)
        check.finish()
        return check.checkpoint
    # transformers reads model.safetensors, whatever an index beside it says
    found = [file.name for file in folder.glob(f"*{INDEX_SUFFIX}")]
    if os.path.lexists(folder / SINGLE) or not found:
        with reading(folder):
            names = {file.name for file in folder.glob("*.safetensors") if file.is_file()}
        names = names & {SINGLE} or {name for name in names if not SHARD_NAME.fullmatch(name)}
        if len(names) != 1:
            ends = (".gguf", ".bin", ".pt", ".pth")
            others = [file.name for file in folder.glob("*") if file.suffix in ends]
            seen = f"{len(names)} safetensors files and no index of those that belong together"
            if others and not names:
                kind = "GGUF" if others[0].endswith("gguf") else "a pickle"
                seen = f"no safetensors file but {others[0]}, {kind}, which is never read"
            raise CheckpointError(f"{folder} holds {seen}: name the model in safetensors.")
        return Checkpoint([inside(folder, names.pop())])
    if len(found) > 1 and INDEX not in found:
        raise CheckpointError(f"{folder} holds {len(found)} index files: leave one.")
    index = inside(folder, INDEX if INDEX in found else found[0])
    said = read_json(index, MAX_JSON).get("weight_map")
    weight_map: dict[str, str] = parse_fields(_WeightMap, said, index, "weight_map.")
    checkpoint = Checkpoint([inside(folder, name) for name in dict.fromkeys(weight_map.values())])
    for key, name in weight_map.items():
        if key not in checkpoint or checkpoint[key].file.name != name:
            raise CheckpointError(f"{index}: {name} does not hold {key}: a file is damaged.")
    return checkpoint


def canonical_name(model: Any, name: str, names: Container[str]) -> str | None:
    """Return the name with or without `base_model_prefix`, whichever is in `names`, or None."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    return next((n for n in (name, prefix + name, name.removeprefix(prefix)) if n in names), None)


def packed_names(manifest: Manifest) -> dict[str, tuple[str, ...]]:
    """Return the keys of each packed weight, an expert's or a Linear layer's, by its name."""
    keys, names, record = manifest.tensors, {}, RECORD + manifest.codec["kind"]
    for name in keys:
        module = name.removesuffix(".weight")
        int8 = {module + SCALES, module + INT8_FORMAT} & keys.keys() if module != name else set()
        if name in manifest.experts or name + record in keys or int8:
            own = (k for k in keys if k == name or k.startswith(f"{name}.") or k in int8)
            names[name] = tuple(own)
    return names


class PackedWeights:
    """The packed weights of a folder; `plain` has shape and dtype of each Linear layer's weight."""

    def __init__(
        self, manifest: Manifest, files: Checkpoint, plain: Mapping[str, Tensor] | None = None
    ) -> None:
        self._manifest, self._files, self._plain = manifest, files, plain or {}
        self.keys = packed_names(manifest)
        self.weight = lru_cache(1)(self.read)  # for the next slice of the same weight

    def read(self, name: str, device: Any = None) -> PackedWeight:
        """Read a packed weight to a device (default: the CPU)."""
        entry, settings = self._manifest.experts.get(name), self._manifest.settings_of(name)
        parts = {}
        for key in self.keys.get(name, ()):
            if not key.endswith(INT8_FORMAT):
                end = SCALES if key.endswith(SCALES) else key.removeprefix(name)
                parts[end] = self._files.fetch(key, device=device)()
        if entry is not None:
            shape, dtype = entry.shape, getattr(torch, entry.dtype)
        else:
            plain = self._plain[name]
            shape, dtype = plain.shape, None if settings.codec.has_record else plain.dtype
        try:
            return restore(parts, shape, dtype, settings)
        except ValueError as error:
            place = self._files.files[0].parent
            raise CheckpointError(f"{place}: {name} {error}.") from error


def missing_names(model: Any, known: Collection[str]) -> list[str]:
    """Return the model's tensors that are not among these, and that a load may not lack."""
    ignored = "|".join(getattr(model, "_keys_to_ignore_on_load_missing", None) or ())
    lacking = sorted(model.state_dict().keys() - known)
    return [name for name in lacking if not (ignored and re.search(ignored, name))]
