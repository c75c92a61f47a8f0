"""Find experts that are lists of Linear modules, which bitsandbytes packs as any other Linear."""

from __future__ import annotations

import itertools

from torch import nn

from ..layout import LinearExperts
from .routers import RouterIndex, is_list
from .shapes import Matrix, find_chain
from .tree import Leaf, Node


def find_linear_experts(
    root: Node, index: RouterIndex
) -> tuple[tuple[LinearExperts, ...], tuple[Leaf, ...]]:
    """Return every list of E alike modules of chaining Linears beside a router, and the routers."""
    experts: list[LinearExperts] = []
    routers: list[Leaf] = []
    for node in root.subtree():
        # A dropout or an activation may stand in the list too.
        items = [child for child in node.children if any(n.leaves for n in child.subtree())]
        is_listing = is_list(node) or not (node.leaves or isinstance(node.module, nn.Sequential))
        if len(items) < 2 or node.parent is None or not is_listing:
            continue
        if len(set(map(_built_as, items))) > 1:
            continue
        below = (leaf for part in items[0].subtree() for leaf in part.leaves)
        linears = [leaf for leaf in below if leaf.kind == "linear"]
        matrices = [Matrix(i, *leaf.shape) for i, leaf in enumerate(linears)]
        if find_chain(matrices) is None:
            continue
        router = _router(node, index, len(items))
        if router is None:
            continue
        prefix = len(items[0].name) + 1
        names = tuple(leaf.node.name[prefix:] for leaf in linears)
        experts.append(LinearExperts(node.name, len(items), names))
        routers.append(router)
    return tuple(experts), tuple(routers)


def _built_as(node: Node) -> tuple[object, ...]:
    """Return the module's class, and the shapes of the tensors in it."""
    shapes = (leaf.shape for below in node.subtree() for leaf in below.leaves)
    return type(node.module), *shapes


def _router(node: Node, index: RouterIndex, count: int) -> Leaf | None:
    """Return the (E, hidden) matrix in the two modules around the list that stands nearest."""
    blocks = (above for above in node.ancestors() if above is not node and not is_list(above))
    for block in itertools.islice(blocks, 2):
        for leaf in index.visible(block):
            matrix = leaf.kind in ("linear", "bare") and len(leaf.shape) == 2
            if matrix and leaf.shape[0] == count and not node.holds(leaf.node):
                return leaf
    return None
