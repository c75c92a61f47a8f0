"""Conversion of the tensors of a checkpoint on disk into a model's parameters, and back.

transformers renames, stacks, concatenates and transposes what it reads, and undoes it when it
saves. Here the same conversions serve one parameter at a time, of experts a few experts at a time.
They are not all one to one: whoever writes what `restore` gives must have seen that it gives back
the tensors that were read, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import core_model_loading as loading
from transformers.conversion_mapping import get_model_conversion_mapping

from ..errors import CheckpointError

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
    """The parameters of a model on meta and the tensors on disk, each key in one of `groups`."""

    def __init__(
        self,
        model: nn.Module,
        disk: Disk,
        mapping: list[Any] | None = None,
        takes: Callable[[Collection[str], Collection[str]], bool] = lambda names, keys: True,
        transposed: Container[str] = (),
    ) -> None:
        """Group all tensors, or by `mapping` those whose parameters and keys `takes` is true of.

        `transposed` are parameters that the model has the other way round than the disk.
        """
        self.model: Any = model
        state = model.state_dict()
        used = get_model_conversion_mapping(self.model) if mapping is None else mapping
        self.groups = list(_groups(self.model, state, disk, used, takes))
        self.by_name = {name: group for group in self.groups for name in group.shapes}
        # Codecs take weights in row-major order, so that another shape of as many values would be
        # packed without an error.
        for name in filter(state.__contains__, self.by_name):
            shape, keys = self.by_name[name].shapes[name], self.by_name[name].keys
            expected = tuple(state[name].shape)[:: -1 if name in transposed else 1]
            if shape != expected:
                raise CheckpointError(
                    f"{name} has the shape {shape} on disk ({len(keys)} tensors, {keys[0]} for one)"
                    f" and {expected} by config.json: files are missing, or of another model."
                )
        if mapping is None:  # as `from_pretrained` notes what it used, which saving undoes
            self.model.__dict__["_weight_conversions"] = [one for one in used if one.was_used()]


def _groups(
    model: Any,
    state: Mapping[str, Tensor],
    disk: Disk,
    mapping: list[Any],
    takes: Callable[[Collection[str], Collection[str]], bool],
) -> Iterator[Group]:
    renamings = [one for one in mapping if isinstance(one, loading.WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, loading.WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    known = getattr(model, "base_model_prefix", ""), state
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
            made = convert(whole, blank(own), model)
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
    unit, each = "row", {1}  # each: how many tensors of every pattern
    if isinstance(first, loading.ErnieFuseAndSplitTextVisionExperts):
        unit, each = "key", {len(shapes) * row for row in rows}
        alone = not others and first.stack_dim == 0 and first.concat_dim > 0
    elif isinstance(first, loading.MergeModulelist):
        unit, each = "key", rows
        alone = first.dim == 0 and all(map(_leaves_first_alone, others))
    else:
        alone = rows == {shape[0] for shape in disk.values() if shape}
        alone = alone and all(map(_leaves_first_alone, operations))
    alone = alone and counts == each and len(rows) == 1 and 0 not in rows
    return Group(keys, shapes, sources, target, converter, unit=unit if alone else "")


def _leaves_first_alone(operation: Any) -> bool:
    if isinstance(operation, loading.Transpose):
        dims = (operation.dim0, operation.dim1)
        return not getattr(operation, "check_dims", False) and min(dims) > 0
    return (
        isinstance(operation, (loading.Concatenate, loading.Chunk, loading.Interleave))
        and operation.dim > 0
    )


def convert(group: Group, tensors: Mapping[str, Tensor], model: Any) -> dict[str, Tensor]:
    """Convert tensors by key, of a group or a slice (`Group.places`), to parameters by name."""
    if group.converter is None:
        # Without a parameter (a layer that the model leaves out), a tensor keeps its key.
        names = group.shapes or group.keys
        return dict.fromkeys(names, _swapped(tensors[group.keys[0]], group.swap))
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
        return {group.keys[0]: _swapped(value, group.swap)}
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


def _swapped(tensor: Tensor, dims: tuple[int, int] | None) -> Tensor:
    return tensor if dims is None else tensor.transpose(*dims).contiguous()


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors hold the same bits; NaN equals itself."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return torch.equal(*(one.contiguous().view(-1).view(torch.uint8) for one in (left, right)))
