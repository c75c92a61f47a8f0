"""Conversion of the tensors of a checkpoint on disk into a model's parameters, and back.

transformers renames, stacks, concatenates and transposes what it reads, and undoes it when it
saves. Here the same conversions serve one parameter at a time, of experts a few experts at a time.

transformers' conversions are not all one to one: whoever writes what `restore` gives must have seen
that it gives back the tensors that were read, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    ErnieFuseAndSplitTextVisionExperts,
    Interleave,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from ..errors import CheckpointError

SLICE_ELEMENTS = 2**21
"""Weights that are converted and summed at a time: 8 MiB in fp32."""

# Operations that leave the first dimension alone where all their dimensions are later ones.
_WITHIN = (Concatenate, Chunk, Interleave, Transpose)


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
        """Yield ranges of the first dimension to work on in turn; (0, None) is everything.

        They lie within `[first, last)`, but for everything, and have about so many elements.
        """
        shapes = list(self.shapes.values())
        if not self.unit or not shapes or not shapes[0] or not all(shapes):
            yield 0, None
            return
        rows = shapes[0][0]
        each = sum(torch.Size(shape).numel() for shape in shapes) // max(rows, 1)
        step = max((elements or SLICE_ELEMENTS) // max(each, 1), 1)
        last = rows if last is None else last
        for start in range(first, last, step):
            yield start, min(start + step, last)

    def part(self, start: int, stop: int | None) -> dict[str, str]:
        """Return a slice's keys, each with that of the first experts that it is converted as."""
        if self.unit != "key" or stop is None:
            return {key: key for key in self.keys}
        rows, count = next(iter(self.shapes.values()))[0], stop - start
        return {  # a list holds the experts of several weights in turn, mostly of one
            key: keys[at // rows * count + index]
            for keys in self.sources.values()
            for at in range(0, len(keys), rows)
            for index, key in enumerate(keys[at + start : at + stop])
        }

    def places(self, start: int, stop: int | None) -> Iterator[tuple[str, int, int | None]]:
        """Yield the tensors to read for a slice: key, and first and last row of it."""
        rows = (start, stop) if self.unit == "row" and stop is not None else (0, None)
        for key in self.part(start, stop):
            yield key, *rows


Disk = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of tensors by key."""


def blank(disk: Disk) -> dict[str, Tensor]:
    """Return such tensors on the meta device."""
    return {k: torch.empty(shape, dtype=dtype, device="meta") for k, (shape, dtype) in disk.items()}


class DiskLayout:
    """The parameters of a model on meta and the tensors on disk, each key in one of `groups`."""

    def __init__(
        self,
        model: nn.Module,
        disk: Disk,
        mapping: list[Any] | None = None,
        takes: Callable[[Collection[str], Collection[str]], bool] | None = None,
        transposed: Container[str] = (),
    ) -> None:
        """Group all tensors, or by `mapping` those whose parameters and keys `takes` is true of.

        `transposed` are parameters that the model has the other way round than the disk.
        """
        self._model: Any = model
        self._disk = disk
        own = mapping is None
        mapping = get_model_conversion_mapping(self._model) if mapping is None else mapping
        self.groups = self._groups(mapping, takes)
        self.by_name = {name: group for group in self.groups for name in group.shapes}
        # Codecs take weights in row-major order, so that another shape of as many values would be
        # packed without an error.
        state = self._model.state_dict()
        for name, group in self.by_name.items():
            shape = group.shapes[name]
            if name not in state:
                continue
            expected = tuple(state[name].shape)[:: -1 if name in transposed else 1]
            if shape != expected:
                count, key = len(group.keys), group.keys[0]
                raise CheckpointError(
                    f"{name} has the shape {shape} on disk ({count} tensors, {key} for one) and "
                    f"{expected} by config.json: files are missing, or of another model."
                )
        if own:  # `from_pretrained` notes the conversions that it used, and saving undoes these
            self._model.__dict__["_weight_conversions"] = [one for one in mapping if one.was_used()]

    def put(self, key: str, name: str, shape: tuple[int, ...]) -> None:
        """Let `key` hold the parameter `name`, in this shape, instead of anything else."""
        group = Group((key,), {name: shape}, target=name)
        self.groups = (*(one for one in self.groups if key not in one.keys), group)
        self.by_name[name] = group

    def drop(self, group: Group) -> None:
        """Leave a group out."""
        self.groups = tuple(one for one in self.groups if one is not group)
        self.by_name = {name: one for name, one in self.by_name.items() if one is not group}

    def _groups(self, mapping: list[Any], takes: Any) -> tuple[Group, ...]:
        renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
        converters = [one for one in mapping if isinstance(one, WeightConverter)]
        by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
        state = self._model.state_dict()
        prefix = getattr(self._model, "base_model_prefix", "")
        groups: list[Group] = []
        collected: dict[str, tuple[Any, dict[str, list[str]]]] = {}
        for key in sorted(self._disk, key=dot_natural_key):
            name, pattern = rename_source_key(key, renamings, converters, prefix, state)
            if name not in state and key in state:
                name, pattern = rename_source_key(key, [], [], prefix, state)
            if name in state and pattern is not None:
                _, sources = collected.setdefault(name, (by_pattern[pattern], {}))
                sources.setdefault(pattern, []).append(key)
            elif takes is None or takes([name], [key]):
                shapes = {name: self._disk[key][0]} if name in state else {}
                groups.append(Group((key,), shapes, target=name if shapes else ""))
        for name, (converter, found) in collected.items():
            first, *others = converter.target_patterns
            names = [name, *(name.replace(first, other, 1) for other in others)]
            matches = {pattern: tuple(keys) for pattern, keys in found.items()}
            disk = {key: self._disk[key] for keys in matches.values() for key in keys}
            if takes is None or takes(names, disk.keys()):
                group = Group(tuple(disk), {}, matches, name, converter, unit="")
                params = self.convert(group, blank(disk))
                shapes = {param: tuple(tensor.shape) for param, tensor in params.items()}
                stored = {key: shape for key, (shape, _) in disk.items()}
                groups.append(make_group(name, converter, matches, shapes, stored))
        return tuple(groups)

    def convert(self, group: Group, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Call `convert`; the error of a failure names what failed."""
        try:
            return convert(group, tensors, self._model)
        except Exception as error:
            raise CheckpointError(
                f"{group.keys[0]} and {len(group.keys) - 1} other tensors do not make the "
                f"parameter {group.target}: {error}"
            ) from error

    def restore(self, group: Group, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Undo `convert`; of a slice of experts, the keys are those of the first ones."""
        if group.converter is None:
            (value,) = values.values()
            return {group.keys[0]: _swapped(value, group.swap)}
        return revert(self._model, values, group.target)


def make_group(
    target: str,
    converter: Any,
    sources: Mapping[str, tuple[str, ...]],
    shapes: Mapping[str, tuple[int, ...]],
    disk: Mapping[str, tuple[int, ...]],
) -> Group:
    """Return the group that a converter of transformers makes these parameters of.

    `disk` has the shapes of tensors by key. Unknown operations are converted as a whole.
    """
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
    unit = ""
    if len(counts) != 1 or len(rows) != 1 or 0 in rows:
        pass
    elif isinstance(first, ErnieFuseAndSplitTextVisionExperts):
        if not others and first.stack_dim == 0 and first.concat_dim > 0:
            unit = "key" if counts == {len(shapes) * min(rows)} else ""
    elif isinstance(first, MergeModulelist):
        if first.dim == 0 and all(map(_leaves_first_alone, others)):
            unit = "key" if counts == rows else ""
    elif all(map(_leaves_first_alone, operations)):
        lengths = {shape[0] for shape in disk.values() if shape}
        unit = "row" if counts == {1} and lengths == rows else ""
    return Group(keys, shapes, sources, target, converter, unit=unit)


def convert(group: Group, tensors: Mapping[str, Tensor], model: Any) -> dict[str, Tensor]:
    """Convert tensors by key, of a group or a slice (`Group.part`), to parameters by name.

    Whatever transformers' operations raise of tensors that do not fit is passed on.
    """
    if group.converter is None:
        # Without a parameter (a layer that the model leaves out), a tensor keeps its key.
        names = group.shapes or group.keys
        return dict.fromkeys(names, _swapped(tensors[group.keys[0]], group.swap))
    values: dict[str, Any] = {
        pattern: [tensors[key] for key in keys if key in tensors]
        for pattern, keys in group.sources.items()
    }
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
    # Operations name their results by patterns, of which the group's own name has one.
    name = group.target.replace("*.", "0.")
    before, _, after = next((name.partition(p) for p in values if p in name), ("", "", ""))
    return {
        f"{before}{p}{after}": value[0] if isinstance(value, list) else value
        for p, value in values.items()
    }


def revert(model: Any, values: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """Call `revert_weight_conversion`; the error of a failure names what failed."""
    try:
        tensors: dict[str, Tensor] = revert_weight_conversion(model, dict(values))
    except Exception as error:
        raise CheckpointError(
            f"transformers cannot write {name} as {type(model).__name__} has it on disk ({error})."
        ) from error
    return tensors


def _swapped(tensor: Tensor, dims: tuple[int, int] | None) -> Tensor:
    return tensor if dims is None else tensor.transpose(*dims).contiguous()


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors hold the same bits; NaN equals itself."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return torch.equal(*(one.contiguous().view(-1).view(torch.uint8) for one in (left, right)))


def _leaves_first_alone(operation: Any) -> bool:
    if not isinstance(operation, _WITHIN) or getattr(operation, "check_dims", False):
        return False
    if isinstance(operation, Transpose):
        return operation.dim0 > 0 and operation.dim1 > 0
    return bool(operation.dim > 0)
