"""What could choose among E experts, and how near it stands to a stack."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from .tree import Leaf, Node, common_ancestor

# How many levels above a stack's module its router may stand. Deepest seen in transformers: 2
# (DBRX).
MAX_CLIMB = 3


@dataclass(frozen=True, slots=True)
class Candidate:
    """A matrix that could produce a score for each of E experts.

    Attributes:
        leaf: The matrix: an nn.Linear's weight, a bare parameter `(E, D)` or `(D, E)`, or a buffer.
        choices: How many scores it gives.
        width: D, the size that it reads.
        strong: Whether its place alone makes it a likely router: a Linear, or a bare matrix
            outside the module that owns the stacks (there, `(E, out)` is a bias as often).
        block: The lowest module that holds both the matrix and the stack.
    """

    leaf: Leaf
    choices: int
    width: int
    strong: bool
    block: Node

    @property
    def name(self) -> str:
        """The module's name for a Linear, the parameter's own for a bare matrix."""
        return self.leaf.node.name if self.leaf.kind == "linear" else self.leaf.name


def is_list(node: Node) -> bool:
    """Whether the module only lists others: what is true of one item says nothing of the next.

    A dict of unlike modules is no list, but one block: its router and its experts by name.
    """
    if isinstance(node.module, nn.ModuleDict):
        return len({type(child) for child in node.module.children()}) < 2
    return isinstance(node.module, nn.ModuleList)


class RouterIndex:
    """For each module, the matrices that code of this module can be expected to reach."""

    def __init__(self) -> None:
        self._visible: dict[int, list[Leaf]] = {}

    def visible(self, node: Node) -> list[Leaf]:
        """Matrices of the module and all below it, but not of lists of larger modules (layers)."""
        found = self._visible.get(id(node))
        if found is None:
            found = [leaf for leaf in node.leaves if _matrix_like(leaf)]
            for child in node.children:
                if is_list(child) and any(item.children for item in child.children):
                    continue
                found.extend(self.visible(child))
            self._visible[id(node)] = found
        return found

    def candidates(
        self, stack: Leaf, choices: set[int] | None, climb: int = MAX_CLIMB
    ) -> list[Candidate]:
        """Possible routers for a stack, nearest first.

        Args:
            stack: The stack.
            choices: Accepted numbers of choices; None accepts any.
            climb: Levels to go up from the stack's module.
        """
        found: list[Candidate] = []
        taken: set[int] = {id(stack)}
        steps = 0
        for node in stack.node.ancestors():
            if is_list(node) and node is not stack.node:
                continue
            for leaf in self.visible(node):
                if id(leaf) in taken:
                    continue
                taken.add(id(leaf))
                found.extend(_readings(leaf, stack, choices))
            steps += 1
            if steps > climb:
                break
        return found


def _matrix_like(leaf: Leaf) -> bool:
    if leaf.kind in ("conv", "table", "layer") or not (leaf.dtype.is_floating_point or leaf.packed):
        return False
    return len(leaf.shape) == 2 or (len(leaf.shape) == 3 and leaf.kind == "bare")


def _readings(leaf: Leaf, stack: Leaf, choices: set[int] | None) -> list[Candidate]:
    block = common_ancestor(leaf.node, stack.node)
    if leaf.kind == "linear":
        out, width = leaf.shape
        pairs = [(out, width)]
    elif len(leaf.shape) == 2:
        pairs = [(leaf.shape[0], leaf.shape[1]), (leaf.shape[1], leaf.shape[0])]
    elif len(stack.shape) == 4 and leaf.shape[0] == stack.shape[0]:
        pairs = [(leaf.shape[1], leaf.shape[2]), (leaf.shape[2], leaf.shape[1])]
    else:
        return []
    strong = leaf.kind == "linear" or (leaf.kind == "bare" and leaf.node is not stack.node)
    return [
        Candidate(leaf, number, width, strong, block)
        for number, width in pairs
        if choices is None or number in choices
    ]
