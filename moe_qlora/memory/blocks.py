"""The blocks of a model on meta, and what each of them holds.

A block is what a device map places whole: a module of a class that the model lists as not to be
split (a decoder layer), any other module without such layers inside (an embedding, the head), and
each parameter or buffer outside of all of these.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.limits import DEQUANTIZED_WEIGHT_BYTES
from ..packing import parametrize
from ..packing.quant_state import state_tensors
from .budget import Block


def blocks_of(model: Any) -> tuple[Block, ...]:
    """Return what each block holds without adapters; a tied tensor counts where it is first."""
    seen: set[int] = set()
    return tuple(_block(name, unit, seen) for name, unit in _units(model))


def tied_blocks(model: Any) -> list[tuple[str, str]]:
    """Return pairs of blocks that hold the very same tensor, and so must share a device."""
    owner: dict[int, str] = {}
    pairs: list[tuple[str, str]] = []
    for name, unit in _units(model):
        for tensor in unit.parameters() if isinstance(unit, nn.Module) else [unit]:
            first = owner.setdefault(id(tensor), name)
            if first != name and (first, name) not in pairs:
                pairs.append((first, name))
    return pairs


def block_modules(model: Any) -> dict[str, nn.Module]:
    """Return the blocks that are modules, by name, in registration order."""
    return {name: unit for name, unit in _units(model) if isinstance(unit, nn.Module)}


def block_of(parameter_name: str, blocks: list[str]) -> str:
    """Return the block that a parameter belongs to, which may be the parameter itself."""
    return next((b for b in blocks if parameter_name.startswith(f"{b}.")), parameter_name)


def _units(model: Any) -> Iterator[tuple[str, nn.Module | Tensor]]:
    """Yield every block with its name, as a module or as a single tensor."""
    classes = set(getattr(model, "_no_split_modules", None) or ())
    split_paths: set[str] = set()
    for name, module in model.named_modules():
        listed = isinstance(module, nn.ModuleList) and not classes
        if type(module).__name__ in classes or listed:
            parts = name.split(".") + ([""] if listed else [])
            split_paths |= {".".join(parts[:end]) for end in range(len(parts))}
    yield from _descend("", model, split_paths, classes)


def _descend(
    path: str, module: nn.Module, split_paths: set[str], classes: set[str]
) -> Iterator[tuple[str, nn.Module | Tensor]]:
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None:
            yield f"{path}.{name}".lstrip("."), tensor
    for name, child in module.named_children():
        inner = f"{path}.{name}".lstrip(".")
        if inner in split_paths and type(child).__name__ not in classes:
            yield from _descend(inner, child, split_paths, classes)
        elif any(True for _ in (*child.parameters(), *child.buffers())):
            yield inner, child


def _block(name: str, unit: nn.Module | Tensor, seen: set[int]) -> Block:
    if isinstance(unit, Tensor):
        fresh = id(unit) not in seen
        seen.add(id(unit))
        return Block(name, other=unit.nbytes if fresh else 0)
    totals: dict[str, Any] = {"experts": 0, "linear": 0, "other": 0, "statistics": 0}
    largest = 0
    for module in unit.modules():
        for leaf, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            kind, statistics, dequantized = _classify(module, leaf, tensor)
            totals[kind] += tensor.nbytes
            totals["statistics"] += statistics
            largest = max(largest, dequantized)
    return Block(name, **totals, dequantized=largest)


def _classify(module: nn.Module, leaf: str, tensor: Tensor) -> tuple[str, int, int]:
    """Return a tensor's component, the bytes of its statistics, and of it dequantized at once."""
    if isinstance(module, nn.utils.parametrize.ParametrizationList) and leaf == "original":
        first: Any = module[0]
        if isinstance(first, parametrize.PackedInt8):  # its scales are a buffer, counted there
            return "experts", 0, _dequantized(tuple(first.weight_shape), first.weight_dtype)
        state = first.quant_state
        return "experts", _nbytes(state), _dequantized(tuple(state.shape), state.dtype)
    if isinstance(module, parametrize.PackedInt8):
        return "statistics", 0, 0
    if parametrize.is_packed_linear(module) and leaf == "weight":
        linear: Any = module
        state = getattr(tensor, "quant_state", None)
        size = linear.in_features * linear.out_features
        if state is not None:
            return "linear", _nbytes(state), size * state.dtype.itemsize
        scales = getattr(tensor, "SCB", None)
        return "linear", scales.nbytes if isinstance(scales, Tensor) else 0, 2 * size
    return "other", 0, 0


def _nbytes(state: Any) -> int:
    return sum(tensor.nbytes for tensor in state_tensors(state))


def _dequantized(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    size = torch.Size(shape).numel() * dtype.itemsize
    return size if size <= DEQUANTIZED_WEIGHT_BYTES else size // shape[0]
