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
        if len(items) < 2 or node.parent is None or not _uniform(node, items):
            continue
        linears = _linears(items[0])
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


def _linears(node: Node) -> list[Leaf]:
    return [leaf for below in node.subtree() for leaf in below.leaves if leaf.kind == "linear"]


def _signature(node: Node) -> tuple[tuple[int, ...], ...]:
    return tuple(leaf.shape for below in node.subtree() for leaf in below.leaves)


def _uniform(node: Node, items: list[Node]) -> bool:
    """Return whether a list's items are of one class, with tensors of the same shapes."""
    if not is_list(node) and (node.leaves or isinstance(node.module, nn.Sequential)):
        return False
    kind, signature = type(items[0].module), _signature(items[0])
    return bool(_linears(items[0])) and all(
        type(item.module) is kind and _signature(item) == signature for item in items[1:]
    )


def _router(node: Node, index: RouterIndex, count: int) -> Leaf | None:
    """Return the (E, hidden) matrix in the two modules around the list that stands nearest."""
    blocks = (above for above in node.ancestors() if above is not node and not is_list(above))
    for block in itertools.islice(blocks, 2):
        for leaf in index.visible(block):
            matrix = leaf.kind in ("linear", "bare") and len(leaf.shape) == 2
            if matrix and leaf.shape[0] == count and not node.holds(leaf.node):
                return leaf
    return None
