"""Arguments of a recorded call as tensors and constants, block masks of flex attention included.

A graph reads its arguments at fixed addresses. A `BlockMask` holds tensors itself (which blocks are
computed), and its function holds others in closures (padding, ids of packed sequences):

    mask_mod = add_offsets(and_masks(causal, padding(tensor)), 0, 0)

`flatten` takes masks apart, function by function; tensors become arguments like others, and the
rest, such as a window's size and the functions' code, says which kind of call this is. `unflatten`
makes masks and functions of the same code that read other tensors.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MethodDescriptorType,
    ModuleType,
)
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from .recording import ObstacleError

PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)
"""Types of constants, which are compared by value."""

_NAMED = (ModuleType, type, BuiltinFunctionType, MethodDescriptorType)
"""Types of what code calls by name, compared by identity."""

_TENSOR = "tensor"  # stands for one in a mask


@dataclass(frozen=True)
class _Parts:
    """A mask, function, tuple, list or dict, without its tensors."""

    identity: Any  # Hashable: type and keys, or a function's code
    held: tuple[Hashable, ...]  # `_TENSOR`, `_Parts`, or a constant and its type
    has_tensors: bool = field(compare=False)
    template: Any = field(compare=False)  # A function, with empty closures if it has tensors


@dataclass(frozen=True)
class Spec:
    """What is constant in the arguments of a call; hashable."""

    tree: TreeSpec
    masks: tuple[_Parts | None, ...]  # For each leaf of the tree


def flatten(arguments: Any) -> tuple[list[Any], Spec]:
    """Return the leaves of a call's arguments, with the tensors of block masks in their place.

    Raises:
        ObstacleError: A mask holds something else than tensors of its device, constants and
            functions.
    """
    found, tree = tree_flatten(arguments, is_leaf=lambda value: isinstance(value, BlockMask))
    leaves: list[Any] = []
    masks: list[_Parts | None] = []
    for leaf in found:
        if isinstance(leaf, BlockMask):
            masks.append(_Reader(leaf.kv_indices.device, leaves).mask(leaf))
        else:
            masks.append(None)
            leaves.append(leaf)
    return leaves, Spec(tree, tuple(masks))


def unflatten(leaves: Sequence[Any], spec: Spec) -> Any:
    """Return the arguments of `flatten` with other leaves."""
    rest = iter(leaves)
    return tree_unflatten(
        [next(rest) if mask is None else _built(mask, rest) for mask in spec.masks], spec.tree
    )


class _Reader:
    """Takes one mask apart."""

    def __init__(self, device: torch.device, tensors: list[Any]) -> None:
        self.device, self.tensors = device, tensors
        self._within: set[int] = set()  # Functions that are being read

    def mask(self, mask: BlockMask) -> _Parts:
        return self._mapping(type(mask), vars(mask))

    def _mapping(self, kind: Any, values: dict[str, Any]) -> _Parts:
        return self._parts((kind, *values), values.values())

    def _parts(self, identity: Any, holds: Iterable[Any], function: Any = None) -> _Parts:
        before = len(self.tensors)
        held = tuple(map(self._part, holds))
        has_tensors = len(self.tensors) > before
        # The kinds of calls are kept: not the tensors of their first call.
        if has_tensors and isinstance(function, FunctionType):
            function = _function(function, tuple(CellType() for _ in function.__closure__ or ()))
        return _Parts(identity, held, has_tensors, function)

    def _part(self, value: Any) -> Hashable:
        kind = type(value)
        if kind in PLAIN:
            return kind, value
        if isinstance(value, Tensor):
            if value.device != self.device:
                raise ObstacleError(
                    f"its attention mask lies on {self.device} and reads a tensor on {value.device}"
                )
            self.tensors.append(value)
            return _TENSOR
        if kind in (tuple, list, torch.Size):
            return self._parts((kind,), value)
        if kind is dict:
            return self._mapping(kind, value)
        if kind in (FunctionType, functools.partial):
            return self._function(value)
        # A method of an object is a built-in function too.
        bound = getattr(value, "__self__", None) if kind is BuiltinFunctionType else None
        if not isinstance(value, _NAMED) or not isinstance(bound, (*_NAMED, type(None))):
            raise ObstacleError(
                f"the function of its attention mask holds a {kind.__name__}, and a graph can take "
                "tensors, numbers, strings and functions from it"
            )
        return kind, value

    def _function(self, function: Any) -> _Parts:
        if id(function) in self._within:
            raise ObstacleError("the function of its attention mask refers to itself")
        self._within.add(id(function))
        try:
            if isinstance(function, functools.partial):
                holds = function.func, function.args, function.keywords
                return self._parts((type(function),), holds)
            identity = function.__code__, id(function.__globals__), self._globals(function)
            try:
                cells = tuple(cell.cell_contents for cell in function.__closure__ or ())
            except ValueError:
                raise ObstacleError(
                    "the function of its attention mask reads a variable that is not set"
                ) from None
            defaults = function.__defaults__, function.__kwdefaults__
            return self._parts(identity, (*defaults, *cells), function)
        finally:
            self._within.discard(id(function))

    def _globals(self, function: FunctionType) -> Hashable:
        """Return what a function reads of its module, where nothing can be replaced."""
        known = function.__globals__
        read = [(name, known[name]) for name in _global_names(function.__code__) if name in known]
        before = len(self.tensors)
        parts = tuple((name, self._part(value)) for name, value in read)
        if len(self.tensors) > before:
            raise ObstacleError(
                f"the function {function.__name__} of its attention mask reads a tensor by a "
                "global name, whose next value a graph would not see; make it a closure's variable"
            )
        return parts


@functools.cache
def _global_names(code: CodeType) -> tuple[str, ...]:
    own = {step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"}
    nested = (const for const in code.co_consts if isinstance(const, CodeType))
    return tuple(sorted(own.union(*(_global_names(const) for const in nested))))


def _function(like: FunctionType, cells: tuple[CellType, ...]) -> FunctionType:
    made = FunctionType(like.__code__, like.__globals__, like.__name__, None, cells)
    made.__qualname__ = like.__qualname__
    made.__dict__.update(like.__dict__)
    return made


def _built(parts: _Parts, tensors: Iterator[Any]) -> Any:
    """Return a mask, function or container with these tensors."""
    if parts.template is not None and not parts.has_tensors:
        return parts.template
    leaves = [_leaf(each, tensors) for each in parts.held]
    if parts.template is not None:
        defaults, keyword_defaults, *contents = leaves
        made = _function(parts.template, tuple(CellType(content) for content in contents))
        made.__defaults__, made.__kwdefaults__ = defaults, keyword_defaults
        return made
    kind, *keys = parts.identity
    if kind is functools.partial:
        function, args, keywords = leaves
        return functools.partial(function, *args, **keywords)
    if kind in (tuple, list, torch.Size):
        return kind(leaves)
    values = dict(zip(keys, leaves, strict=True))
    if kind is dict:
        return values
    mask = object.__new__(kind)
    mask.__dict__.update(values)
    return mask


def _leaf(part: Any, tensors: Iterator[Any]) -> Any:
    if isinstance(part, _Parts):
        return _built(part, tensors)
    return next(tensors) if part is _TENSOR else part[1]
