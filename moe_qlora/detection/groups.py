"""Group the parameters that may be one set of experts, each group under its likely router."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import groupby
from operator import attrgetter

from .routers import RouterCandidate, RouterIndex
from .shapes import Chain, Matrix, find_chain
from .tree import Leaf, Node


@dataclass(eq=False, slots=True)
class ExpertGroup:
    """Members, parameters of one module or of siblings, that may be one set of experts.

    `block` is the lowest module that holds them and the router that most likely chooses among
    them; `counts` has E of each member, and `axis` is the dimension that counts experts.
    """

    block: Node
    router: RouterCandidate
    members: list[Leaf]
    counts: list[int]
    axis: int
    chain: Chain | None = None  # how one expert's matrices chain; None where they do not
    exact: bool = True  # the router gives exactly E scores
    alternatives: tuple[RouterCandidate, ...] = ()  # all possible routers, likeliest first

    @property
    def sizes(self) -> set[int]:
        """Numbers that a choice may be among."""
        return {self.router.num_choices, *self.counts}

    @property
    def hidden_sizes(self) -> list[int]:
        """Sizes that the block's hidden states may have, likeliest first."""
        sizes = [self.router.width, *([] if self.chain is None else [self.chain.hidden])]
        sizes += [size for leaf in self.members for size in reversed(leaf.shape[-2:])]
        return list(dict.fromkeys(size for size in sizes if size > 1))


def chain_of(
    members: Sequence[Leaf], axis: int, counts: Sequence[int], hints: Iterable[int]
) -> Chain | None:
    """Return how one expert's slices of the members chain.

    A slice of three dimensions is read as a matrix in each way. `hints` are known hidden sizes.
    """
    for cut in (-1, 1):  # where the dimensions of a slice divide into rows and columns
        matrices = []
        for key, (leaf, count) in enumerate(zip(members, counts, strict=True)):
            flat = (leaf.shape[0] // count, leaf.shape[1]) if len(leaf.shape) == 2 else ()
            sides = flat or leaf.shape[axis + 1 :]
            matrices.append(Matrix(key, math.prod(sides[:cut]), math.prod(sides[cut:])))
        if chain := find_chain(matrices, hints):
            return chain
    return None


def plausible(router: RouterCandidate, sizes: set[int]) -> bool:
    """Return whether shapes alone suggest a router: it reads the hidden size and gives no width."""
    reads = router.width in sizes
    return reads and router.num_choices not in sizes and router.num_choices < router.width * 2


def find_groups(candidates: Sequence[Leaf], index: RouterIndex) -> list[ExpertGroup]:
    """Group the candidates, each group under the router that stands nearest to it."""
    groups: list[ExpertGroup] = []
    alone: dict[tuple[Node, int], list[Leaf]] = defaultdict(list)
    for node, owned in groupby(candidates, attrgetter("node")):
        members = list(owned)
        flat = [leaf for leaf in members if len(leaf.shape) == 2]
        deep = [leaf for leaf in members if len(leaf.shape) > 2]
        if len(deep) == 1 and node.parent is not None:
            alone[node.parent, deep[0].shape[0]].append(deep[0])
        elif deep:
            groups.extend(_deep_groups(deep, index))
        if len(flat) >= 2:
            groups.extend(_flat_group(flat, index))
    for members in alone.values():
        groups.extend(_deep_groups(members, index))
    # A group does not borrow the router of a group nearer to it.
    nearest: dict[Leaf, int] = defaultdict(int)
    for group in groups:
        if group.chain is not None:
            router = group.router.leaf
            nearest[router] = max(nearest[router], group.block.depth)
    return [group for group in groups if group.block.depth >= nearest[group.router.leaf]]


def _deep_groups(members: list[Leaf], index: RouterIndex) -> list[ExpertGroup]:
    """Return one group where all members chain, else the groups of those that do."""
    whole = _group(members, index)
    if whole is not None and (whole.chain is not None or len(members) == 1):
        return [whole]
    # Experts of all layers in one parameter have four dimensions, and their routers three.
    alike: dict[tuple[int, int], list[Leaf]] = defaultdict(list)
    for leaf in members:
        alike[len(leaf.shape), leaf.shape[0]].append(leaf)
    if len(alike) > 1:
        return [group for part in alike.values() for group in _deep_groups(part, index)]
    return [group for run in _runs(members) if (group := _group(run, index)) is not None]


def _runs(members: list[Leaf]) -> list[list[Leaf]]:
    """Return consecutive members that chain: fused pairs or, if all are, triples; else singles."""
    # Four alike matrices are a head's query, key, value and output more often than twice two.
    runs: list[list[Leaf]] = []
    rest = list(members)
    wide = [leaf.shape[-2] < leaf.shape[-1] for leaf in members]
    triples = len(members) % 3 == 0 and wide == wide[:3] * (len(members) // 3)
    while rest:
        for size in (2, 3):
            run = rest[:size]
            chain = chain_of(run, 0, [leaf.shape[0] for leaf in run], ())
            if len(run) == size and chain and (chain.fused or (size == 3 and triples)):
                break
        else:
            run = rest[:1]
        runs.append(run)
        rest = rest[len(run) :]
    return runs


def _group(members: list[Leaf], index: RouterIndex) -> ExpertGroup | None:
    """Return the members as one group; None where nothing chooses among their matrices."""
    largest = max(members, key=lambda leaf: leaf.shape[0])
    fallback: ExpertGroup | None = None
    # Of four dimensions, any of the first two over 1 may count experts.
    leading = range(len(largest.shape) - 2)
    for axis in [axis for axis in leading if largest.shape[axis] > 1] or [0]:
        counts = [leaf.shape[axis] for leaf in members]
        linked = chain_of(members, axis, counts, ()) is not None
        routers, exact = _routers(largest, members, largest.shape[axis], linked, index)
        if not routers:
            continue
        block = reduce(Node.common_ancestor, (leaf.node for leaf in members), routers[0].block)
        chain = chain_of(members, axis, counts, [routers[0].width])
        group = ExpertGroup(block, routers[0], members, counts, axis, chain, exact, tuple(routers))
        if exact:
            return group
        fallback = fallback or group
    return fallback


def _routers(
    parameter: Leaf, members: list[Leaf], count: int, linked: bool, index: RouterIndex
) -> tuple[list[RouterCandidate], bool]:
    """Return what may choose among a group's matrices, likeliest first, and is its number exact."""
    sizes = {size for leaf in members for size in leaf.shape[1:]}
    exact = [c for c in index.candidates(parameter, count) if c.leaf not in members]
    exact.sort(key=lambda c: (not c.strong, -c.block.depth, c.width not in sizes))
    if count == 1:
        return ([c for c in exact if c.strong], True) if linked else ([], False)
    if not linked:
        # A parameter that stands alone has only its router to speak for it, which must be near
        # and read one of its sizes.
        depth = parameter.node.depth
        return [c for c in exact if c.width in sizes and depth - c.block.depth <= 2], True
    if exact:
        return exact, True
    # More scores than matrices: one rank's share of the experts, or scores of other things.
    near = [
        c for c in index.candidates(parameter, None, climb=2) if c.strong and c.num_choices > count
    ]
    near.sort(key=lambda c: (-c.block.depth, not plausible(c, sizes), c.num_choices % count != 0))
    return near, False


def _flat_group(members: list[Leaf], index: RouterIndex) -> list[ExpertGroup]:
    """Group 2-D parameters that hold one expert's rows below the other's: `(E * rows, columns)`."""
    rows, columns = members[0].shape
    routers = [
        c
        for c in index.candidates(members[0], None)
        if c.strong and 1 < c.num_choices < rows and rows % c.num_choices == 0
        if c.width == columns and c.leaf not in members
    ]
    if not routers or any(leaf.shape != members[0].shape for leaf in members):
        return []
    router = max(routers, key=lambda c: c.block.depth)
    counts = [router.num_choices] * len(members)
    chain = chain_of(members, 0, counts, [columns])
    return [ExpertGroup(router.block, router, members, counts, 0, chain)]
