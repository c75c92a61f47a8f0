"""Which candidate stacks are experts: the rules, and the words for them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..layout import DOWN, EXPERT, GATE, GATE_UP, UP
from .routers import Candidate, RouterIndex, is_list
from .shadow import best_trace
from .shapes import Chain, Matrix, chain, low_rank_pair
from .tensors import Leaf, Node, common_ancestor
from .trace import Contraction, Trace


@dataclass(slots=True)
class Verdict:
    """What was decided of one candidate, and why."""

    leaf: Leaf
    accepted: bool
    reason: str
    num_experts: int = 0
    in_features: int | None = None
    out_features: int | None = None
    transposed: bool | None = None
    role: str = EXPERT
    orientation_reason: str = ""
    router: Candidate | None = None


@dataclass(eq=False, slots=True)
class Bank:
    """Candidates that belong together: same block, same module (or single stacks of sibling modules)."""

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


@dataclass(eq=False, slots=True)
class _Home:
    """Where stacked shared experts may stand: the block of a routed bank (direct), or the module around it."""

    node: Node
    beside: str
    sizes: set[int] = field(default_factory=set)
    direct: bool = False


def _matrix(key: int, shape: Sequence[int], axis: int, count: int) -> list[Matrix]:
    """Readings of one expert's slice as a matrix; more than one where it has three dimensions."""
    if len(shape) == 2:
        return [Matrix(key, shape[0] // count, shape[1])]
    rest = [size for i, size in enumerate(shape) if i != axis]
    return [Matrix(key, math.prod(rest[:cut]), math.prod(rest[cut:])) for cut in range(1, len(rest))]


def bank_chain(stacks: Sequence[Leaf], axes: Sequence[int], counts: Sequence[int], hints: Iterable[int]) -> Chain | None:
    """The chain of a bank's slices; a slice of three dimensions is read in each way that it can be."""
    readings = [_matrix(i, s.shape, a, c) for i, (s, a, c) in enumerate(zip(stacks, axes, counts, strict=True))]
    chosen = [options[-1] for options in readings]
    found = chain(chosen, hints)
    if found is not None or all(len(options) == 1 for options in readings):
        return found
    return chain([options[0] for options in readings], hints)


class Judge:
    """Decides on every candidate of one model.

    Args:
        leaves: All tensors of the model.
        index: Where routers may stand.
    """

    def __init__(self, leaves: Sequence[Leaf], index: RouterIndex) -> None:
        self.leaves = leaves
        self.index = index
        self.verdicts: dict[int, Verdict] = {}
        self._traces: dict[object, Trace] = {}

    def judge(self) -> list[Verdict]:
        """One verdict for each parameter of three or more dimensions, and for packed or 2-D stacks that are experts."""
        candidates = [leaf for leaf in self.leaves if self._candidate(leaf)]
        banks = self._banks(candidates)
        for bank in self._nearest_first(banks):
            self._judge_bank(bank)
        self._shared(candidates)
        for leaf in candidates:
            if id(leaf) not in self.verdicts:
                self._reject(leaf, self._why_alone(leaf))
        return [self.verdicts[id(leaf)] for leaf in self.leaves if id(leaf) in self.verdicts]

    def _reject(self, leaf: Leaf, reason: str) -> None:
        self.verdicts[id(leaf)] = Verdict(leaf, False, reason)

    # Candidates

    def _candidate(self, leaf: Leaf) -> bool:
        if leaf.kind == "buffer":
            return False
        if len(leaf.shape) < 3:
            return leaf.kind == "bare" and len(leaf.shape) == 2 and min(leaf.shape) > 1
        shape = "x".join(map(str, leaf.shape))
        if leaf.kind == "conv":
            self._reject(leaf, f"the kernel of a convolution ({type(leaf.node.module).__name__}, {shape})")
        elif leaf.kind != "bare":
            self._reject(leaf, f"the weight of a {type(leaf.node.module).__name__} ({shape})")
        elif leaf.packed is None and not leaf.dtype.is_floating_point:
            self._reject(leaf, f"holds {leaf.dtype}, not floating-point weights ({shape}): packed by another tool")
        elif len(leaf.shape) > 4:
            self._reject(leaf, f"has {len(leaf.shape)} dimensions; stacks of matrices have three or four ({shape})")
        elif sorted(leaf.shape[1:])[-2] < 2:
            self._reject(leaf, f"one vector, not one matrix, for each index of its first dimension ({shape})")
        else:
            return True
        return False

    # Banks

    def _options(self, leaf: Leaf) -> list[tuple[int, int]]:
        """(axis, E) readings of a candidate."""
        if len(leaf.shape) == 2:
            return []
        if len(leaf.shape) == 3:
            return [(0, leaf.shape[0])]
        return [(axis, leaf.shape[axis]) for axis in range(len(leaf.shape) - 2) if leaf.shape[axis] > 1] or [(0, 1)]

    def _banks(self, candidates: Sequence[Leaf]) -> list[Bank]:
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
        return banks

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
        """Consecutive runs that chain (two banks in one module): fused pairs, or triples where all are; else singles.

        Four alike matrices are a head's query, key, value and output more often than two banks of two.
        """
        parts: list[list[Leaf]] = []
        rest = list(members)
        while rest:
            for size in (2, 3):
                run = rest[:size]
                found = bank_chain(run, [0] * len(run), [leaf.shape[0] for leaf in run], ())
                fused = found is not None and any(fit.role == GATE_UP for fit in found.fits.values())
                if len(run) == size and found is not None and (fused or (size == 3 and len(members) % 3 == 0)):
                    parts.append(run)
                    rest = rest[size:]
                    break
            else:
                parts.append([rest.pop(0)])
        return parts

    def _bank(self, members: list[Leaf]) -> Bank | None:
        first = max(members, key=lambda leaf: leaf.shape[0])
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
            return Bank(block, routers[0], members, counts, axes, found, exact, tuple(routers))
        return None

    def _routers(self, stack: Leaf, members: list[Leaf], count: int, linked: bool) -> tuple[list[Candidate], bool]:
        """What may choose among a bank's matrices, likeliest first, and whether it gives exactly as many scores."""
        own = {id(leaf) for leaf in members}
        sizes = {size for leaf in members for size in leaf.shape[1:]}
        exact = [c for c in self.index.candidates(stack, {count}) if id(c.leaf) not in own]
        exact.sort(key=lambda c: (not c.strong, -c.block.depth, c.width not in sizes))
        if count == 1:
            return ([c for c in exact if c.strong], True) if linked else ([], False)
        if not linked:
            # A stack that stands alone has only its router to speak for it: near, and reading one of its sizes.
            exact = [c for c in exact if c.width in sizes and stack.node.depth - c.block.depth <= 2]
        if exact or not linked:
            return exact, True
        # One rank's share of the experts, or choices that are no experts: more scores than matrices.
        near = [c for c in self.index.candidates(stack, None, climb=2) if c.strong and c.choices > count]
        near.sort(key=lambda c: (-c.block.depth, not self._plausible(c, sizes), c.choices % count != 0))
        return near, False

    @staticmethod
    def _plausible(router: Candidate, sizes: set[int]) -> bool:
        """Whether shapes alone suggest a router: it reads the hidden size and gives no layer's width."""
        return router.width in sizes and router.choices not in sizes and router.choices < router.width * 2

    def _flat_bank(self, members: list[Leaf]) -> list[Bank]:
        """2-D parameters that lay the experts' rows one below the other: `(E * rows, columns)`, all of one shape."""
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

    # Judgement

    def _trace(self, bank: Bank) -> Trace:
        """A run of the bank's block, shared by all blocks that are built alike."""
        signature = tuple(
            (node.name[len(bank.block.name) :], type(node.module), leaf.attribute, leaf.shape, leaf.packed)
            for node in bank.block.subtree()
            for leaf in node.leaves
        )
        members = tuple(leaf.name[len(bank.block.name) :] for leaf in bank.stacks)
        key = (type(bank.block.module), signature, members)
        found = self._traces.get(key)
        if found is None:
            found = best_trace(bank.block, bank.stacks, self.leaves, bank.hidden_sizes, bank.router.choices)
            if not found.contractions:
                # Which way round can still be seen on the owners alone; whether a router chooses cannot.
                owners = {id(leaf.node): leaf.node for leaf in bank.stacks if leaf.node is not bank.block}
                for owner in owners.values():
                    alone = best_trace(owner, bank.stacks, self.leaves, bank.hidden_sizes, max(bank.counts))
                    found.contractions.extend(alone.contractions)
            self._traces[key] = found
        return found

    def _judge_bank(self, bank: Bank) -> None:
        trace = self._trace(bank)
        used = {c.stack for c in trace.contractions}
        seen = {c.size for c in trace.choices}
        if not bank.exact:
            bank.router = next((c for c in bank.alternatives if c.choices in seen), bank.router)
        sizes = {bank.router.choices, *bank.counts}
        chosen = [c for c in trace.choices if c.size in sizes]
        routed = bool(chosen)
        merged = [c for c in trace.contractions if c.axis == bank.axes[c.stack] and c.size == bank.counts[c.stack]]
        mixed = any(not sizes.isdisjoint(c.chosen) for c in merged)
        problem = self._problem(bank, trace, used, routed or mixed)
        if problem is None and merged and not mixed and bank.chain is None:
            problem = f"the forward sums over its first dimension: one projection, not a stack ({_x(bank.stacks[0])})"
        for key, leaf in enumerate(bank.stacks):
            if id(leaf) in self.verdicts:
                continue
            if problem is not None:
                self._reject(leaf, problem)
                continue
            upstream = {stack for choice in chosen for stack, _ in choice.upstream}
            if bank.chain is None and key in upstream:
                self._reject(leaf, f"what the block chooses by is computed from it: a stack of routers ({_x(leaf)})")
                continue
            self._accept(bank, key, leaf, trace, routed)

    def _problem(self, bank: Bank, trace: Trace, used: set[int], routed: bool) -> str | None:
        """Why a bank is no bank of experts; None where it is."""
        first = bank.stacks[0]
        adapter = self._adapter(bank, trace)
        if adapter is not None:
            return adapter
        seen = trace.completed and bool(used)
        if seen and not routed:
            return (
                f"the forward of {bank.block.name or 'the model'} applies it without choosing among "
                f"{bank.router.choices} ({_x(first)})"
            )
        if seen and len(first.shape) == 2:
            slices = {(c.stack, c.size * c.others) for c in trace.contractions}
            if not all((key, leaf.numel // bank.counts[key]) in slices for key, leaf in enumerate(bank.stacks)):
                return f"the forward applies it whole, not in {bank.counts[0]} slices ({_x(first)})"
        if seen:
            return None
        if bank.chain is None or len(first.shape) == 2 and len(bank.stacks) < 3:
            return (
                f"stands alone: nothing beside it continues its {_x(first)}, and the forward of "
                f"{bank.block.name or 'the model'} could not be followed ({trace.error or 'it was not used'})"
            )
        if not bank.router.strong and self._biased(bank):
            return f"no router: the only matrix with {bank.counts[0]} rows beside it is a bias for each slice"
        sizes = {size for leaf in bank.stacks for size in leaf.shape}
        fused = any(fit.role == GATE_UP for fit in bank.chain.fits.values())
        if bank.exact and not fused and bank.router.width not in sizes:
            return f"{bank.router.name} reads {bank.router.width} features, which no side of {_x(first)} has"
        if not bank.exact and not (bank.chain.gated and self._plausible(bank.router, sizes)):
            return f"no router chooses among {bank.counts[0]} ({_x(first)})"
        return None

    def _biased(self, bank: Bank) -> bool:
        """Whether the module holds a (E, n) matrix for more than one of its stacks: biases, not a router."""
        owner = bank.stacks[0].node
        counts = set(bank.counts)
        rows = [leaf for leaf in owner.leaves if len(leaf.shape) == 2 and leaf.shape[0] in counts]
        return len(rows) >= len(bank.stacks)

    def _adapter(self, bank: Bank, trace: Trace) -> str | None:
        """Low-rank factors beside the matrix, or the stack, that they correct."""
        if bank.chain is None or len(bank.stacks) != 2 or bank.chain.gated:
            return None
        pair = [_matrix(i, s.shape, a, c)[-1] for i, (s, a, c) in enumerate(zip(bank.stacks, bank.axes, bank.counts))]
        owner = bank.stacks[0].node
        homes = [owner, *owner.children, *([owner.parent] if owner.parent is not None else [])]
        for home in homes:
            for leaf in home.leaves:
                if any(leaf is stack for stack in bank.stacks) or leaf.kind == "buffer" or len(leaf.shape) < 2:
                    continue
                if low_rank_pair(pair[0], pair[1], (leaf.shape[-2], leaf.shape[-1])):
                    return f"low-rank factors ({_x(bank.stacks[0])} and {_x(bank.stacks[1])}) of an update to {leaf.name}"
        links = [c for c in trace.contractions if any(stack != c.stack for stack, _ in c.upstream)]
        straight = links and all(not bent for c in links for _, bent in c.upstream)
        sizes = sorted({*pair[0].sizes, *pair[1].sizes})
        if straight and len(sizes) > 1 and sizes[0] * 8 <= sizes[1]:
            return f"low-rank factors: nothing but a sum lies between {_x(bank.stacks[0])} and {_x(bank.stacks[1])}"
        return None

    def _accept(self, bank: Bank, key: int, leaf: Leaf, trace: Trace, routed: bool) -> None:
        count = bank.counts[key]
        verdict = Verdict(leaf, True, "", num_experts=count, router=bank.router)
        rest = leaf.numel // count
        _orient(verdict, key, bank.chain, trace, rest)
        verdict.role = _role(key, bank.chain, trace, len(bank.stacks))
        matrix = f"{rest // leaf.shape[-1]} x {leaf.shape[-1]}"
        words = [f"{count} matrices of {matrix} in one {_x(leaf)} parameter"]
        if bank.chain is not None and len(bank.stacks) > 1:
            others = ", ".join(s.attribute if s.node is leaf.node else s.name for s in bank.stacks if s is not leaf)
            words.append(f"they chain with {others} ({bank.chain.describe()})")
        words.append(self._router_words(bank, count, routed))
        verdict.reason = "; ".join(words)
        self.verdicts[id(leaf)] = verdict

    @staticmethod
    def _router_words(bank: Bank, count: int, routed: bool) -> str:
        router = bank.router
        relation = ""
        if router.choices > count:
            relation = (
                f", of which these {count} are one rank's share"
                if router.choices % count == 0
                else f", of which {router.choices - count} are not held here"
            )
        how = " (seen in a dry run of the block)" if routed else ""
        return f"{router.name} ({_x(router.leaf)}) chooses among {router.choices}{relation}{how}"

    # Shared experts

    def _shared(self, candidates: Sequence[Leaf]) -> None:
        """Stacks that always run, beside a routed bank: they chain, and over the same hidden size."""
        accepted = [v for v in self.verdicts.values() if v.accepted and v.router is not None]
        blocks: dict[int, _Home] = {}
        for verdict in accepted:
            assert verdict.router is not None
            sizes = {n for n in (verdict.in_features, verdict.out_features) if n} or set(verdict.leaf.shape[-2:])
            block = common_ancestor(verdict.router.block, verdict.leaf.node)
            for home, direct in ((block, True), (block.parent, False)):
                if home is None or (is_list(home) and not direct):
                    continue
                known = blocks.setdefault(id(home), _Home(home, verdict.leaf.name))
                known.sizes |= sizes
                known.direct |= direct
        groups: dict[int, list[Leaf]] = defaultdict(list)
        for leaf in candidates:
            found = self.verdicts.get(id(leaf))
            if len(leaf.shape) >= 3 and (found is None or not found.accepted):
                groups[id(leaf.node)].append(leaf)
        for members in groups.values():
            home = next((blocks[id(n)] for n in members[0].node.ancestors() if id(n) in blocks), None)
            if home is None or len({leaf.shape[0] for leaf in members}) != 1:
                continue
            counts = [leaf.shape[0] for leaf in members]
            linked = bank_chain(members, [0] * len(members), counts, home.sizes)
            if linked is None or linked.hidden not in home.sizes or not linked.gated:
                continue
            fused = any(fit.role == GATE_UP for fit in linked.fits.values())
            if home.direct or fused:
                self._accept_shared(members, counts, linked, home)

    def _accept_shared(
        self, members: list[Leaf], counts: list[int], found: Chain, home: _Home
    ) -> None:
        owner = members[0].node
        trace = best_trace(owner, members, self.leaves, [found.hidden], counts[0])
        for key, leaf in enumerate(members):
            verdict = Verdict(leaf, True, "", num_experts=counts[key])
            _orient(verdict, key, found, trace, leaf.numel // counts[key])
            verdict.role = _role(key, found, trace, len(members))
            verdict.reason = (
                f"{counts[key]} matrices in one {_x(leaf)} parameter that chain ({found.describe()}) beside the routed "
                f"stack {home.beside} of the same hidden size: shared experts, which always run"
            )
            self.verdicts[id(leaf)] = verdict

    # Words for what was never a candidate bank

    def _why_alone(self, leaf: Leaf) -> str:
        near = self.index.candidates(leaf, {leaf.shape[0]})
        if not near:
            return f"no router: nothing near it chooses among {leaf.shape[0]} ({_x(leaf)})"
        return (
            f"{near[0].name} with its {leaf.shape[0]} choices stands nearer to other stacks, or this {_x(leaf)} chains "
            "with none of its siblings"
        )


def _x(leaf: Leaf) -> str:
    return "x".join(map(str, leaf.shape))


def _orient(verdict: Verdict, key: int, found: Chain | None, trace: Trace, rest: int) -> None:
    """Fill in orientation: by how the dry run used the stack, else by shapes."""
    leaf = verdict.leaf
    fit = found.fits.get(key) if found is not None else None
    last = len(leaf.shape) - 1
    seen = [c for c in trace.contractions if c.stack == key and c.axis is not None and c.size > 1]
    ways = {(c.axis == last, c.size) for c in seen}
    if len(ways) == 1:
        is_last, size = ways.pop()
        verdict.transposed, verdict.in_features = not is_last, size
        verdict.out_features = rest // size
        verdict.orientation_reason = f"a dry run of the block sums over the {size} of dimension {seen[0].axis}"
    elif fit is not None and fit.transposed is not None:
        rows, columns = rest // leaf.shape[-1], leaf.shape[-1]
        verdict.transposed = fit.transposed
        verdict.in_features, verdict.out_features = (rows, columns) if fit.transposed else (columns, rows)
        verdict.orientation_reason = "the sizes of its siblings leave one orientation"
    elif ways:
        verdict.orientation_reason = "undecided: the forward uses it both ways round"
    else:
        why = trace.error or "the dry run did not use it"
        verdict.orientation_reason = f"undecided: its shapes fit both ways round, and {why}"


def _role(key: int, found: Chain | None, trace: Trace, number: int) -> str:
    fit = found.fits.get(key) if found is not None else None
    if fit is not None and fit.role == GATE_UP:
        return GATE_UP
    if found is None:
        return EXPERT
    links = _links(trace)
    if key in links:
        return DOWN
    downs = [stack for stack, sources in links.items() if key in sources]
    if downs:
        if number == 2:
            return UP
        sources = links[downs[0]]
        bent = sources[key]
        others = [flag for stack, flag in sources.items() if stack != key]
        if others and bent != others[0]:
            return GATE if bent else UP
        return GATE if key == min(sources) else UP
    if fit is not None and fit.role is not None:
        return fit.role
    if number == 2:
        return UP if key == 0 else DOWN
    return (GATE, UP, DOWN)[key] if number == 3 else EXPERT


def _links(trace: Trace) -> dict[int, dict[int, bool]]:
    """For each stack that is fed by other stacks: which, and whether something nonlinear lies between."""
    links: dict[int, dict[int, bool]] = {}
    contraction: Contraction
    for contraction in trace.contractions:
        sources: dict[int, bool] = {}
        for stack, bent in contraction.upstream:
            if stack != contraction.stack:
                sources[stack] = sources.get(stack, False) or bent
        if sources:
            links.setdefault(contraction.stack, sources)
    return links
