"""Represent a model as a tree of modules and tensors, without reading any weight."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..layout import dtype_name

_ORIGINAL = re.compile(r"\bparametrizations\.([^.]+)\.original$")  # the name of a packed weight

# Layers of torch: the class, not a name, determines the meaning of their tensors.
_KINDS: dict[str, tuple[type[nn.Module], ...]] = {
    "conv": (nn.modules.conv._ConvNd,),
    "table": (nn.Embedding, nn.EmbeddingBag),
    "layer": (nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention, nn.Bilinear),
}


@dataclass(eq=False, slots=True)
class Leaf:
    """One parameter as the model's code sees it, packed weights with their decoded shape."""

    name: str
    node: "Node"
    attribute: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: str  # "linear" (weight of an nn.Linear), of `_KINDS`, or "bare" (of the model's own)
    packed: str | None = None
    nbytes: int = 0
    aliases: list[str] = field(default_factory=list)

    @property
    def shape_text(self) -> str:
        return "x".join(map(str, self.shape))

    @property
    def known_as(self) -> str:
        return self.node.name if self.kind == "linear" else self.name


@dataclass(eq=False, slots=True)
class Node:
    """One module with the tensors that it owns directly."""

    name: str
    module: nn.Module
    parent: "Node | None"
    depth: int
    children: "list[Node]" = field(default_factory=list)
    leaves: list[Leaf] = field(default_factory=list)

    def subtree(self) -> "Iterator[Node]":
        yield self
        for child in self.children:
            yield from child.subtree()

    def ancestors(self) -> "Iterator[Node]":
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent

    def contains(self, other: "Node") -> bool:
        return any(node is self for node in other.ancestors())

    def common_ancestor(self, other: "Node") -> "Node":
        return next(node for node in self.ancestors() if node.contains(other))


def join(prefix: str, name: str) -> str:
    """Return the dotted name of `name` on the module `prefix`."""
    return f"{prefix}.{name}" if prefix else name


def _leaf(node: Node, attribute: str, tensor: torch.Tensor, kind: str) -> Leaf:
    # ZeRO-3 leaves an empty tensor with the shape as an attribute.
    shape = tuple(getattr(tensor, "ds_shape", tensor.shape))
    dtype, packed = tensor.dtype, None
    state: Any = getattr(tensor, "quant_state", None)
    if kind == "linear" and isinstance(node.module, nn.Linear):
        # A packed Linear's weight has lost its shape; the module still knows it.
        shape = (node.module.out_features, node.module.in_features)
        if not dtype.is_floating_point or state is not None:
            packed = str(getattr(state, "quant_type", dtype_name(dtype)))
            dtype = getattr(state, "dtype", torch.get_default_dtype())
    name, nbytes = join(node.name, attribute), tensor.numel() * tensor.element_size()
    return Leaf(name, node, attribute, shape, dtype, kind, packed, nbytes)


def _own_leaves(node: Node) -> Iterator[tuple[Leaf, torch.Tensor]]:
    module = node.module
    of_torch = next((kind for kind, own in _KINDS.items() if isinstance(module, own)), None)
    for attribute, parameter in module._parameters.items():
        is_linear = isinstance(module, nn.Linear) and attribute == "weight"
        if parameter is not None:
            kind = of_torch or ("linear" if is_linear else "bare")
            yield _leaf(node, attribute, parameter, kind), parameter
    parametrized = module._modules.get("parametrizations")
    for attribute, steps in parametrized.items() if isinstance(parametrized, nn.ModuleDict) else ():
        original: Any = getattr(steps, "original", None)
        if isinstance(original, torch.Tensor):
            leaf = _leaf(node, attribute, original, "bare")
            step: Any
            for step in steps.children():  # those that decode show shape, dtype and packed type
                state: Any = getattr(step, "quant_state", None)
                shape, dtype = getattr(state, "shape", None), getattr(state, "dtype", None)
                if hasattr(step, "weight_shape"):  # of this package's decoders
                    leaf.shape, leaf.dtype = tuple(step.weight_shape), step.weight_dtype
                    leaf.packed = step.kind
                elif shape is not None and dtype is not None:
                    leaf.shape, leaf.dtype = tuple(shape), dtype
                    leaf.packed = str(getattr(state, "quant_type", "packed"))
            yield leaf, original


def build_tree(model: nn.Module) -> tuple[Node, list[Leaf]]:
    """Return the model as a tree, and its distinct tensors in the order of `named_parameters`."""
    # A tensor that several modules share is one Leaf, under its first name.
    seen: dict[int, tuple[Leaf, torch.Tensor]] = {}
    visited: set[int] = set()
    leaves: list[Leaf] = []

    def visit(name: str, module: nn.Module, parent: Node | None) -> Node:
        node = Node(name, module, parent, 0 if parent is None else parent.depth + 1)
        for leaf, tensor in _own_leaves(node):
            if id(tensor) in seen:
                seen[id(tensor)][0].aliases.append(leaf.name)
            else:
                seen[id(tensor)] = leaf, tensor
                node.leaves.append(leaf)
        leaves.extend(node.leaves)
        visited.add(id(module))
        for child_name, child in module._modules.items():
            if child is None or child_name == "parametrizations":
                continue
            path = join(name, child_name)
            # An adapter's factors are skipped: of rank 1 on E experts they look like routers.
            adapted: Any = child
            while hasattr(adapted, "adapter_layer_names") and "base_layer" in adapted._modules:
                path, adapted = join(path, "base_layer"), adapted.base_layer
            if id(adapted) not in visited:
                node.children.append(visit(path, adapted, node))
                continue
            for inner, parameter in adapted.named_parameters(remove_duplicate=False):
                if id(parameter) in seen:
                    alias = _ORIGINAL.sub(r"\1", join(path, inner))
                    seen[id(parameter)][0].aliases.append(alias)
        return node

    root = visit("", model, None)
    seen.clear()  # `visit` refers to itself: weights would live until a garbage collection.
    return root, leaves
