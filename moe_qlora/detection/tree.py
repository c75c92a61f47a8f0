"""Show a model as a tree of modules and tensors, without touching any weight."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

# Torch's own building blocks: what their tensors mean follows from the class, not from a name.
CONVOLUTIONS = (nn.modules.conv._ConvNd,)
TORCH_LAYERS = (nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention, nn.Bilinear)
LOOKUP_TABLES = (nn.Embedding, nn.EmbeddingBag)


@dataclass(eq=False, slots=True)
class Leaf:
    """One parameter or buffer as the model's code sees it, packed weights with their decoded shape.

    `kind` is "linear" (weight of an nn.Linear or of a subclass), "conv", "table" (embedding),
    "layer" (weight of another layer of torch), "bare" (a parameter on a module that the model
    defines itself) or "buffer".
    """

    name: str
    node: Node
    attribute: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: str
    tensor: torch.Tensor
    packed: str | None = None
    nbytes: int = 0
    aliases: list[str] = field(default_factory=list)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def shape_text(self) -> str:
        """The shape as in "4x64x32"."""
        return "x".join(map(str, self.shape))


@dataclass(eq=False, slots=True)
class Node:
    """One module with the tensors that it owns directly."""

    name: str
    module: nn.Module
    parent: Node | None
    depth: int
    children: list[Node] = field(default_factory=list)
    leaves: list[Leaf] = field(default_factory=list)

    def subtree(self) -> Iterator[Node]:
        """Yield this node and all below it, parents first."""
        yield self
        for child in self.children:
            yield from child.subtree()

    def ancestors(self) -> Iterator[Node]:
        """Yield this node and all above it, nearest first."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent

    def holds(self, other: Node) -> bool:
        """Return whether `other` is this node or stands below it."""
        return any(node is self for node in other.ancestors())


def common_ancestor(first: Node, second: Node) -> Node:
    """Return the lowest node that holds both."""
    return next(node for node in first.ancestors() if node.holds(second))


def join(prefix: str, name: str) -> str:
    """Return the dotted name of `name` on the module `prefix`."""
    return f"{prefix}.{name}" if prefix else name


def _decoded_view(parametrization: nn.Module) -> tuple[tuple[int, ...], torch.dtype, str] | None:
    """Return shape, dtype and packed type that a parametrization decodes; None if it packs none."""
    if hasattr(parametrization, "weight_shape"):  # of this package's 8-bit weights
        int8: Any = parametrization
        return tuple(int8.weight_shape), int8.weight_dtype, "int8"
    state: Any = getattr(parametrization, "quant_state", None)
    shape, dtype = getattr(state, "shape", None), getattr(state, "dtype", None)
    if shape is None or dtype is None:
        return None
    return tuple(shape), dtype, str(getattr(state, "quant_type", "packed"))


def _kind(module: nn.Module, attribute: str) -> str:
    if isinstance(module, CONVOLUTIONS):
        return "conv"
    if isinstance(module, LOOKUP_TABLES):
        return "table"
    if isinstance(module, TORCH_LAYERS):
        return "layer"
    if isinstance(module, nn.Linear) and attribute == "weight":
        return "linear"
    return "bare"


def _leaf(node: Node, attribute: str, tensor: torch.Tensor, kind: str) -> Leaf:
    # DeepSpeed's ZeRO-3 leaves an empty tensor behind and keeps the true shape beside it.
    shape = tuple(getattr(tensor, "ds_shape", tensor.shape))
    dtype, packed = tensor.dtype, None
    state: Any = getattr(tensor, "quant_state", None)
    if kind == "linear" and isinstance(node.module, nn.Linear):
        # A packed Linear's weight has lost its shape; the module still knows it.
        shape = (node.module.out_features, node.module.in_features)
        if not dtype.is_floating_point or state is not None:
            packed = str(getattr(state, "quant_type", "int8"))
            dtype = getattr(state, "dtype", torch.get_default_dtype())
    return Leaf(
        name=join(node.name, attribute),
        node=node,
        attribute=attribute,
        shape=shape,
        dtype=dtype,
        kind=kind,
        tensor=tensor,
        packed=packed,
        nbytes=tensor.numel() * tensor.element_size(),
    )


def _own_leaves(node: Node, seen: dict[int, Leaf]) -> None:
    def add(leaf: Leaf) -> None:
        first = seen.get(id(leaf.tensor))
        if first is not None and first.kind != "buffer":
            first.aliases.append(leaf.name)
            return
        seen[id(leaf.tensor)] = leaf
        node.leaves.append(leaf)

    module = node.module
    for attribute, parameter in module._parameters.items():
        if parameter is not None:
            add(_leaf(node, attribute, parameter, _kind(module, attribute)))
    parametrized = module._modules.get("parametrizations")
    for attribute, steps in parametrized.items() if isinstance(parametrized, nn.ModuleDict) else ():
        original: Any = getattr(steps, "original", None)
        if not isinstance(original, torch.Tensor):
            continue
        leaf = _leaf(node, attribute, original, "bare")
        views = [view for step in steps.children() if (view := _decoded_view(step)) is not None]
        if views:
            leaf.shape, leaf.dtype, leaf.packed = views[0]
        add(leaf)
    for attribute, buffer in module._buffers.items():
        if buffer is not None:
            add(_leaf(node, attribute, buffer, "buffer"))


def build_tree(model: nn.Module) -> tuple[Node, list[Leaf]]:
    """Return the model as a tree, and its distinct tensors in the order of `named_parameters`.

    A tensor that several modules share is one Leaf, under its first name, with the others as
    `aliases`. Modules that exist only to parametrize others are left out.
    """
    seen: dict[int, Leaf] = {}
    visited: set[int] = set()
    leaves: list[Leaf] = []

    def visit(name: str, module: nn.Module, parent: Node | None) -> Node:
        node = Node(name, module, parent, 0 if parent is None else parent.depth + 1)
        _own_leaves(node, seen)
        leaves.extend(node.leaves)
        visited.add(id(module))
        for child_name, child in module._modules.items():
            if child is None or child_name == "parametrizations":
                continue
            path = join(name, child_name)
            if id(child) in visited:
                _alias_module(path, child, seen)
                continue
            node.children.append(visit(path, child, node))
        return node

    root = visit("", model, None)
    return root, leaves


def _alias_module(path: str, module: nn.Module, seen: dict[int, Leaf]) -> None:
    for name, parameter in module.named_parameters(remove_duplicate=False):
        leaf = seen.get(id(parameter))
        if leaf is not None:
            alias = join(path, name)
            parts = alias.split(".")
            if parts[-1] == "original" and len(parts) >= 3 and parts[-3] == "parametrizations":
                alias = ".".join([*parts[:-3], parts[-2]])
            leaf.aliases.append(alias)
