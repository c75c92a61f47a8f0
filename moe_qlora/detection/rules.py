"""Which candidate stacks are experts: the rules, and the words for them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..layout import DOWN, EXPERT, GATE, GATE_UP, UP
from .dry_run import best_trace
from .groups import Bank, BankFinder, bank_chain, plausible
from .routers import Candidate, RouterIndex, is_list
from .shapes import Chain, Matrix, low_rank_pair
from .trace import Contraction, Trace
from .tree import Leaf, Node, common_ancestor


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
class _Home:
    """Where stacked shared experts may stand: a routed bank's block (direct), or around it."""

    node: Node
    beside: str
    sizes: set[int] = field(default_factory=set)
    direct: bool = False


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
        """One verdict for each parameter of three or more dimensions, and each flat stack."""
        candidates = [leaf for leaf in self.leaves if self._candidate(leaf)]
        for bank in BankFinder(self.index).find(candidates):
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
            self._reject(
                leaf, f"the kernel of a convolution ({type(leaf.node.module).__name__}, {shape})"
            )
        elif leaf.kind != "bare":
            self._reject(leaf, f"the weight of a {type(leaf.node.module).__name__} ({shape})")
        elif leaf.packed is None and not leaf.dtype.is_floating_point:
            self._reject(
                leaf,
                f"holds {leaf.dtype}, not floating-point weights ({shape}): packed by another tool",
            )
        elif len(leaf.shape) > 4:
            self._reject(
                leaf,
                f"{len(leaf.shape)} dimensions; stacks of matrices have three or four ({shape})",
            )
        elif sorted(leaf.shape[1:])[-2] < 2:
            self._reject(
                leaf, f"one vector, not one matrix, for each index of its first dimension ({shape})"
            )
        else:
            return True
        return False

    # Judgement

    def _trace(self, bank: Bank) -> Trace:
        """A run of the bank's block, shared by all blocks that are built alike."""
        signature = tuple(
            (
                node.name[len(bank.block.name) :],
                type(node.module),
                leaf.attribute,
                leaf.shape,
                leaf.packed,
            )
            for node in bank.block.subtree()
            for leaf in node.leaves
        )
        members = tuple(leaf.name[len(bank.block.name) :] for leaf in bank.stacks)
        key = (type(bank.block.module), signature, members)
        found = self._traces.get(key)
        if found is None:
            routers = [bank.router.leaf, *(c.leaf for c in bank.alternatives if bank.exact)]
            found = best_trace(
                bank.block,
                bank.stacks,
                self.leaves,
                bank.hidden_sizes,
                bank.router.choices,
                routers,
            )
            if not found.contractions:
                # Which way round can still be seen on the owners alone; whether a router chooses
                # cannot.
                owners = {
                    id(leaf.node): leaf.node for leaf in bank.stacks if leaf.node is not bank.block
                }
                for owner in owners.values():
                    alone = best_trace(
                        owner, bank.stacks, self.leaves, bank.hidden_sizes, max(bank.counts)
                    )
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
        # Scores may pick tokens without being ranked: by a threshold, or each expert among tokens.
        picked = bool(trace.contractions) and all(c.picked for c in trace.contractions)
        routed = bool(chosen) or picked
        merged = [
            c
            for c in trace.contractions
            if c.axis == bank.axes[c.stack] and c.size == bank.counts[c.stack]
        ]
        mixed = any(not sizes.isdisjoint(c.chosen) for c in merged)
        problem = self._problem(bank, trace, used, routed or mixed)
        if problem is None and merged and not mixed and bank.chain is None:
            problem = (
                f"the forward sums over its first dimension: one projection, not a stack "
                f"({_x(bank.stacks[0])})"
            )
        only_merged = bool(merged) and len(merged) == len(trace.contractions)
        if problem is None and only_merged and bank.chain is None and not trace.applied:
            problem = (
                "the forward sums over its first dimension and multiplies nothing by the result: "
                f"no matrices that are applied ({_x(bank.stacks[0])})"
            )
        for key, leaf in enumerate(bank.stacks):
            if id(leaf) in self.verdicts:
                continue
            if problem is not None:
                self._reject(leaf, problem)
                continue
            upstream = {stack for choice in chosen for stack, _ in choice.upstream}
            if bank.chain is None and key in upstream:
                self._reject(
                    leaf,
                    f"the block's choice is computed from it: a stack of routers ({_x(leaf)})",
                )
                continue
            self._accept(bank, key, leaf, trace, routed)

    def _problem(self, bank: Bank, trace: Trace, used: set[int], routed: bool) -> str | None:
        """Why a bank is no bank of experts; None where it is."""
        first = bank.stacks[0]
        place = bank.block.name or "the model"
        adapter = self._adapter(bank, trace)
        if adapter is not None:
            return adapter
        seen = trace.completed and bool(used)
        if seen and not routed:
            return (
                f"the forward of {place} applies it without choosing among "
                f"{bank.router.choices} ({_x(first)})"
            )
        if seen and len(first.shape) == 2:
            slices = {(c.stack, c.size * c.others) for c in trace.contractions}
            if not all(
                (key, leaf.numel // bank.counts[key]) in slices
                for key, leaf in enumerate(bank.stacks)
            ):
                return f"the forward applies it whole, not in {bank.counts[0]} slices ({_x(first)})"
        if seen:
            return None
        if bank.chain is None or (len(first.shape) == 2 and len(bank.stacks) < 3):
            return (
                f"stands alone: nothing beside it continues its {_x(first)}, and the forward of "
                f"{place} could not be followed ({trace.error or 'it was not used'})"
            )
        if not bank.router.strong and self._biased(bank):
            return (
                f"no router: the only matrix with {bank.counts[0]} rows beside it is a bias for "
                "each slice"
            )
        sizes = {size for leaf in bank.stacks for size in leaf.shape}
        fused = any(fit.role == GATE_UP for fit in bank.chain.fits.values())
        if bank.exact and not fused and bank.router.width not in sizes:
            return (
                f"{bank.router.name} reads {bank.router.width} features, which no side of "
                f"{_x(first)} has"
            )
        if not fused and (bank.router.choices >= bank.router.width or len(set(bank.counts)) > 1):
            # Without a run, only a narrow matrix over stacks of one size speaks for a choice.
            return f"{bank.router.name} ({_x(bank.router.leaf)}) is wider than a router would be"
        if not bank.exact and not (bank.chain.gated and plausible(bank.router, sizes)):
            return f"no router chooses among {bank.counts[0]} ({_x(first)})"
        return None

    def _biased(self, bank: Bank) -> bool:
        """Whether the module holds an (E, n) matrix for each of its stacks: biases, no router."""
        owner = bank.stacks[0].node
        counts = set(bank.counts)
        rows = [leaf for leaf in owner.leaves if len(leaf.shape) == 2 and leaf.shape[0] in counts]
        return len(rows) >= len(bank.stacks)

    def _adapter(self, bank: Bank, trace: Trace) -> str | None:
        """Low-rank factors beside the matrix, or the stack, that they correct."""
        owner, first = bank.stacks[0].node, bank.stacks[0]
        sources = _links(trace)
        if len(bank.stacks) == 3 and (not sources or max(map(len, sources.values())) > 1):
            return None  # gate, up and down, as far as can be seen
        links = [c for c in trace.contractions if any(stack != c.stack for stack, _ in c.upstream)]
        straight = bool(links) and all(not bent for c in links for _, bent in c.upstream)
        # Where the dry run shows that nothing nonlinear lies between two factors, half the width
        # is low rank enough.
        least = 2 if straight else 8 if links else 4
        siblings = [
            leaf
            for leaf in owner.leaves
            if leaf.kind == "bare" and len(leaf.shape) == 3 and leaf.shape[0] == first.shape[0]
        ]
        partners = list({id(leaf): leaf for leaf in (*bank.stacks, *siblings)}.values())
        bases = _bases(owner)
        found = [_corrected(leaf, partners, bases, least) for leaf in bank.stacks]
        if found[0] is not None and all(found):
            partner, base = found[0]
            return f"low-rank factors ({_x(first)} and {_x(partner)}) of an update to {base.name}"
        sizes = sorted({size for leaf in bank.stacks for size in leaf.shape[-2:]})
        pair = len(bank.stacks) == 2 and not (bank.chain is not None and bank.chain.gated)
        if pair and straight and len(sizes) > 1 and sizes[0] * 4 <= sizes[1]:
            return (
                f"low-rank factors: nothing nonlinear lies between {_x(first)} and "
                f"{_x(bank.stacks[1])}"
            )
        return None

    def _accept(self, bank: Bank, key: int, leaf: Leaf, trace: Trace, routed: bool) -> None:
        count = bank.counts[key]
        verdict = Verdict(leaf, True, "", num_experts=count, router=bank.router)
        rest = _slice_size(leaf, bank.axes[key], count)
        _orient(verdict, key, bank.chain, trace, bank.axes[key])
        verdict.role = _role(key, bank.chain, trace, len(bank.stacks))
        matrix = f"{rest // leaf.shape[-1]} x {leaf.shape[-1]}"
        words = [f"{count} matrices of {matrix} in one {_x(leaf)} parameter"]
        if bank.chain is not None and len(bank.stacks) > 1:
            others = ", ".join(
                s.attribute if s.node is leaf.node else s.name for s in bank.stacks if s is not leaf
            )
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
        """Stacks that always run, beside a routed bank: they chain, over the same hidden size."""
        accepted = [v for v in self.verdicts.values() if v.accepted and v.router is not None]
        blocks: dict[int, _Home] = {}
        for verdict in accepted:
            assert verdict.router is not None
            sizes = {n for n in (verdict.in_features, verdict.out_features) if n} or set(
                verdict.leaf.shape[-2:]
            )
            block = common_ancestor(verdict.router.block, verdict.leaf.node)
            for node, direct in ((block, True), (block.parent, False)):
                if node is None or (is_list(node) and not direct):
                    continue
                known = blocks.setdefault(id(node), _Home(node, verdict.leaf.name))
                known.sizes |= sizes
                known.direct |= direct
        groups: dict[int, list[Leaf]] = defaultdict(list)
        for leaf in candidates:
            found = self.verdicts.get(id(leaf))
            if len(leaf.shape) >= 3 and (found is None or not found.accepted):
                groups[id(leaf.node)].append(leaf)
        for members in groups.values():
            home = next(
                (blocks[id(n)] for n in members[0].node.ancestors() if id(n) in blocks), None
            )
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
            _orient(verdict, key, found, trace, 0)
            verdict.role = _role(key, found, trace, len(members))
            verdict.reason = (
                f"{counts[key]} matrices in one {_x(leaf)} parameter that chain "
                f"({found.describe()}) beside the routed stack {home.beside} of the same hidden "
                "size: shared experts, which always run"
            )
            self.verdicts[id(leaf)] = verdict

    # Words for what was never a candidate bank

    def _why_alone(self, leaf: Leaf) -> str:
        near = self.index.candidates(leaf, {leaf.shape[0]})
        if not near:
            return f"no router: nothing near it chooses among {leaf.shape[0]} ({_x(leaf)})"
        return (
            f"{near[0].name} with its {leaf.shape[0]} choices stands nearer to other stacks, or "
            f"this {_x(leaf)} chains with none of its siblings"
        )


def _bases(owner: Node) -> list[Leaf]:
    """Matrices, in or around a module, that low-rank factors on it could correct."""
    homes = [owner, *owner.children, *([owner.parent] if owner.parent is not None else [])]
    return [
        leaf
        for home in homes
        for leaf in home.leaves
        if leaf.kind != "buffer" and len(leaf.shape) >= 2
    ]


def _corrected(
    factor: Leaf, partners: Sequence[Leaf], bases: Sequence[Leaf], least: int
) -> tuple[Leaf, Leaf] | None:
    """The partner with which a stack makes low-rank updates of a base, and the base."""
    matrix = Matrix(0, *factor.shape[-2:])
    for partner in partners:
        other = Matrix(1, *partner.shape[-2:])
        for base in bases:
            if partner is factor or base is factor or base is partner:
                continue
            if low_rank_pair(matrix, other, (base.shape[-2], base.shape[-1]), least):
                return partner, base
    return None


def _slice_size(leaf: Leaf, axis: int, count: int) -> int:
    """Weights in one expert's matrix."""
    return leaf.numel // count if len(leaf.shape) == 2 else math.prod(leaf.shape[axis + 1 :])


def _x(leaf: Leaf) -> str:
    return "x".join(map(str, leaf.shape))


def _orient(verdict: Verdict, key: int, found: Chain | None, trace: Trace, axis: int) -> None:
    """Fill in orientation: by how the dry run used the stack, else by shapes."""
    leaf = verdict.leaf
    rest = _slice_size(leaf, axis, verdict.num_experts)
    fit = found.fits.get(key) if found is not None else None
    last = len(leaf.shape) - 1
    seen = [c for c in trace.contractions if c.stack == key and c.axis is not None and c.size > 1]
    seen = [c for c in seen if c.axis != axis or len(leaf.shape) == 2]
    ways = {(c.axis == last, c.size) for c in seen}
    if len(ways) == 1:
        is_last, size = ways.pop()
        verdict.transposed, verdict.in_features = not is_last, size
        verdict.out_features = rest // size
        verdict.orientation_reason = (
            f"a dry run of the block sums over the {size} of dimension {seen[0].axis}"
        )
    elif fit is not None and fit.transposed is not None:
        rows, columns = rest // leaf.shape[-1], leaf.shape[-1]
        verdict.transposed = fit.transposed
        verdict.in_features, verdict.out_features = (
            (rows, columns) if fit.transposed else (columns, rows)
        )
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
    """For each stack fed by other stacks: which, and whether something nonlinear lies between."""
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
