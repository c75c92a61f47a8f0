"""Experts that are still lists of Linear modules: bitsandbytes packs these as any other Linear."""

from __future__ import annotations

from torch import nn

from ..layout import LinearExperts
from .routers import RouterIndex, is_list
from .shapes import Matrix, chain
from .tensors import Leaf, Node


def find_linear_experts(
    root: Node, index: RouterIndex
) -> tuple[tuple[LinearExperts, ...], tuple[Leaf, ...]]:
    """Lists of E alike modules of chaining Linears beside a router, and those routers."""
    found: list[LinearExperts] = []
    routers: list[Leaf] = []
    for node in root.subtree():
        if len(node.children) < 2 or node.parent is None or not _uniform(node):
            continue
        linears = _linears(node.children[0])
        matrices = [Matrix(i, *leaf.shape) for i, leaf in enumerate(linears)]
        if chain(matrices) is None:
            continue
        router = _router(node, index, len(node.children))
        if router is None:
            continue
        prefix = len(node.children[0].name) + 1
        names = tuple(leaf.node.name[prefix:] for leaf in linears)
        found.append(LinearExperts(node.name, len(node.children), names))
        routers.append(router)
    return tuple(found), tuple(routers)


def _linears(node: Node) -> list[Leaf]:
    return [leaf for below in node.subtree() for leaf in below.leaves if leaf.kind == "linear"]


def _signature(node: Node) -> tuple[tuple[int, ...], ...]:
    return tuple(leaf.shape for below in node.subtree() for leaf in below.leaves)


def _uniform(node: Node) -> bool:
    if not is_list(node) and (node.leaves or isinstance(node.module, nn.Sequential)):
        return False
    first = node.children[0]
    if not _linears(first):
        return False
    signature = _signature(first)
    return all(
        type(c.module) is type(first.module) and _signature(c) == signature
        for c in node.children[1:]
    )


def _router(node: Node, index: RouterIndex, count: int) -> Leaf | None:
    steps = 0
    for above in node.ancestors():
        if above is node or is_list(above):
            continue
        for leaf in index.visible(above):
            matrix = leaf.kind in ("linear", "bare") and len(leaf.shape) == 2
            if matrix and leaf.shape[0] == count and not node.holds(leaf.node):
                return leaf
        steps += 1
        if steps == 2:
            return None
    return None
