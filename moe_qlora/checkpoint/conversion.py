"""Tensors on disk <-> a model's parameters, and the base folder that an adapter is merged into.

transformers renames, stacks, concatenates and transposes what it reads, and undoes it when it
saves. Here the same conversions serve one parameter at a time, of experts a few experts at a time.
They are not all one to one: whoever writes what `restore` gives must have seen that it gives back
the tensors that were read, bit for bit, as `Base.values` does.
"""

import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import core_model_loading as loading
from transformers.conversion_mapping import get_model_conversion_mapping

from ..errors import CheckpointError
from ..models import named
from ..packing import codec
from .adapter import Adapter
from .folder import INDEX_SUFFIX, Checkpoint, check_folder, check_link
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

SAMPLED_ROWS = 64  # first rows of a weight, of which fingerprints are made
# keys of config.json that a plain folder does not have
PACKED_KEYS = ("quantization_config", "transformers_weights", CONFIG_KEY)
SLICE_ELEMENTS = 2**21  # weights that are converted and summed at a time: 8 MiB in fp32
Disk = Mapping[str, tuple[tuple[int, ...], torch.dtype]]  # shape and dtype of tensors by key


@dataclass(frozen=True)
class Group:
    """The smallest set of tensors on disk that make whole parameters, and these.

    Mostly that is one tensor and one parameter, without `sources` and `converter`; or the 128 x 2
    projections of a layer's experts and their fused weight. `unit` is what one step along the
    parameters' first dimension is on disk: "key" (each tensor is one expert), "row" (the tensors
    have the same first dimension), or "" where the group converts as a whole only.
    """

    keys: tuple[str, ...]  # on disk, in the order of conversion
    shapes: Mapping[str, tuple[int, ...]]  # of parameters by name; {} where the model has none
    sources: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # keys by pattern
    target: str = ""  # name under which transformers collects the group
    converter: Any = None  # transformers' `WeightConverter`
    swap: tuple[int, int] | None = None  # dimensions to transpose, the whole conversion
    unit: str = "row"

    def slices(
        self, first: int = 0, last: int | None = None, elements: int | None = None
    ) -> Iterator[tuple[int, int | None]]:
        """Yield ranges of rows within `[first, last)` to work on; (0, None) is everything."""
        shapes = list(self.shapes.values())
        if not self.unit or not shapes or not all(shapes):
            yield 0, None
            return
        rows = shapes[0][0]
        each = sum(torch.Size(shape).numel() for shape in shapes) // max(rows, 1)
        step = max((elements or SLICE_ELEMENTS) // max(each, 1), 1)
        last = rows if last is None else last
        for start in range(first, last, step):
            yield start, min(start + step, last)

    def places(self, start: int, stop: int | None) -> Iterator[tuple[str, str, int, int | None]]:
        """Yield a slice's tensors: key, key that it is converted as, first and last row."""
        if self.unit != "key" or stop is None:
            rows = (start, stop) if self.unit == "row" and stop is not None else (0, None)
            yield from ((key, key, *rows) for key in self.keys)
            return
        experts, count = next(iter(self.shapes.values()))[0], stop - start
        for keys in self.sources.values():
            # a list holds the experts of several weights in turn, mostly of one
            for number, at in enumerate(range(start, len(keys), experts)):
                for index, key in enumerate(keys[at : at + count]):
                    yield key, keys[number * count + index], 0, None


def blank(disk: Disk) -> dict[str, Tensor]:
    """Return such tensors on the meta device."""
    return {k: torch.empty(shape, dtype=dtype, device="meta") for k, (shape, dtype) in disk.items()}


class DiskLayout:
    """The parameters of a model on meta and the tensors on disk, each key in one of `groups`.

    With a `mapping`, only those whose parameters and keys `takes` is true of.
    """

    def __init__(
        self,
        model: nn.Module,
        disk: Disk,
        mapping: list[Any] | None = None,
        takes: Callable[[Collection[str], Collection[str]], bool] = lambda names, keys: True,
    ) -> None:
        self.model: Any = model
        state = model.state_dict()
        used = get_model_conversion_mapping(self.model) if mapping is None else mapping
        self.groups = list(self._grouped(state, disk, used, takes))
        self.by_name = {name: group for group in self.groups for name in group.shapes}
        # Codecs take weights in row-major order, so that another shape of as many values would be
        # packed without an error.
        for name in filter(state.__contains__, self.by_name):
            shape, keys = self.by_name[name].shapes[name], self.by_name[name].keys
            if shape != (expected := tuple(state[name].shape)):
                raise CheckpointError(
                    f"{name} has the shape {shape} on disk ({len(keys)} tensors, {keys[0]} for one)"
                    f" and {expected} by config.json: files are missing, or of another model."
                )
        if mapping is None:  # as `from_pretrained` notes what it used, which saving undoes
            self.model.__dict__["_weight_conversions"] = [one for one in used if one.was_used()]

    def _grouped(
        self, state: Mapping[str, Tensor], disk: Disk, mapping: list[Any], takes: Any
    ) -> Iterator[Group]:
        renamings = [one for one in mapping if isinstance(one, loading.WeightRenaming)]
        converters = [one for one in mapping if isinstance(one, loading.WeightConverter)]
        by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
        known = getattr(self.model, "base_model_prefix", ""), state
        collected: dict[str, tuple[Any, dict[str, list[str]]]] = {}
        for key in sorted(disk, key=loading.dot_natural_key):
            name, pattern = loading.rename_source_key(key, renamings, converters, *known)
            if name not in state and key in state:
                name, pattern = loading.rename_source_key(key, [], [], *known)
            if name in state and pattern is not None:
                _, sources = collected.setdefault(name, (by_pattern[pattern], {}))
                sources.setdefault(pattern, []).append(key)
            elif takes([name], [key]):
                shapes = {name: disk[key][0]} if name in state else {}
                yield Group((key,), shapes, target=name if shapes else "")
        for name, (converter, found) in collected.items():
            first, *others = converter.target_patterns
            names = [name, *(name.replace(first, other, 1) for other in others)]
            matches = {pattern: tuple(keys) for pattern, keys in found.items()}
            own = {key: disk[key] for keys in matches.values() for key in keys}
            if takes(names, own.keys()):
                whole = Group(tuple(own), {}, matches, name, converter, unit="")
                made = convert(whole, blank(own), self.model)
                shapes = {param: tuple(tensor.shape) for param, tensor in made.items()}
                stored = {key: shape for key, (shape, _) in own.items()}
                yield make_group(name, converter, matches, shapes, stored)


def make_group(
    target: str,
    converter: Any,
    sources: Mapping[str, tuple[str, ...]],
    shapes: Mapping[str, tuple[int, ...]],
    disk: Mapping[str, tuple[int, ...]],
) -> Group:
    """Return a converter's group of parameters, given the shapes of tensors on `disk`."""
    keys = tuple(key for keys in sources.values() for key in keys)
    first, *others = operations = list(converter.operations)
    if not others and getattr(first, "check_dims", False):
        # transformers swaps where the shapes ask for it, and never swaps back.
        swap = (first.dim0, first.dim1)
        same = shapes == {target: disk[keys[0]]}
        unit = "row" if same or min(swap) > 0 else ""
        return Group(keys, shapes, target=target, swap=None if same else swap, unit=unit)
    counts = {len(keys) for keys in sources.values()}
    rows = {shape[0] if len(shape) > 2 else 0 for shape in shapes.values()}
    unit, each, rest = "key", rows, others  # each: how many tensors of every pattern
    if isinstance(first, loading.ErnieFuseAndSplitTextVisionExperts):
        each = {len(shapes) * row for row in rows}
        alone = not others and first.stack_dim == 0 and first.concat_dim > 0
    elif isinstance(first, loading.MergeModulelist):
        alone = first.dim == 0
    else:
        unit, each, rest = "row", {1}, operations
        alone = rows == {shape[0] for shape in disk.values() if shape}
    for one in rest:  # which must leave the first dimension alone
        if isinstance(one, loading.Transpose):
            inner = not getattr(one, "check_dims", False) and min(one.dim0, one.dim1) > 0
        else:
            kinds = loading.Concatenate, loading.Chunk, loading.Interleave
            inner = isinstance(one, kinds) and one.dim > 0
        alone = alone and inner
    alone = alone and counts == each and len(rows) == 1 and 0 not in rows
    return Group(keys, shapes, sources, target, converter, unit=unit if alone else "")


def convert(group: Group, tensors: Mapping[str, Tensor], model: Any) -> dict[str, Tensor]:
    """Convert tensors by key, of a group or a slice (`Group.places`), to parameters by name."""
    if group.converter is None:
        # Without a parameter (a layer that the model leaves out), a tensor keeps its key.
        names = group.shapes or group.keys
        tensor = tensors[group.keys[0]]
        tensor = tensor.transpose(*group.swap).contiguous() if group.swap else tensor
        return dict.fromkeys(names, tensor)
    values: dict[str, Any] = {
        pattern: [tensors[key] for key in keys if key in tensors]
        for pattern, keys in group.sources.items()
    }
    try:
        for operation in group.converter.operations:
            values = operation.convert(
                values,
                source_patterns=group.converter.source_patterns,
                target_patterns=group.converter.target_patterns,
                full_layer_name=group.target,
                model=model,
                config=model.config,
                missing_keys=None,
            )
    except Exception as error:
        others = f"{group.keys[0]} and {len(group.keys) - 1} other tensors"
        raise CheckpointError(f"{others} do not make {group.target}: {error}") from error
    # Operations name their results by patterns, of which the group's own name has one.
    name = group.target.replace("*.", "0.")
    before, _, after = next((name.partition(p) for p in values if p in name), ("", "", ""))
    return {
        f"{before}{p}{after}": value[0] if isinstance(value, list) else value
        for p, value in values.items()
    }


def restore(group: Group, values: Mapping[str, Tensor], model: Any) -> dict[str, Tensor]:
    """Undo `convert`; of a slice of experts, the keys are those of the first ones."""
    if group.converter is None:
        (value,) = values.values()
        return {group.keys[0]: value.transpose(*group.swap) if group.swap else value}
    return revert(model, values, group.target)


def revert(model: Any, values: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """Return parameters as transformers would save them; the error of a failure has the name."""
    try:
        tensors: dict[str, Tensor] = loading.revert_weight_conversion(model, dict(values))
    except Exception as error:
        raise CheckpointError(
            f"transformers cannot write {name} as {type(model).__name__} has it on disk ({error})."
        ) from error
    return tensors


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors hold the same bits; NaN equals itself."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return torch.equal(*(one.contiguous().view(-1).view(torch.uint8) for one in (left, right)))


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
        order = disk if self.keeps_files else sorted(disk, key=loading.dot_natural_key)
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
        return self.values(self.layout.by_name[name], start, stop)[name]

    def first_rows(self, name: str) -> Tensor | None:
        """Return the first rows of a parameter of this model, or of its inner or outer one."""
        if (known := canonical_name(self.model, name, self.layout.by_name)) is None:
            return None
        group = self.layout.by_name[known]
        stop = min(SAMPLED_ROWS, group.shapes[known][0]) if group.unit else None
        return self.rows(known, 0, stop)

    def equals(self, name: str, other: str | Tensor) -> bool:
        """Whether a parameter has the same bits as another, or as a tensor."""
        return all(
            same_bits(
                self.rows(name, *part),
                self.rows(other, *part) if isinstance(other, str) else other[slice(*part)],
            )
            for part in self.layout.by_name[name].slices()
        )

    def stored_apart(self, stored: list[str]) -> bool:
        """Whether it stores several parameters that are not equal: transformers unties them."""
        return not all(self.equals(stored[0], name) for name in stored[1:])

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
        self.checkpoint.close()


class PackedBase(Base):
    """A folder that this package packed, decoded; in the layout that transformers would save."""

    def _open(self) -> tuple[Checkpoint, Disk]:
        opened, model = FolderCheck(self.folder), self.model
        manifest = opened.finish()
        opened.check_model(model)
        state, files = model.state_dict(), opened.checkpoint
        self._weights = weights = PackedWeights(manifest, files, state)
        parts = {key for keys in weights.keys.values() for key in keys} - weights.keys.keys()
        params = dict[str, tuple[tuple[int, ...], torch.dtype]]()
        for key, info in files.items():
            if (entry := manifest.experts.get(key)) is not None:
                params[key] = tuple(entry.shape), getattr(torch, entry.dtype)
            elif key in weights.keys:
                params[key] = tuple(state[key].shape), weights.weight(key).dtype
            elif key not in parts:
                params[key] = info.shape, info.dtype
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


def auxiliary_files(source: Path) -> dict[Path, Path]:
    """Return files by path: no configurations, weights, adapters, hidden files."""
    files: list[Path] = []
    for file in sorted(source.iterdir()):
        name = file.name
        own = name in (CONFIG, MODELOPT_CONFIG) or bool(MANIFEST_NAME.fullmatch(name))
        own = own or name.startswith((".", "adapter_")) or name.lower().endswith(_NEVER)
        if name == "additional_chat_templates" and file.is_dir():
            files += [file, *sorted(file.rglob("*"))]
        elif not (own or file.is_dir()):
            files.append(file)
    for file in files:
        check_link(file, source)
    return {file.relative_to(source): file for file in files if file.is_file()}


def copy_files(files: Mapping[Path, Path], folder: Path) -> None:
    """Copy files, given by their path in the folder."""
    for name, file in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, folder / name)
