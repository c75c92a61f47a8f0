"""Conversion of the tensors of a checkpoint on disk into a model's parameters, and back.

transformers renames, stacks, concatenates and transposes what it reads, and undoes it when it
saves. Here the same conversions serve one parameter at a time, of experts a few experts at a time.

transformers' conversions are not all one to one: whoever writes what `restore` gives must have seen
that it gives back the tensors that were read, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
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

SLICE_ELEMENTS = 2**22
"""Weights that are converted and summed at a time: 16 MiB in fp32."""

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

    def slices(self) -> Iterator[tuple[int, int | None]]:
        """Yield ranges of the first dimension to work on in turn; (0, None) is everything."""
        shapes = list(self.shapes.values())
        if not self.unit or not shapes or not shapes[0] or not all(shapes):
            yield 0, None
            return
        rows = shapes[0][0]
        each = sum(torch.Size(shape).numel() for shape in shapes) // max(rows, 1)
        step = max(SLICE_ELEMENTS // max(each, 1), 1)
        for start in range(0, rows, step):
            yield start, min(start + step, rows)

    def part(self, start: int, stop: int | None) -> dict[str, str]:
        """Return a slice's keys, each with that of the first experts that it is converted as."""
        if self.unit != "key" or stop is None:
            return {key: key for key in self.keys}
        return {
            key: keys[index]
            for keys in self.sources.values()
            for index, key in enumerate(keys[start:stop])
        }


Disk = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of tensors by key."""


def blank(disk: Disk) -> dict[str, Tensor]:
    """Return such tensors on the meta device."""
    return {k: torch.empty(shape, dtype=dtype, device="meta") for k, (shape, dtype) in disk.items()}


class DiskLayout:
    """The parameters of a model on meta and the tensors on disk, each key in one of `groups`.

    Raises:
        CheckpointError: A tensor, converted as transformers does, has another shape than the
            model's parameter or buffer.
    """

    def __init__(self, model: nn.Module, disk: Disk) -> None:
        self._model: Any = model
        self._disk = disk
        mapping = get_model_conversion_mapping(self._model)
        self.groups = self._groups(mapping)
        self.by_name = {name: group for group in self.groups for name in group.shapes}
        self._check_shapes()
        # `from_pretrained` notes the conversions that it used here, and saving undoes these.
        self._model.__dict__["_weight_conversions"] = [one for one in mapping if one.was_used()]

    def _groups(self, mapping: list[Any]) -> tuple[Group, ...]:
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
            if name not in state:
                groups.append(Group((key,), {}))
            elif pattern is None:
                groups.append(Group((key,), {name: self._disk[key][0]}, target=name))
            else:
                _, sources = collected.setdefault(name, (by_pattern[pattern], {}))
                sources.setdefault(pattern, []).append(key)
        return (*groups, *(self._converted(name, *parts) for name, parts in collected.items()))

    def _converted(self, name: str, converter: Any, sources: dict[str, list[str]]) -> Group:
        keys = tuple(key for keys in sources.values() for key in keys)
        by_pattern = {pattern: tuple(matches) for pattern, matches in sources.items()}
        group = Group(keys, {}, by_pattern, name, converter, unit="")
        params = self.convert(group, blank({key: self._disk[key] for key in keys}))
        shapes = {param: tuple(tensor.shape) for param, tensor in params.items()}
        operation = converter.operations[0]
        if len(converter.operations) == 1 and getattr(operation, "check_dims", False):
            # transformers swaps where the shapes ask for it, and never swaps back.
            swap = (operation.dim0, operation.dim1)
            same = shapes == {name: self._disk[keys[0]][0]}
            return Group(keys, shapes, target=name, swap=None if same else swap)
        return replace(group, shapes=shapes, unit=self._unit(group, shapes))

    def _unit(self, group: Group, shapes: Mapping[str, tuple[int, ...]]) -> str:
        """Return the group's `unit`; unknown operations are converted as a whole."""
        operations = list(group.converter.operations)
        counts = {len(keys) for keys in group.sources.values()}
        rows = {shape[0] if len(shape) > 2 else 0 for shape in shapes.values()}
        stacks = bool(operations) and isinstance(operations[0], MergeModulelist)
        within = map(_leaves_first_alone, operations[1:] if stacks else operations)
        if len(counts) != 1 or len(rows) != 1 or 0 in rows or not all(within):
            return ""
        if stacks:
            return "key" if operations[0].dim == 0 and counts == rows else ""
        first = {self._disk[key][0][0] for key in group.keys if self._disk[key][0]}
        return "row" if counts == {1} and first == rows else ""

    def _check_shapes(self) -> None:
        """Raise where a tensor's shape on disk is not that of the model's parameter.

        Codecs take weights in row-major order, so that another shape of as many values would be
        packed without an error.
        """
        state = self._model.state_dict()
        for name, group in self.by_name.items():
            shape = group.shapes[name]
            if name in state and shape != (expected := tuple(state[name].shape)):
                count, key = len(group.keys), group.keys[0]
                raise CheckpointError(
                    f"{name} has the shape {shape} on disk ({count} tensors, {key} for one) and "
                    f"{expected} by config.json: files are missing, or of another model."
                )

    def convert(self, group: Group, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert tensors by key, of a group or a slice (`Group.part`), to parameters by name."""
        if group.converter is None:
            # Without a parameter (a layer that the model leaves out), a tensor keeps its key.
            names = group.shapes or group.keys
            return dict.fromkeys(names, _swapped(tensors[group.keys[0]], group.swap))
        converter = deepcopy(group.converter)
        for pattern, keys in group.sources.items():
            for key in keys:
                if key in tensors:
                    converter.add_tensor(group.target, key, pattern, tensors[key])
        try:
            params = converter.convert(group.target, model=self._model, config=self._model.config)
        except Exception as error:
            raise CheckpointError(
                f"{group.keys[0]} and {len(group.keys) - 1} other tensors do not make the "
                f"parameter {group.target}: {error}"
            ) from error
        return {name: p[0] if isinstance(p, list) else p for name, p in params.items()}

    def restore(self, group: Group, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Undo `convert`; of a slice of experts, the keys are those of the first ones."""
        if group.converter is None:
            (value,) = values.values()
            return {group.keys[0]: _swapped(value, group.swap)}
        return revert(self._model, values, group.target)


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
    left, right = left.contiguous(), right.contiguous()
    if left.dim() == 0:
        left, right = left.view(1), right.view(1)
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def _leaves_first_alone(operation: Any) -> bool:
    """Whether an operation works on dimensions after the first only."""
    if not isinstance(operation, _WITHIN) or getattr(operation, "check_dims", False):
        return False
    if isinstance(operation, Transpose):
        return operation.dim0 > 0 and operation.dim1 > 0
    return bool(operation.dim > 0)
