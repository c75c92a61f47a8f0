"""The base that an adapter is merged into: a 16-bit folder, or a packed one.

Both give a model's parameters slice by slice. A folder that its maker quantized is read as the
16-bit folder it stands for.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import dot_natural_key

from ..errors import CheckpointError
from ..models import named
from ..packing import codec
from .adapter import Adapter
from .conversion import Disk, DiskLayout, Group, blank, convert, restore, revert, same_bits
from .manifest import (
    CONFIG,
    CONFIG_KEY,
    MANIFEST_NAME,
    FolderCheck,
    PackedWeights,
    canonical_name,
    is_packed,
)
from .prequantized import MODELOPT_CONFIG, describe_plain, maker_method, open_plain
from .reader import INDEX_SUFFIX, Checkpoint, check_folder, check_link
from .training_codec import SAMPLED_ROWS

# keys of config.json that a plain folder does not have
PACKED_KEYS = ("quantization_config", "transformers_weights", CONFIG_KEY)


class Base:
    """A 16-bit folder in its original layout, or one that its maker quantized, dequantized.

    `disk` has shape and dtype of the plain folder's tensors; `layout` says how they make the
    parameters of `model`, which is on meta, tied; `keeps_files`, whether a merged folder has the
    base's files. A maker's codes are decoded on `device`, where all tensors of their group arrive.
    """

    def __init__(self, folder: Path, model: Any, *, device: torch.device | None = None) -> None:
        self.folder, self.model, self._device = folder, model, device
        self.checkpoint, disk = self._open()
        self.keeps_files = type(self.checkpoint) is Checkpoint and type(self) is Base
        order = disk if self.keeps_files else sorted(disk, key=dot_natural_key)
        self.disk = {key: disk[key] for key in order}
        self.layout = DiskLayout(model, self.disk)

    def _open(self) -> tuple[Checkpoint, Disk]:
        checkpoint = open_plain(self.folder)
        return checkpoint, {key: (info.shape, info.dtype) for key, info in checkpoint.items()}

    def values(
        self, group: Group, start: int, stop: int | None, exact: bool = True
    ) -> dict[str, Tensor]:
        """Return rows of the group's parameters; raise unless they can be written back exactly."""
        # codes travel, not what they are decoded to
        device = self._device if self.decodes(group) else None
        read, first = {}, {}
        for key, stand_in, top, bottom in group.places(start, stop):
            read[key] = first[stand_in] = self.checkpoint.read(key, top, bottom, device)
        values = convert(group, read, self.model)
        if exact and group.converter is not None:
            _check_same(group, first, restore(group, values, self.model))
        return values

    def decodes(self, group: Group) -> bool:
        """Whether tensors of a group are a maker's codes on disk."""
        return any(map(self.checkpoint.is_dequantized, group.keys))

    def rows(self, name: str, start: int, stop: int | None) -> Tensor:
        """Return rows of a parameter."""
        return self.values(self.layout.by_name[name], start, stop)[name]

    def first_rows(self, name: str) -> Tensor | None:
        """Return the first rows of a parameter of this model, or of its inner or outer one."""
        if (known := canonical_name(self.model, name, self.layout.by_name)) is None:
            return None
        group = self.layout.by_name[known]
        last = min(SAMPLED_ROWS, group.shapes[known][0]) if group.unit else None
        return self.rows(known, 0, last)

    def holds(self, name: str, tensor: Tensor) -> bool:
        """Whether a parameter has the same bits as a tensor."""
        parts = self.layout.by_name[name].slices()
        return all(same_bits(self.rows(name, *part), tensor[slice(*part)]) for part in parts)

    def stored_apart(self, stored: list[str]) -> bool:
        """Whether it stores several parameters that are not equal: transformers unties them."""
        return not all(
            same_bits(self.rows(stored[0], *part), self.rows(name, *part))
            for name in stored[1:]
            for part in self.layout.by_name[name].slices()
        )

    def put(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Give a parameter another shape in the merged folder; add a new one in this dtype."""
        if (old := self.layout.by_name.get(name)) is not None:
            key, dtype = old.keys[0], self.disk[old.keys[0]][1]
            self.layout.groups.remove(old)
        else:
            (key,) = revert(self.model, blank({name: (shape, dtype)}), name)
        self.disk[key] = shape, dtype
        self.layout.by_name[name] = group = Group((key,), {name: shape}, target=name)
        self.layout.groups.append(group)

    def close(self) -> None:
        """Close the files."""
        self.checkpoint.close()


class PackedBase(Base):
    """A folder that this package packed, decoded; in the layout that transformers would save."""

    def __init__(self, folder: Path, model: Any) -> None:
        super().__init__(folder, model)
        if lost := self._params.keys() - self.layout.by_name:
            raise CheckpointError(
                f"{folder}: {min(lost)} of the packed model has no name in the original layout of "
                f"a {type(model).__name__}: config.json is not the one it was saved with."
            )

    def _open(self) -> tuple[Checkpoint, Disk]:
        opened, model = FolderCheck(self.folder), self.model
        manifest = opened.finish()
        opened.check_model(model)
        state, files = model.state_dict(), opened.checkpoint
        self._weights = weights = PackedWeights(manifest, files, state)
        parts = {key for keys in weights.keys.values() for key in keys}
        self._params = params = dict[str, tuple[tuple[int, ...], torch.dtype]]()
        for key in files:
            if (entry := manifest.experts.get(key)) is not None:
                params[key] = (tuple(entry.shape), getattr(torch, entry.dtype))
            elif key in weights.keys:
                params[key] = (tuple(state[key].shape), weights.weight(key).dtype)
            elif key not in parts:
                params[key] = (files.info(key).shape, files.info(key).dtype)
        on_disk = revert(model, blank(params), type(model).__name__)
        return files, {key: (tuple(one.shape), one.dtype) for key, one in on_disk.items()}

    def values(
        self, group: Group, start: int, stop: int | None, exact: bool = True
    ) -> dict[str, Tensor]:
        """Return decoded rows of the group's parameters, if they can be written exactly."""
        values = {}
        for name in group.shapes:
            if name in self._weights.keys:
                weight = self._weights.weight(name)
                last = weight.shape[0] if stop is None else stop
                values[name] = codec.unpack_range(weight, start, last)
            else:
                values[name] = self.checkpoint.read(name, start, stop)
        if exact and group.converter is not None:
            again = restore(group, values, self.model)
            _check_same(group, values, convert(group, again, self.model))
        return values


def _check_same(group: Group, first: Mapping[str, Tensor], again: Mapping[str, Tensor]) -> None:
    if first.keys() != again.keys() or not all(
        same_bits(again[key].to(tensor.dtype), tensor) for key, tensor in first.items()
    ):
        raise CheckpointError(
            f"{group.target} cannot be written back as the base has it on disk "
            f"({', '.join(group.keys[:2])}, ...): transformers' conversion of it is not one to one."
        )


def open_base(
    folder: Path, adapter: Adapter | None = None, trust_remote_code: bool = False
) -> Base:
    """Open a checkpoint folder, or its text model alone if the adapter was trained on that."""
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
    return (PackedBase if is_packed(folder) else Base)(folder, model)


def resolve_checkpoint(
    folder: Path, trust_remote_code: bool, *, packed: bool = False
) -> named.Source:
    """Return the source of a 16-bit folder, one that its maker quantized, or a `packed` one."""
    check_folder(folder)
    source = named.resolve(str(folder), trust_remote_code=trust_remote_code)
    if packed and is_packed(folder):
        return source
    if maker_method(source.config) is not None:
        describe_plain(source.config)
    if getattr(source.config, "quantization_config", None) is not None:
        wanted = "the 16-bit checkpoint" + ", or a folder that moe_qlora packed" * packed
        raise CheckpointError(f"{folder} is quantized (bitsandbytes); name {wanted}.")
    return source


_NEVER = (
    *(".safetensors", INDEX_SUFFIX, ".bin.index.json", ".bin", ".pt", ".pth", ".ckpt", ".pkl"),
    *(".pickle", ".h5", ".msgpack", ".npz", ".npy", ".gguf", ".onnx", ".ot", ".tflite", ".partial"),
)
_FOLDERS = ("additional_chat_templates",)


def auxiliary_files(source: Path) -> dict[Path, Path]:
    """Return files by path: no configurations, weights, adapters, hidden files."""
    files: list[Path] = []
    for file in sorted(source.iterdir()):
        name = file.name
        own = name in (CONFIG, MODELOPT_CONFIG) or MANIFEST_NAME.fullmatch(name)
        if file.is_dir():
            files += [file, *sorted(file.rglob("*"))] if name in _FOLDERS else []
        elif not (own or name.startswith((".", "adapter_")) or name.lower().endswith(_NEVER)):
            files.append(file)
    for file in files:
        check_link(file, source)
    return {file.relative_to(source): file for file in files if file.is_file()}


def copy_files(files: Mapping[Path, Path], folder: Path) -> None:
    """Copy files, given by their path in the folder."""
    for name, file in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, folder / name)
