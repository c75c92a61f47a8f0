"""Find routers and experts by the sizes and places of matrices.

Whatever its orientation, an expert's matrix has the sizes `{H, I}` (non-gated input, gate, up or
output projection) or `{H, 2 I}` (gate and up in one), and H is common to all of its matrices. Sizes
alone leave several readings of a pair without a gate, and of three alike; the router, the module's
own attributes and the order of registration tell which holds.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import chain as joined
from itertools import groupby, takewhile
from operator import attrgetter

from torch import nn

from ..layout import DOWN, GATE, GATE_UP, UP
from .tree import Leaf, Node

# How many levels above an expert parameter's module its router may stand. Deepest seen in
# transformers: 2 (DBRX).
MAX_CLIMB = 3

# Orders in which a module may register two or three matrices; gate before up, as all known code.
_PAIRS = ((GATE_UP, DOWN), (DOWN, GATE_UP), (UP, DOWN), (DOWN, UP))
_TRIPLES = ((GATE, UP, DOWN), (GATE, DOWN, UP), (DOWN, GATE, UP))


@dataclass(frozen=True, slots=True)
class RouterCandidate:
    """A matrix that could score each of E experts: it reads `width` and gives `num_choices`.

    `block` is the lowest module that contains both it and the expert parameter. A `strong` one is a
    Linear, or stands outside the module that owns the experts, where `(E, out)` is often a bias.
    """

    leaf: Leaf
    num_choices: int
    width: int
    strong: bool
    block: Node


def is_list(node: Node) -> bool:
    """Return whether the module only lists others, which are independent of each other."""
    # A dict of unlike modules is one block: its router and its experts by name.
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
            own = [leaf for leaf in node.leaves if leaf.kind in ("linear", "bare")]
            own = [leaf for leaf in own if leaf.dtype.is_floating_point or leaf.packed is not None]
            self._visible[node] = [leaf for leaf in own if len(leaf.shape) == 2]
            for child in node.children:
                if not (is_list(child) and any(item.children for item in child.children)):
                    self._visible[node] += self.visible(child)
        return self._visible[node]

    def candidates(self, parameter: Leaf, num_choices: int | None) -> list[RouterCandidate]:
        """Return matrices near a parameter that choose among so many (None: any), nearest first."""
        near = list(takewhile(lambda node: not is_list(node), parameter.node.ancestors()))
        found = []
        for leaf in dict.fromkeys(leaf for n in near[: MAX_CLIMB + 1] for leaf in self.visible(n)):
            strong = leaf.kind == "linear" or leaf.node is not parameter.node
            block = leaf.node.common_ancestor(parameter.node)
            ways = [leaf.shape] if leaf.kind == "linear" else [leaf.shape, leaf.shape[::-1]]
            for number, width in ways:
                if num_choices in (None, number):
                    found.append(RouterCandidate(leaf, number, width, strong, block))
        return found


@dataclass(frozen=True, slots=True)
class Chain:
    """One reading of an expert's matrices: role and orientation of each, None for a square one."""

    hidden: int
    inner: int
    roles: tuple[str, ...]
    transposed: tuple[bool | None, ...]

    @property
    def fused(self) -> bool:
        return GATE_UP in self.roles

    @property
    def gated(self) -> bool:
        return self.fused or GATE in self.roles

    def sides(self, key: int) -> tuple[int, int]:
        if self.roles[key] == DOWN:
            return self.inner, self.hidden
        return self.hidden, self.inner * (2 if self.roles[key] == GATE_UP else 1)

    def describe(self) -> str:
        middle = f"2 x {self.inner}" if self.gated else f"{self.inner}"
        return f"{self.hidden} -> {middle} -> {self.hidden}"


def chains(shapes: Sequence[tuple[int, ...]]) -> list[Chain]:
    """Return every reading of one expert's two or three matrices, each `(rows, columns)`."""
    found = []
    for roles in (*_PAIRS, *_TRIPLES):
        if len(roles) != len(shapes) or min(map(min, shapes)) < 2:
            continue
        down = shapes[roles.index(DOWN)]
        for hidden, inner in dict.fromkeys((down, down[::-1])):
            chain = Chain(hidden, inner, roles, ())
            pairs = [(shape, chain.sides(key)) for key, shape in enumerate(shapes)]
            if any({*shape} != {*sides} for shape, sides in pairs):
                continue
            ways = [None if len({*sides}) == 1 else shape == sides for shape, sides in pairs]
            if GATE in roles and ways[roles.index(GATE)] != ways[roles.index(UP)]:
                continue  # gate and up are stored alike
            found.append(replace(chain, transposed=tuple(ways)))
    return found


def dispatches(module: nn.Module) -> bool:
    """Return whether the module's forward goes through transformers' experts interface."""
    # Attributes that `use_experts_implementation` sets; no other class has all of them.
    names = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "_apply_gate", "config")
    return all(hasattr(module, name) for name in names)


def written_class(module: nn.Module) -> type:
    """Return the class of the model's code, below the classes that packing derives from it."""
    return next(kind for kind in type(module).__mro__ if "forward" in vars(kind))


def is_transformers(module: nn.Module) -> bool:
    """Return whether the class is transformers' own: the registry's tests hold its conventions."""
    return dispatches(module) or written_class(module).__module__.startswith("transformers.")


def stated_orientation(leaf: Leaf) -> bool | None:
    """Return whether the module itself says that its matrices are stored `(in, out)`, or None."""
    module = leaf.node.module
    if dispatches(module):
        return bool(module.is_transposed)
    # Attributes that torch's layers have; some modules with a matrix for each expert have them too.
    for names in (("in_features", "out_features"), ("input_size", "output_size")):
        sides = tuple(getattr(module, name, None) for name in names)
        if len({*sides}) == 2 and {*sides} == {*leaf.shape[1:]}:
            return sides == leaf.shape[1:]
    return None


@dataclass(eq=False, slots=True)
class ExpertGroup:
    """Parameters of one module or of siblings that chain, E of each, and their router."""

    members: list[Leaf]
    counts: list[int]
    router: RouterCandidate

    @property
    def priority(self) -> tuple[int, int]:
        """Of groups with the same router: nearness to it, then E."""
        nodes = (leaf.node for leaf in self.members)
        block = reduce(Node.common_ancestor, nodes, self.router.block)
        return block.depth, max(self.counts)


def slice_of(leaf: Leaf, count: int) -> tuple[int, ...]:
    """Return the rows and columns of one expert's matrix."""
    return leaf.shape[1:] if len(leaf.shape) == 3 else (leaf.shape[0] // count, leaf.shape[1])


def choose(
    members: Sequence[Leaf], readings: Sequence[Chain], widths: Collection[int | None]
) -> Chain | None:
    """Return the reading that holds, or None; `widths` are sizes that hidden states may have."""
    module, stated = members[0].node.module, [stated_orientation(leaf) for leaf in members]
    serves = dispatches(module)
    left = []
    for chain in readings:
        pairs = list(zip(chain.transposed, stated, strict=True))
        agree = all(None in pair or pair[0] == pair[1] for pair in pairs)
        if agree and (not serves or chain.fused == bool(module.has_gate)):
            ways = tuple(said if way is None else way for way, said in pairs)
            left.append(replace(chain, transposed=ways))
    left = [chain for chain in left if chain.hidden in widths] or left
    if len(left) > 1 and len(members) == 2:
        # The first is taken as the input projection, and the orientation stays open.
        said_by_all = zip(*(chain.transposed for chain in left), strict=True)
        ways = tuple(way[0] if len({*way}) == 1 else None for way in said_by_all)
        return replace(left[0], transposed=ways)
    # Of three alike, in transformers alone the third is surely the output's.
    in_order = len(members[0].shape) == 2 or len({chain.transposed for chain in left}) == 1
    return left[0] if len(left) == 1 or (in_order and left and is_transformers(module)) else None


def find_groups(
    deep: Sequence[Leaf], flat: Sequence[Leaf], index: RouterIndex
) -> list[ExpertGroup]:
    """Group parameters that chain, each group under the router that stands nearest to it."""
    groups = []
    number = Counter(leaf.node for leaf in deep)
    sets: dict[object, list[Leaf]] = defaultdict(list)
    for leaf in deep:
        alone = number[leaf.node] == 1 and leaf.node.parent is not None
        sets[(leaf.node.parent, leaf.shape[0]) if alone else leaf.node].append(leaf)
    for members in joined.from_iterable(map(_runs, sets.values())):
        counts = [leaf.shape[0] for leaf in members]
        routers = _routers(members, max(counts), index)
        groups += [ExpertGroup(members, counts, router) for router in routers[:1]]
    for _, owned in groupby(flat, attrgetter("node")):
        groups += _flat_group(list(owned), index)
    # A group does not borrow the router of a group that stands nearer to it, or is larger.
    first: dict[Leaf, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for group in groups:
        first[group.router.leaf] = max(first[group.router.leaf], group.priority)
    return [group for group in groups if group.priority == first[group.router.leaf]]


def _runs(members: list[Leaf]) -> Iterator[list[Leaf]]:
    """Yield the members if they chain, else neighbors that are a fused pair."""
    if chains([leaf.shape[1:] for leaf in members]):
        yield members
        return
    rest = list(members)
    while len(rest) > 1:
        pair = rest[:2]
        fused = any(chain.fused for chain in chains([leaf.shape[1:] for leaf in pair]))
        if fused and pair[0].shape[0] == pair[1].shape[0]:
            yield pair
        rest = rest[2 if fused else 1 :]


def _routers(members: list[Leaf], count: int, index: RouterIndex) -> list[RouterCandidate]:
    sizes = {size for leaf in members for size in leaf.shape[1:]}
    largest = max(members, key=lambda leaf: leaf.shape[0])
    exact = [c for c in index.candidates(largest, count) if c.strong or count > 1]
    exact.sort(key=lambda c: (not c.strong, -c.block.depth, c.width not in sizes))
    if count == 1 or (exact and exact[0].strong):
        return exact
    # More scores than matrices: some choose no experts, or these are one rank's share.
    near = [c for c in index.candidates(largest, None) if c.strong and c.num_choices > count]
    if not dispatches(largest.node.module):  # a projection of attention is no router
        near = [c for c in near if c.width in sizes and c.num_choices not in sizes]
        near = [c for c in near if c.num_choices < c.width * 2 and c.num_choices % count == 0]
        near = [c for c in near if c.leaf.node.parent is c.block]
    near.sort(key=lambda c: (-c.block.depth, c.num_choices))
    return near or exact


def _flat_group(members: list[Leaf], index: RouterIndex) -> Iterator[ExpertGroup]:
    """Group three alike 2-D parameters that stack experts by rows: `(E * rows, columns)`."""
    rows, columns = members[0].shape
    if len(members) != 3 or any(leaf.shape != members[0].shape for leaf in members):
        return
    routers = [
        c
        for c in index.candidates(members[0], None)
        if c.strong and 1 < c.num_choices < rows and rows % c.num_choices == 0
        if c.width == columns and c.leaf not in members
    ]
    if routers:
        router = max(routers, key=lambda c: c.block.depth)
        yield ExpertGroup(members, [router.num_choices] * 3, router)
