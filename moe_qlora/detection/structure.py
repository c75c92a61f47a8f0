"""Find routers and experts by the sizes and places of matrices.

Whatever its orientation, an expert's matrix has the sizes `{H, I}` (non-gated input, gate, up or
output projection) or `{H, 2 I}` (gate and up in one), and H is common to all of its matrices. Role
and orientation come from a dry run, otherwise from shapes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from torch import nn

from ..layout import DOWN, EXPERT, GATE, GATE_UP, UP
from .trace import Trace
from .tree import Leaf, Node

# How many levels above an expert parameter's module its router may stand. Deepest seen in
# transformers: 2 (DBRX).
MAX_CLIMB = 3


@dataclass(frozen=True, slots=True)
class RouterCandidate:
    """A matrix that could score each of E experts: it reads `width` and gives `num_choices`.

    `block` is the lowest module that contains both it and the expert parameter. It is `strong` if
    its place alone makes it a likely router: a Linear, or a bare matrix outside the module that
    owns the experts (inside, `(E, out)` is often a bias).
    """

    leaf: Leaf
    num_choices: int
    width: int
    strong: bool
    block: Node


def is_list(node: Node) -> bool:
    """Return whether the module only lists others, which are independent of each other.

    A dict of unlike modules is not a list but one block: its router and its experts by name.
    """
    if isinstance(node.module, nn.ModuleDict):
        return len({type(child) for child in node.module.children()}) < 2
    return isinstance(node.module, nn.ModuleList)


class RouterIndex:
    """By module, the matrices that its code probably uses."""

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

        They choose among `num_choices`, or any number if None.
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


@dataclass(frozen=True, slots=True)
class Matrix:
    """One expert's slice of a parameter, `rows x cols` as stored; `key` says which parameter's."""

    key: int
    rows: int
    cols: int

    @property
    def sizes(self) -> frozenset[int]:
        return frozenset((self.rows, self.cols))

    def other(self, size: int) -> int:
        """Return the side that is not `size`."""
        return self.cols if self.rows == size else self.rows

    def transposed(self, in_features: int, out_features: int) -> bool | None:
        """Return whether it is stored `(in, out)`; None for a square matrix."""
        if self.rows == self.cols:
            return None
        return (self.rows, self.cols) == (in_features, out_features)


@dataclass(frozen=True, slots=True)
class Fit:
    """The role and orientation of one matrix by shapes; None if undecided."""

    role: str | None
    transposed: bool | None


@dataclass(frozen=True, slots=True)
class Chain:
    """Matrices that chain: the two sizes, and the role and orientation of each matrix by key."""

    hidden: int
    intermediate: int
    gated: bool
    fits: dict[int, Fit]

    @property
    def fused(self) -> bool:
        """Whether gate and up are one matrix."""
        return any(fit.role == GATE_UP for fit in self.fits.values())

    def describe(self) -> str:
        """Return the chain in words, as in "64 -> 2 x 32 -> 64"."""
        middle = f"2 x {self.intermediate}" if self.gated else f"{self.intermediate}"
        return f"{self.hidden} -> {middle} -> {self.hidden}"


def find_chain(matrices: Sequence[Matrix], hidden_hints: Iterable[int] = ()) -> Chain | None:
    """Return the chain of matrices, or None; `hidden_hints` are sizes that a router reads."""
    if len(matrices) < 2 or any(min(m.rows, m.cols) < 2 for m in matrices):
        return None
    hints = set(hidden_hints)
    common = set.intersection(*(set(m.sizes) for m in matrices))
    sizes = sorted(common, key=lambda size: (size not in hints, -size))
    for hidden in sizes:
        others = {m.other(hidden) for m in matrices}
        if len(others) == 2 and (fused := _fused(matrices, hidden, min(others))) is not None:
            return fused
    for hidden in sizes:
        others = {m.other(hidden) for m in matrices}
        if len(others) == 1 and len(matrices) <= 3:
            return _separate(matrices, hidden, others.pop(), hidden in hints)
    return None


def _fused(matrices: Sequence[Matrix], hidden: int, inner: int) -> Chain | None:
    """Return the chain of as many {H, 2 I} as {H, I} matrices: gate and up in one, and down."""
    wide = [m for m in matrices if m.sizes == {hidden, 2 * inner}]
    narrow = [m for m in matrices if m not in wide and m.sizes == {hidden, inner}]
    if not wide or len(wide) != len(narrow) or len(wide) + len(narrow) != len(matrices):
        return None
    fits = {m.key: Fit(GATE_UP, m.transposed(hidden, 2 * inner)) for m in wide}
    fits |= {m.key: Fit(DOWN, m.transposed(inner, hidden)) for m in narrow}
    known = {fit.transposed for fit in fits.values() if fit.transposed is not None}
    if len(known) == 1:  # square matrices are stored as the others are
        fits = {key: Fit(fit.role, *known) for key, fit in fits.items()}
    return Chain(hidden, inner, True, fits)


def _separate(
    matrices: Sequence[Matrix], hidden: int, inner: int, known_hidden: bool
) -> Chain | None:
    """Return the chain of {H, I} matrices; of three, the two stored alike are gate and up."""
    fits = {m.key: Fit(None, None) for m in matrices}
    stored: dict[tuple[int, int], list[Matrix]] = {}
    for matrix in matrices:
        stored.setdefault((matrix.rows, matrix.cols), []).append(matrix)
    if known_hidden and hidden != inner and sorted(map(len, stored.values())) == [1, 2]:
        pair, single = sorted(stored.values(), key=len, reverse=True)
        for role, matrix in zip((GATE, UP), pair, strict=True):
            fits[matrix.key] = Fit(role, matrix.rows == hidden)
        fits[single[0].key] = Fit(DOWN, single[0].cols == hidden)
    return Chain(hidden, inner, len(matrices) == 3, fits)


class Use(NamedTuple):
    """How a parameter's matrices are applied, with the fields of `ExpertParam`; None if unknown."""

    role: str
    transposed: bool | None
    in_features: int | None
    out_features: int | None
    orientation_evidence: str


def slice_size(leaf: Leaf, axis: int, count: int) -> int:
    """Return the number of weights in one expert's matrix."""
    return leaf.numel // count if len(leaf.shape) == 2 else math.prod(leaf.shape[axis + 1 :])


def use_of(
    members: Sequence[Leaf], key: int, axis: int, count: int, chain: Chain | None, trace: Trace
) -> Use:
    """Return how the member `key` is applied; its dimension `axis` counts `count` experts."""
    leaf, role = members[key], _role(key, chain, trace, len(members))
    numel = slice_size(leaf, axis, count)
    last = len(leaf.shape) - 1
    uses = [c for c in trace.contractions if c.weight == key and c.axis is not None and c.size > 1]
    uses = [c for c in uses if c.axis != axis or len(leaf.shape) == 2]
    ways = {(c.axis == last, c.size) for c in uses}
    if len(ways) == 1:
        is_last, size = ways.pop()
        evidence = f"a dry run of the block sums over the {size} of dimension {uses[0].axis}"
        return Use(role, not is_last, size, numel // size, evidence)
    fit = chain.fits.get(key) if chain is not None else None
    if fit is not None and fit.transposed is not None:
        rows, columns = numel // leaf.shape[-1], leaf.shape[-1]
        sides = (rows, columns) if fit.transposed else (columns, rows)
        evidence = "the sizes of its siblings leave one orientation"
        return Use(role, fit.transposed, *sides, evidence)
    if ways:
        evidence = "undecided: the forward uses it both ways round"
    else:
        why = trace.error or "the dry run did not use it"
        evidence = f"undecided: its shapes fit both ways round, and {why}"
    return Use(role, None, None, None, evidence)


def _role(key: int, chain: Chain | None, trace: Trace, number: int) -> str:
    if chain is None:
        return EXPERT
    fit = chain.fits.get(key)
    if fit is not None and fit.role == GATE_UP:
        return GATE_UP
    fed = trace.feeds()
    if key in fed:
        return DOWN
    downs = [weight for weight, sources in fed.items() if key in sources]
    if downs:
        if number == 2:
            return UP
        sources = fed[downs[0]]
        others = [nonlinear for weight, nonlinear in sources.items() if weight != key]
        if others and sources[key] != others[0]:
            return GATE if sources[key] else UP
        return GATE if key == min(sources) else UP
    if fit is not None and fit.role is not None:
        return fit.role
    if number == 2:
        return UP if key == 0 else DOWN
    return (GATE, UP, DOWN)[key] if number == 3 else EXPERT


@dataclass(eq=False, slots=True)
class ExpertGroup:
    """Members, parameters of one module or of siblings, that may be one set of experts.

    `block` is the lowest module that contains them and the router that most likely chooses among
    them; `counts` has E of each member, and `axis` is the dimension that counts experts.
    """

    block: Node
    router: RouterCandidate
    members: list[Leaf]
    counts: list[int]
    axis: int
    chain: Chain | None = None  # of one expert's matrices; None if they do not chain
    exact: bool = True  # the router gives exactly E scores
    alternatives: tuple[RouterCandidate, ...] = ()  # all possible routers, likeliest first

    @property
    def sizes(self) -> set[int]:
        """Possible numbers of choices."""
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
    """Return the chain of one expert's slices of the members, or None.

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
            (leaf,) = deep
            alone[node.parent, leaf.shape[0]].append(leaf)
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
    """Return possible routers of a group, likeliest first, and whether their number is exact."""
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
