"""The two kinds of base that an adapter is merged into: a 16-bit folder, and a packed one.

Both give a model's parameters slice by slice, and say what the merged folder holds: of a 16-bit
base the very files that it has, of a packed one what transformers would save.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import dot_natural_key

from ..errors import CheckpointError
from ..packing import codec
from ..packing.codec import PackedWeight
from .conversion import DiskLayout, Group, revert, same_bits
from .integrity import check_folder, open_checkpoint
from .manifest import Manifest
from .reader import INDEX_SUFFIX, SINGLE, Checkpoint, header_bytes, inside
from .writer import plan_shards

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

_QUANT_STATE = ".quant_state.bitsandbytes__"
_SCALES = ".SCB"
_INT8_FORMAT = ".weight_format"


@dataclass(frozen=True)
class OutFile:
    """A safetensors file to be written: its keys in order, and what its header says besides."""

    name: str
    keys: tuple[str, ...]
    metadata: Mapping[str, str]


class Base(ABC):
    """Attributes common to both kinds.

    Attributes:
        disk: Shape and dtype of each tensor of the plain folder by its key.
        layout: How these are the model's parameters.
        rounded: Whether packed weights have lost already what they lose in training.
    """

    disk: dict[str, tuple[tuple[int, ...], torch.dtype]]
    layout: DiskLayout
    rounded = False

    @abstractmethod
    def files(self, dtypes: Mapping[str, torch.dtype]) -> list[OutFile]:
        """The files of the merged folder, given each key's dtype there."""

    @abstractmethod
    def values(self, group: Group, start: int, stop: int | None) -> dict[str, Tensor]:
        """Rows of the group's parameters, having seen that the way to the disk and back is exact.

        Raises:
            CheckpointError: It is not, or a tensor cannot be read.
        """

    @abstractmethod
    def read(self, key: str, start: int, stop: int | None) -> Tensor:
        """Rows of a tensor that is in no parameter, or is one as it lies."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the files."""

    def check_way_back(self, group: Group) -> CheckpointError:
        """What to raise where restoring a group does not give what was read."""
        return CheckpointError(
            f"{group.target} cannot be written back as the base has it on disk "
            f"({', '.join(group.keys[:2])}, ...): transformers' conversion of it is not one to one."
        )


class PlainBase(Base):
    """A 16-bit folder in its original layout.

    Args:
        folder: Holds safetensors files.
        model: Its model on meta.
    """

    def __init__(self, folder: Path, model: nn.Module) -> None:
        self.checkpoint = open_checkpoint(folder)
        infos = {key: self.checkpoint.info(key) for key in self.checkpoint}
        self.disk = {key: (info.shape, info.dtype) for key, info in infos.items()}
        self.layout = DiskLayout(model, self.disk)

    def files(self, dtypes: Mapping[str, torch.dtype]) -> list[OutFile]:
        by_file: dict[Path, list[str]] = {file: [] for file in self.checkpoint.files}
        for key in self.disk:
            by_file[self.checkpoint.info(key).file].append(key)
        return [OutFile(file.name, tuple(keys), _metadata(file)) for file, keys in by_file.items()]

    def parameters(self, group: Group, start: int, stop: int | None) -> dict[str, Tensor]:
        """Rows of the group's parameters, however they would be written."""
        return self.layout.convert(group, self._tensors(group, start, stop))

    def _tensors(self, group: Group, start: int, stop: int | None) -> dict[str, Tensor]:
        last = stop if group.unit == "row" else None
        return {key: self.read(key, start, last) for key in group.part(start, stop)}

    def values(self, group: Group, start: int, stop: int | None) -> dict[str, Tensor]:
        parts, read = group.part(start, stop), self._tensors(group, start, stop)
        values = self.layout.convert(group, read)
        if group.converter is not None:
            back = self.layout.restore(group, values)
            if back.keys() != set(parts.values()) or not all(
                same_bits(back[parts[key]].to(tensor.dtype), tensor) for key, tensor in read.items()
            ):
                raise self.check_way_back(group)
        return values

    def read(self, key: str, start: int, stop: int | None) -> Tensor:
        if stop is None:
            return self.checkpoint.read(key)
        return self.checkpoint.read(key, start, stop)

    def close(self) -> None:
        self.checkpoint.close()


def _metadata(file: Path) -> dict[str, str]:
    found = json.loads(header_bytes(file)).get("__metadata__")
    return dict(found) if isinstance(found, dict) else {}


class PackedWeights:
    """The packed weights of a folder: expert stacks and Linear layers, one in memory at a time.

    Args:
        folder: Holds a manifest, and has been checked.
        manifest: Its manifest.
        checkpoint: Its files.
        model: Its model on meta, which knows the shapes of Linear layers.

    Attributes:
        keys: Each packed weight by name, and the keys that hold it.
    """

    def __init__(
        self, folder: Path, manifest: Manifest, checkpoint: Checkpoint, model: nn.Module
    ) -> None:
        self._folder, self._manifest, self._checkpoint = folder, manifest, checkpoint
        self._plain = model.state_dict()
        self.keys = packed_names(manifest)
        self._held: tuple[str, PackedWeight] | None = None

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the decoded weight.

        Raises:
            CheckpointError: The model has no such weight.
        """
        entry = self._manifest.experts.get(name)
        if entry is None and name not in self._plain:
            raise CheckpointError(
                f"{self._folder}: {name} is no tensor of the model: config.json is not the one it "
                "was saved with."
            )
        return tuple(entry.shape if entry else self._plain[name].shape)

    def stack(self, name: str) -> PackedWeight:
        """A packed weight; the last one is kept, for its next slice.

        Raises:
            CheckpointError: Its tensors do not belong together.
        """
        if self._held is not None and self._held[0] == name:
            return self._held[1]
        shape, entry = self.shape(name), self._manifest.experts.get(name)
        settings = self._manifest.settings
        keys = [key for key in self.keys[name] if not key.endswith(_INT8_FORMAT)]
        stats = {
            _SCALES if key.endswith(_SCALES) else key.removeprefix(name): self._checkpoint.read(key)
            for key in keys
            if key != name
        }
        dtype = getattr(torch, entry.dtype) if entry else self._plain[name].dtype
        try:
            stack = codec.restore(self._checkpoint.read(name), stats, shape, dtype, settings)
        except ValueError as error:
            raise CheckpointError(f"{self._folder}: {name}: {error}.") from error
        self._held = (name, stack)
        return stack


class PackedBase(Base):
    """A folder that this package packed, decoded; in the layout that transformers would save.

    Args:
        folder: Holds a manifest.
        model: Its model on meta.
        max_shard_size: Of the plain files.
    """

    rounded = True

    def __init__(self, folder: Path, model: nn.Module, max_shard_size: int | str) -> None:
        self.manifest = check_folder(folder)
        self._limit = max_shard_size
        self.checkpoint = Checkpoint.of_files(
            [inside(folder, name) for name in self.manifest.shards]
        )
        self._folder = folder
        self._model: Any = model
        self._weights = PackedWeights(folder, self.manifest, self.checkpoint, model)
        self.params = self._parameters()
        shown = {
            name: torch.empty(shape, dtype=dtype, device="meta")
            for name, (shape, dtype) in self.params.items()
        }
        made = revert(model, shown, type(model).__name__)
        self.disk = {
            key: (tuple(made[key].shape), made[key].dtype)
            for key in sorted(made, key=dot_natural_key)
        }
        self.layout = DiskLayout(model, self.disk)
        lost = self.params.keys() - {name for one in self.layout.groups for name in one.shapes}
        if lost:
            raise CheckpointError(
                f"{folder}: {sorted(lost)[0]} of the packed model has no name in the original "
                "layout that leads back to it, so that it cannot be written."
            )

    def _parameters(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each decoded parameter and buffer."""
        parts = {key for keys in self._weights.keys.values() for key in keys}
        found = {}
        state = self._model.state_dict()
        for key in self.checkpoint:
            if key in self._weights.keys:
                entry = self.manifest.experts.get(key)
                shape = tuple(entry.shape if entry else state[key].shape)
                dtype = getattr(torch, entry.dtype) if entry else self._weights.stack(key).dtype
                found[key] = (shape, dtype)
            elif key not in parts:
                info = self.checkpoint.info(key)
                found[key] = (info.shape, info.dtype)
        unknown = found.keys() - state.keys()
        if unknown:
            raise CheckpointError(
                f"{self._folder}: {sorted(unknown)[0]} is no tensor of a "
                f"{type(self._model).__name__}: config.json is not the one it was saved with."
            )
        return found

    def files(self, dtypes: Mapping[str, torch.dtype]) -> list[OutFile]:
        sizes = {
            key: torch.Size(shape).numel() * dtypes[key].itemsize
            for key, (shape, _) in self.disk.items()
        }
        shards = plan_shards(sizes, self._limit)
        names = [
            f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            for number in range(1, len(shards) + 1)
        ]
        if len(names) == 1:
            names = [SINGLE]
        # The format wants tensors aligned to their dtype: the widest first.
        return [
            OutFile(name, tuple(sorted(keys, key=lambda k: -dtypes[k].itemsize)), {"format": "pt"})
            for name, keys in zip(names, shards, strict=True)
        ]

    def values(self, group: Group, start: int, stop: int | None) -> dict[str, Tensor]:
        values = {name: self._rows(name, start, stop) for name in group.shapes}
        if group.converter is not None:
            again = self.layout.convert(group, self.layout.restore(group, values))
            if again.keys() != values.keys() or not all(
                same_bits(again[name], value) for name, value in values.items()
            ):
                raise self.check_way_back(group)
        return values

    def _rows(self, name: str, start: int, stop: int | None) -> Tensor:
        if name not in self._weights.keys:
            if stop is None:
                return self.checkpoint.read(name)
            return self.checkpoint.read(name, start, stop)
        stack = self._weights.stack(name)
        return codec.unpack_range(stack, start, stack.shape[0] if stop is None else stop)

    def read(self, key: str, start: int, stop: int | None) -> Tensor:
        raise AssertionError(f"{key} is in no parameter of a packed model")

    def close(self) -> None:
        self.checkpoint.close()


def packed_names(manifest: Manifest) -> dict[str, tuple[str, ...]]:
    """Each packed weight, expert stack or Linear, and the keys that hold it."""
    keys = manifest.tensors
    owners = set(manifest.experts)
    for key in keys:
        if _QUANT_STATE in key:
            owners.add(key.partition(_QUANT_STATE)[0])
        elif key.endswith(_SCALES) and key.removesuffix(_SCALES) not in owners:
            owners.add(f"{key.removesuffix(_SCALES)}.weight")
    found = {}
    for name in owners & keys.keys():
        module = name.removesuffix(".weight")
        beside = {module + _SCALES, module + _INT8_FORMAT} if module != name else set()
        found[name] = tuple(
            key for key in keys if key == name or key.startswith(f"{name}.") or key in beside
        )
    return found


def index_text(files: list[OutFile], total: int) -> bytes:
    """An index file over several safetensors files, as transformers writes it."""
    weight_map = {key: file.name for file in files for key in file.keys}
    value = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()


INDEX = f"model{INDEX_SUFFIX}"
