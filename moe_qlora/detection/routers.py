"""Find the matrices that could choose among E experts, and how near they stand to a parameter."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from .tree import Leaf, Node

# How many levels above an expert parameter's module its router may stand. Deepest seen in
# transformers: 2 (DBRX).
MAX_CLIMB = 3


@dataclass(frozen=True, slots=True)
class RouterCandidate:
    """A matrix that could score each of E experts: it reads `width` and gives `num_choices`.

    `block` is the lowest module that holds both it and the expert parameter. It is `strong` where
    its place alone makes it a likely router: a Linear, or a bare matrix outside the module that
    owns the experts (there, `(E, out)` is a bias as often).
    """

    leaf: Leaf
    num_choices: int
    width: int
    strong: bool
    block: Node


def is_list(node: Node) -> bool:
    """Return whether the module only lists others: one item says nothing of the next.

    A dict of unlike modules is not a list but one block: its router and its experts by name.
    """
    if isinstance(node.module, nn.ModuleDict):
        return len({type(child) for child in node.module.children()}) < 2
    return isinstance(node.module, nn.ModuleList)


class RouterIndex:
    """For each module, the matrices that code of this module can be expected to reach."""

    def __init__(self) -> None:
        self._visible: dict[Node, list[Leaf]] = {}

    def visible(self, node: Node) -> list[Leaf]:
        """Return matrices of the module and below it, without lists of larger modules (layers)."""
        if node not in self._visible:
            self._visible[node] = [leaf for leaf in node.leaves if _matrix_like(leaf)]
            for child in node.children:
                if not (is_list(child) and any(item.children for item in child.children)):
                    self._visible[node] += self.visible(child)
        return self._visible[node]

    def candidates(
        self, parameter: Leaf, num_choices: int | None, climb: int = MAX_CLIMB
    ) -> list[RouterCandidate]:
        """Return possible routers up to `climb` levels above a parameter, nearest first.

        They choose among `num_choices`, or among any number where that is None.
        """
        blocks = [n for n in parameter.node.ancestors() if n is parameter.node or not is_list(n)]
        leaves = dict.fromkeys(leaf for n in blocks[: climb + 1] for leaf in self.visible(n))
        return [
            candidate
            for leaf in leaves
            if leaf is not parameter
            for candidate in _readings(leaf, parameter, num_choices)
        ]

    def slot_scores(self, parameter: Leaf) -> Leaf | None:
        """Return a parameter `(hidden, E, slots)` near one of E matrices: Soft-MoE's router.

        It scores slots of every expert, which all run, each on mixtures of tokens. An expert's
        hidden layer has more units than it has slots.
        """
        blocks = [n for n in parameter.node.ancestors() if n is parameter.node or not is_list(n)]
        for leaf in (leaf for n in blocks[: MAX_CLIMB + 1] for leaf in self.visible(n)):
            if leaf.kind == "bare" and len(leaf.shape) == 3 and leaf.numel < parameter.numel:
                hidden, experts, _ = leaf.shape
                if experts == parameter.shape[0] and hidden in parameter.shape[1:]:
                    return leaf
        return None


def _matrix_like(leaf: Leaf) -> bool:
    if leaf.kind in ("conv", "table", "layer") or not (leaf.dtype.is_floating_point or leaf.packed):
        return False
    return len(leaf.shape) == 2 or (len(leaf.shape) == 3 and leaf.kind == "bare")


def _readings(leaf: Leaf, parameter: Leaf, num_choices: int | None) -> list[RouterCandidate]:
    """Read a matrix as a router in each way that its shape allows."""
    if leaf.kind == "linear":
        pairs = [leaf.shape]
    elif len(leaf.shape) == 2:
        pairs = [leaf.shape, leaf.shape[::-1]]
    elif len(parameter.shape) == 4 and leaf.shape[0] == parameter.shape[0]:
        pairs = [leaf.shape[1:], leaf.shape[:0:-1]]  # one router for each layer
    else:
        return []
    strong = leaf.kind == "linear" or (leaf.kind == "bare" and leaf.node is not parameter.node)
    block = leaf.node.common_ancestor(parameter.node)
    return [
        RouterCandidate(leaf, number, width, strong, block)
        for number, width in pairs
        if num_choices in (None, number)
    ]
