"""Which candidate stacks belong together, and what may choose among their matrices."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..layout import GATE_UP
from .routers import Candidate, RouterIndex
from .shapes import Chain, Matrix, chain
from .tree import Leaf, Node, common_ancestor


@dataclass(eq=False, slots=True)
class Bank:
    """Candidates that belong together: same block and module, or sibling modules."""

    block: Node
    router: Candidate
    stacks: list[Leaf]
    counts: list[int]
    axes: list[int]
    chain: Chain | None = None
    exact: bool = True
    alternatives: tuple[Candidate, ...] = ()

    @property
    def hidden_sizes(self) -> list[int]:
        sizes = [self.router.width]
        if self.chain is not None:
            sizes.append(self.chain.hidden)
        for leaf in self.stacks:
            sizes.extend(reversed(leaf.shape[-2:]))
        return list(dict.fromkeys(size for size in sizes if size > 1))


def _matrix(key: int, shape: Sequence[int], axis: int, count: int) -> list[Matrix]:
    """Readings of one expert's slice as a matrix; more than one where it has three dimensions."""
    if len(shape) == 2:
        return [Matrix(key, shape[0] // count, shape[1])]
    rest = shape[axis + 1 :]
    return [
        Matrix(key, math.prod(rest[:cut]), math.prod(rest[cut:])) for cut in range(1, len(rest))
    ]


def bank_chain(
    stacks: Sequence[Leaf], axes: Sequence[int], counts: Sequence[int], hints: Iterable[int]
) -> Chain | None:
    """The chain of a bank's slices; one of three dimensions is read in each way."""
    readings = [
        _matrix(i, s.shape, a, c)
        for i, (s, a, c) in enumerate(zip(stacks, axes, counts, strict=True))
    ]
    chosen = [options[-1] for options in readings]
    found = chain(chosen, hints)
    if found is not None or all(len(options) == 1 for options in readings):
        return found
    return chain([options[0] for options in readings], hints)


def plausible(router: Candidate, sizes: set[int]) -> bool:
    """Whether shapes alone suggest a router: it reads the hidden size, gives no width."""
    reads = router.width in sizes
    return reads and router.choices not in sizes and router.choices < router.width * 2


class BankFinder:
    """Groups candidates into banks.

    Args:
        index: Where routers may stand.
    """

    def __init__(self, index: RouterIndex) -> None:
        self.index = index

    def _options(self, leaf: Leaf) -> list[tuple[int, int]]:
        """(axis, E) readings of a candidate."""
        if len(leaf.shape) == 2:
            return []
        if len(leaf.shape) == 3:
            return [(0, leaf.shape[0])]
        return [
            (axis, leaf.shape[axis]) for axis in range(len(leaf.shape) - 2) if leaf.shape[axis] > 1
        ] or [(0, 1)]

    def find(self, candidates: Sequence[Leaf]) -> list[Bank]:
        """Banks of the candidates, each under the router that stands nearest to it."""
        groups: dict[int, list[Leaf]] = defaultdict(list)
        for leaf in candidates:
            groups[id(leaf.node)].append(leaf)
        banks: list[Bank] = []
        alone: dict[tuple[int, tuple[int, ...]], list[Leaf]] = defaultdict(list)
        for members in groups.values():
            flat = [leaf for leaf in members if len(leaf.shape) == 2]
            deep = [leaf for leaf in members if len(leaf.shape) > 2]
            if len(deep) == 1 and deep[0].node.parent is not None:
                alone[id(deep[0].node.parent), deep[0].shape[:1]].append(deep[0])
            elif deep:
                banks.extend(self._deep_banks(deep))
            if len(flat) >= 2:
                banks.extend(self._flat_bank(flat))
        for members in alone.values():
            banks.extend(self._deep_banks(members))
        return self._nearest_first(banks)

    def _deep_banks(self, members: list[Leaf]) -> list[Bank]:
        """Stacks of one module: one bank where they chain, each alone where they do not."""
        whole = self._bank(members)
        if whole is not None and (whole.chain is not None or len(members) == 1):
            return [whole]
        by_count: dict[int, list[Leaf]] = defaultdict(list)
        for leaf in members:
            by_count[leaf.shape[0]].append(leaf)
        if len(by_count) > 1:
            return [bank for part in by_count.values() for bank in self._deep_banks(part)]
        parts = self._pairs(members)
        return [bank for part in parts if (bank := self._bank(part)) is not None]

    def _pairs(self, members: list[Leaf]) -> list[list[Leaf]]:
        """Consecutive runs that chain: fused pairs, or triples where all are; else singles.

        Four alike matrices are a head's query, key, value and output more often than two banks of
        two.
        """
        parts: list[list[Leaf]] = []
        rest = list(members)
        wide = [leaf.shape[-2] < leaf.shape[-1] for leaf in members]
        triples = len(members) % 3 == 0 and wide == wide[:3] * (len(members) // 3)
        while rest:
            for size in (2, 3):
                run = rest[:size]
                found = bank_chain(run, [0] * len(run), [leaf.shape[0] for leaf in run], ())
                fused = found is not None and any(
                    fit.role == GATE_UP for fit in found.fits.values()
                )
                if len(run) == size and found is not None and (fused or (size == 3 and triples)):
                    parts.append(run)
                    rest = rest[size:]
                    break
            else:
                parts.append([rest.pop(0)])
        return parts

    def _bank(self, members: list[Leaf]) -> Bank | None:
        first = max(members, key=lambda leaf: leaf.shape[0])
        fallback: Bank | None = None
        for axis, count in self._options(first):
            axes = [axis] * len(members)
            counts = [leaf.shape[axis] for leaf in members]
            linked = bank_chain(members, axes, counts, ()) is not None
            routers, exact = self._routers(first, members, count, linked)
            if not routers:
                continue
            block = routers[0].block
            for leaf in members:
                block = common_ancestor(block, leaf.node)
            found = bank_chain(members, axes, counts, [routers[0].width])
            bank = Bank(block, routers[0], members, counts, axes, found, exact, tuple(routers))
            if exact:
                return bank
            fallback = fallback or bank
        return fallback

    def _routers(
        self, stack: Leaf, members: list[Leaf], count: int, linked: bool
    ) -> tuple[list[Candidate], bool]:
        """What may choose among a bank's matrices, likeliest first; and is its number exact."""
        own = {id(leaf) for leaf in members}
        sizes = {size for leaf in members for size in leaf.shape[1:]}
        exact = [c for c in self.index.candidates(stack, {count}) if id(c.leaf) not in own]
        exact.sort(key=lambda c: (not c.strong, -c.block.depth, c.width not in sizes))
        if count == 1:
            return ([c for c in exact if c.strong], True) if linked else ([], False)
        if not linked:
            # A stack that stands alone has only its router to speak for it: near, and reading one
            # of its sizes.
            exact = [c for c in exact if c.width in sizes and stack.node.depth - c.block.depth <= 2]
        if exact or not linked:
            return exact, True
        # One rank's share of the experts, or choices that are no experts: more scores than
        # matrices.
        near = [
            c for c in self.index.candidates(stack, None, climb=2) if c.strong and c.choices > count
        ]
        near.sort(key=lambda c: (-c.block.depth, not plausible(c, sizes), c.choices % count != 0))
        return near, False

    def _flat_bank(self, members: list[Leaf]) -> list[Bank]:
        """2-D parameters that lay the experts' rows one below the other: `(E * rows, columns)`."""
        shapes = {leaf.shape for leaf in members}
        if len(shapes) != 1:
            return []
        rows, columns = shapes.pop()
        options = self.index.candidates(members[0], None)
        fitting = [
            c
            for c in options
            if c.strong and 1 < c.choices < rows and rows % c.choices == 0 and rows // c.choices > 1
            if c.width == columns and all(c.leaf is not leaf for leaf in members)
        ]
        if not fitting:
            return []
        router = max(fitting, key=lambda c: c.block.depth)
        block = router.block
        counts = [router.choices] * len(members)
        found = bank_chain(members, [0] * len(members), counts, [columns])
        return [Bank(block, router, members, counts, [0] * len(members), found)]

    @staticmethod
    def _nearest_first(banks: list[Bank]) -> list[Bank]:
        """A router serves the banks that stand nearest to it; a farther one must not borrow it."""
        nearest: dict[int, int] = {}
        for bank in banks:
            if bank.chain is not None:
                key = id(bank.router.leaf)
                nearest[key] = max(nearest.get(key, 0), bank.block.depth)
        return [bank for bank in banks if bank.block.depth >= nearest.get(id(bank.router.leaf), 0)]
