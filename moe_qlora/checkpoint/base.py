"""The two kinds of base that an adapter is merged into: a 16-bit folder, and a packed one.

Both give a model's parameters slice by slice, and say what files the merged folder holds: for a
16-bit base the files that it has, for a packed one those that transformers would save. A folder
that its maker quantized is read as the 16-bit folder it stands for, whose files are cut anew.
"""

from __future__ import annotations

import json
import math
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import dot_natural_key

from ..errors import CheckpointError
from ..kernels.weights import PackedWeight
from ..models import named
from ..packing import codec
from .adapter import Adapter
from .conversion import Disk, DiskLayout, Group, blank, revert, same_bits
from .integrity import (
    canonical_name,
    check_folder,
    model_problems,
    open_shards,
    packed_names,
    parts_of,
    warn_of_changes,
)
from .manifest import CONFIG, CONFIG_KEY, MANIFEST_NAME, Manifest, is_packed
from .prequantized import (
    PrequantizedCheckpoint,
    describe_plain,
    described_method,
    open_plain,
)
from .prequantized.open import MODELOPT_CONFIG
from .reader import INDEX_SUFFIX, SINGLE, Checkpoint, check_link, header_bytes
from .training_codec import SAMPLED_ROWS
from .writer import plan_shards

PACKED_KEYS = ("quantization_config", "transformers_weights", CONFIG_KEY)
"""Keys of config.json that a plain folder does not have."""
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class OutFile:
    """A safetensors file to be written: its keys in order, and what its header says besides."""

    name: str
    keys: tuple[str, ...]
    metadata: Mapping[str, str]


class Base(ABC):
    """A base to merge into."""

    disk: Disk  # of the plain folder
    layout: DiskLayout  # how its tensors make the model's parameters
    checkpoint: Checkpoint  # the base's own files
    keeps_files: bool  # whether the merged folder has the base's files
    model: Any  # on meta, tied

    @abstractmethod
    def files(self, dtypes: Mapping[str, torch.dtype]) -> list[OutFile]:
        """Return the files of the merged folder, given each key's dtype there."""

    @abstractmethod
    def values(self, group: Group, start: int, stop: int | None) -> dict[str, Tensor]:
        """Return rows of the group's parameters, if they can be written back exactly."""

    def first_rows(self, name: str) -> Tensor | None:
        """Return the first rows of a parameter, or all; None where it is not on disk.

        `name` may be that of the model inside this one, or around it.
        """
        known = canonical_name(self.model, name, self.layout.by_name)
        if known is None:
            return None
        group = self.layout.by_name[known]
        rows = min(SAMPLED_ROWS, group.shapes[known][0]) if group.unit else None
        return self.values(group, 0, rows)[known]

    def resize(self, name: str, shape: tuple[int, ...]) -> None:
        """Change the shape of a parameter of the merged folder."""
        group = self.layout.by_name[name]
        if len(group.keys) > 1 or group.converter is not None or group.swap is not None:
            raise CheckpointError(
                f"{name} is not stored as one tensor ({', '.join(group.keys[:2])}), and the "
                f"adapter has it in another shape {shape}; resize the embeddings of the base first."
            )
        self._put(group.keys[0], name, shape, self.disk[group.keys[0]][1])

    def add(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Add a parameter to the merged folder."""
        (key,) = revert(self.model, blank({name: (shape, dtype)}), name)
        self._put(key, name, shape, dtype)

    def _put(self, key: str, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.disk = {**self.disk, key: (shape, dtype)}
        self.layout.put(key, name, shape)

    def drop(self, name: str) -> None:
        """Leave a parameter out of the merged folder."""
        group = self.layout.by_name[name]
        self.disk = {key: info for key, info in self.disk.items() if key not in group.keys}
        self.layout.drop(group)

    def close(self) -> None:
        """Close the files."""
        self.checkpoint.close()


def _check_same(group: Group, first: Mapping[str, Tensor], again: Mapping[str, Tensor]) -> None:
    if first.keys() != again.keys() or not all(
        same_bits(again[key].to(tensor.dtype), tensor) for key, tensor in first.items()
    ):
        raise CheckpointError(
            f"{group.target} cannot be written back as the base has it on disk "
            f"({', '.join(group.keys[:2])}, ...): transformers' conversion of it is not one to one."
        )


def planned_files(
    disk: Disk, dtypes: Mapping[str, torch.dtype], max_shard_size: int | str
) -> list[OutFile]:
    """Return new files for tensors in their order, as transformers names and cuts them."""
    sizes = {key: math.prod(shape) * dtypes[key].itemsize for key, (shape, _) in disk.items()}
    files = []
    shards = plan_shards(sizes, max_shard_size)
    for number, keys in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        # The format wants tensors aligned to their dtype: the widest first.
        order = tuple(sorted(keys, key=lambda key: -dtypes[key].itemsize))
        files.append(OutFile(SINGLE if len(shards) == 1 else name, order, {"format": "pt"}))
    return files


class PlainBase(Base):
    """A 16-bit folder in its original layout, or one that its maker quantized, dequantized.

    Args:
        folder: Of the checkpoint.
        model: Its model on meta.
        makers_config: The quantization_config, where the model's says another one than config.json.
        device: Where a maker's codes are decoded; tensors of groups that have some arrive there.
        max_shard_size: Of new files, where the folder's own cannot be kept.
    """

    def __init__(
        self,
        folder: Path,
        model: nn.Module,
        makers_config: Mapping[str, Any] | None = None,
        *,
        device: torch.device | None = None,
        max_shard_size: int | str = "5GB",
    ) -> None:
        self.folder, self.device, self._limit = folder, device, max_shard_size
        self.checkpoint = makers = open_plain(folder, quantization_config=makers_config)
        self._makers = makers if isinstance(makers, PrequantizedCheckpoint) else None
        self.keeps_files = self._makers is None
        keys = self.checkpoint if self.keeps_files else sorted(self.checkpoint, key=dot_natural_key)
        infos = {key: self.checkpoint.info(key) for key in keys}
        self.disk = {key: (info.shape, info.dtype) for key, info in infos.items()}
        self.model, self.layout = model, DiskLayout(model, self.disk)

    def files(self, dtypes: Mapping[str, torch.dtype]) -> list[OutFile]:
        if not self.keeps_files:
            return planned_files(self.disk, dtypes, self._limit)
        by_file: dict[Path, list[str]] = {file: [] for file in self.checkpoint.files}
        file = self.checkpoint.files[0]
        for key in self.disk:
            if key in self.checkpoint:  # what is new follows the last one
                file = self.checkpoint.info(key).file
            by_file[file].append(key)
        by_file = {file: keys for file, keys in by_file.items() if keys}
        metadata = {file: json.loads(header_bytes(file)).get("__metadata__") for file in by_file}
        return [OutFile(f.name, tuple(keys), metadata[f] or {}) for f, keys in by_file.items()]

    def parameters(self, group: Group, start: int, stop: int | None) -> dict[str, Tensor]:
        """Return rows of the group's parameters, whether or not they can be written back."""
        return self.layout.convert(group, self._tensors(group, start, stop))

    def _tensors(self, group: Group, start: int, stop: int | None) -> dict[str, Tensor]:
        makers = self._makers
        decodes = makers is not None and any(map(makers.is_dequantized, group.keys))
        device = self.device if decodes else None  # codes travel, not what they are decoded to
        places = group.places(start, stop)
        return {key: self.checkpoint.read(key, first, last, device) for key, first, last in places}

    def values(self, group: Group, start: int, stop: int | None) -> dict[str, Tensor]:
        parts, read = group.part(start, stop), self._tensors(group, start, stop)
        values = self.layout.convert(group, read)
        if group.converter is not None:
            first = {parts[key]: tensor for key, tensor in read.items()}
            _check_same(group, first, self.layout.restore(group, values))
        return values


class PackedWeights:
    """The packed weights of a folder, experts' and Linear layers', one in memory at a time.

    `keys` has the keys that hold each, by its name; the model on meta, the shapes of Linear layers.
    """

    def __init__(
        self, folder: Path, manifest: Manifest, checkpoint: Checkpoint, model: nn.Module
    ) -> None:
        self._folder, self._manifest, self._checkpoint = folder, manifest, checkpoint
        self._plain = model.state_dict()
        self.keys = packed_names(manifest)
        self._last: tuple[str, PackedWeight] | None = None

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the decoded weight."""
        entry = self._manifest.experts.get(name)
        return tuple(entry.shape if entry else self._plain[name].shape)

    def weight(self, name: str) -> PackedWeight:
        """Return a packed weight; the last one is kept, for its next slice."""
        if self._last is not None and self._last[0] == name:
            return self._last[1]
        shape, entry = self.shape(name), self._manifest.experts.get(name)
        settings = self._manifest.settings_of(name)
        dtype = getattr(torch, entry.dtype) if entry else None
        if dtype is None and not settings.codec.has_record:
            dtype = self._plain[name].dtype
        try:
            parts = parts_of(name, self.keys[name], self._checkpoint.read)
            weight = codec.restore(parts, shape, dtype, settings)
        except ValueError as error:
            raise CheckpointError(f"{self._folder}: {name} {error}.") from error
        self._last = (name, weight)
        return weight


class PackedBase(Base):
    """A folder that this package packed, decoded; in the layout that transformers would save."""

    def __init__(self, folder: Path, model: nn.Module, max_shard_size: int | str) -> None:
        self.manifest = check_folder(folder)
        warn_of_changes(folder, self.manifest)
        self._limit, self.keeps_files = max_shard_size, False
        self.checkpoint = open_shards(folder, self.manifest)
        self.model = model
        self._weights = PackedWeights(folder, self.manifest, self.checkpoint, model)
        parts = {key for keys in self._weights.keys.values() for key in keys} - {
            *self._weights.keys
        }
        problems = [
            *model_problems(self.manifest, model),
            *(
                f"{key} is no tensor of a {type(model).__name__}"
                for key in self.checkpoint
                if key not in parts and key not in model.state_dict()
            ),
        ]
        if problems:
            raise CheckpointError(
                f"{folder}: {problems[0]}: config.json is not the one it was saved with."
            )
        self.params: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for key in self.checkpoint:
            if key in self._weights.keys:
                entry = self.manifest.experts.get(key)
                dtype = getattr(torch, entry.dtype) if entry else self._weights.weight(key).dtype
                self.params[key] = (self._weights.shape(key), dtype)
            elif key not in parts:
                info = self.checkpoint.info(key)
                self.params[key] = (info.shape, info.dtype)
        on_disk = revert(model, blank(self.params), type(model).__name__)
        self.disk = {
            key: (tuple(on_disk[key].shape), on_disk[key].dtype)
            for key in sorted(on_disk, key=dot_natural_key)
        }
        self.layout = DiskLayout(model, self.disk)
        lost = self.params.keys() - self.layout.by_name
        if lost:
            raise CheckpointError(
                f"{folder}: {sorted(lost)[0]} of the packed model has no name in the original "
                "layout that leads back to it, so that it cannot be written."
            )

    def files(self, dtypes: Mapping[str, torch.dtype]) -> list[OutFile]:
        return planned_files(self.disk, dtypes, self._limit)

    def values(self, group: Group, start: int, stop: int | None) -> dict[str, Tensor]:
        values = {name: self._rows(name, start, stop) for name in group.shapes}
        if group.converter is not None:
            again = self.layout.convert(group, self.layout.restore(group, values))
            _check_same(group, values, again)
        return values

    def _rows(self, name: str, start: int, stop: int | None) -> Tensor:
        if name not in self._weights.keys:
            return self.checkpoint.read(name, start, stop)
        weight = self._weights.weight(name)
        return codec.unpack_range(weight, start, weight.shape[0] if stop is None else stop)


def stored_apart(base: Base, stored: list[str]) -> bool:
    """Whether the base stores several that are not equal: transformers then unties them."""
    if len(stored) < 2:
        return False
    first = base.layout.by_name[stored[0]]
    for start, stop in first.slices():
        left = base.values(first, start, stop)[stored[0]]
        others = (base.values(base.layout.by_name[n], start, stop)[n] for n in stored[1:])
        if not all(same_bits(left, other) for other in others):
            return True
    return False


def open_base(
    folder: Path,
    adapter: Adapter | None = None,
    trust_remote_code: bool = False,
    max_shard_size: int | str = "5GB",
) -> PlainBase | PackedBase:
    """Open a checkpoint folder with its model on meta.

    Of a multimodal checkpoint that is its text model, if the adapter was trained on that alone.
    """
    source = resolve_checkpoint(folder, trust_remote_code, packed=True)

    def build(source: named.Source) -> Any:
        for name in PACKED_KEYS:
            vars(source.config).pop(name, None)
        vars(source.config.get_text_config()).pop("transformers_weights", None)
        model: Any = named.build(source, trust_remote_code=trust_remote_code)
        model.tie_weights()
        return model

    model, text = build(source), named.text_model(source)
    if adapter is not None and text is not None and not adapter.is_on(model):
        model = build(text)
    if is_packed(folder):
        return PackedBase(folder, model, max_shard_size)
    return PlainBase(folder, model, max_shard_size=max_shard_size)


def resolve_checkpoint(
    folder: Path, trust_remote_code: bool, *, packed: bool = False
) -> named.Source:
    """Return the source of a folder's model; of one that its maker quantized, dequantized.

    What bitsandbytes quantized is refused, and what this package `packed` unless that is allowed.
    Makers' methods are left to the reader, which refuses what it does not read.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder: name one that holds a checkpoint.")
    if packed and is_packed(folder):
        return named.resolve(str(folder), trust_remote_code=trust_remote_code)
    source = named.resolve(str(folder), trust_remote_code=trust_remote_code)
    if described_method(source.config) is not None:
        describe_plain(source.config)
    quantized: Any = getattr(source.config, "quantization_config", None)
    if quantized is not None:
        settings = quantized if isinstance(quantized, Mapping) else quantized.to_dict()
        method = settings.get("quant_method") or "bitsandbytes"
        wanted = "the 16-bit checkpoint" + ", or a folder that moe_qlora packed" * packed
        raise CheckpointError(f"{folder} is quantized ({method}); name {wanted}.")
    return source


_WEIGHTS = (".safetensors", INDEX_SUFFIX, ".bin.index.json")
_NEVER = (
    *(".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".h5", ".msgpack", ".npz", ".npy"),
    *(".gguf", ".onnx", ".ot", ".tflite", ".partial"),
)
_FOLDERS = ("additional_chat_templates",)


def auxiliary_files(source: Path) -> dict[Path, Path]:
    """Return files by their path in the folder; no configurations, weights, adapters, hidden files.

    A link that leads out of the folder is a `CheckpointError`: its target is not the model's.
    """
    files: list[Path] = []
    for file in sorted(source.iterdir()):
        name = file.name
        if file.is_dir():
            files += [file, *sorted(file.rglob("*"))] if name in _FOLDERS else []
        elif not (
            name.startswith((".", "adapter_"))
            or name in (CONFIG, MODELOPT_CONFIG)
            or MANIFEST_NAME.fullmatch(name)
            or name.lower().endswith(_WEIGHTS + _NEVER)
        ):
            files.append(file)
    for file in files:
        check_link(file, source)
    return {file.relative_to(source): file for file in files if file.is_file()}


def copy_files(files: Mapping[Path, Path], folder: Path) -> None:
    """Copy files, given by their path in the folder."""
    for name, file in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, folder / name)
