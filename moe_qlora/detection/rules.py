"""Classify every candidate: the rules for expert parameters, and the reasons they give.

The first rule that applies decides. `moe-qlora dump --why` prints its reason.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, product
from operator import attrgetter

from ..layout import ExpertParam
from .dry_run import best_trace
from .structure import (
    ExpertGroup,
    Matrix,
    RouterCandidate,
    RouterIndex,
    Use,
    chain_of,
    find_groups,
    is_list,
    plausible,
    slice_size,
    use_of,
)
from .trace import Trace
from .tree import Leaf, Node


@dataclass(frozen=True, slots=True)
class Classification:
    """The decision on one tensor: an expert parameter, or the reason why not."""

    leaf: Leaf
    expert: ExpertParam | None = None
    rejection: str = ""
    router: RouterCandidate | None = None  # None for shared experts, which always run


def _not_a_candidate(leaf: Leaf) -> str | None:
    shape, layer = leaf.shape_text, type(leaf.node.module).__name__
    if leaf.kind == "conv":
        return f"the kernel of a convolution ({layer}, {shape})"
    if leaf.kind != "bare":
        return f"the weight of a {layer} ({shape})"
    if leaf.packed is None and not leaf.dtype.is_floating_point:
        return f"holds {leaf.dtype}, not floating-point weights ({shape}): packed by another tool"
    if len(leaf.shape) > 4:
        return f"{len(leaf.shape)} dimensions; fused expert weights have three or four ({shape})"
    if 0 in leaf.shape:
        return f"holds no value ({shape})"
    if sorted(leaf.shape[1:])[-2] < 2:
        return f"one vector, not one matrix, for each index of its first dimension ({shape})"
    return None


def _follows_a_choice(group: ExpertGroup, trace: Trace) -> bool:
    flows = trace.chosen.union(*(c.ranked for c in trace.contractions))
    # Scores may pick tokens without being ranked: by a threshold, or each expert among tokens.
    picked = bool(trace.contractions) and all(c.picked for c in trace.contractions)
    return not group.sizes.isdisjoint(flows) or picked


def _why_no_experts(group: ExpertGroup, trace: Trace, routed: bool) -> str | None:
    first = group.members[0].shape_text
    over = [c for c in trace.contractions if c.axis == group.axis]
    merged = [c for c in over if c.size == group.counts[c.weight]]  # sums over the experts
    # Ranked scores may weigh the experts' matrices, which are summed to one.
    mixed = any(not group.sizes.isdisjoint(c.ranked) for c in merged)
    problem = _low_rank_problem(group, trace)
    if problem is None and trace.completed and trace.contractions:
        problem = _problem_of_use(group, trace, routed or mixed)
    elif problem is None:
        problem = _problem_of_shapes(group, trace)
    if problem is not None or not merged or group.chain is not None:
        return problem
    if not mixed:
        return f"the forward sums over its first dimension: one projection, not several ({first})"
    if len(merged) == len(trace.contractions) and not trace.applied:
        return (
            "the forward sums over its first dimension and multiplies nothing by the result: "
            f"no matrices that are applied ({first})"
        )
    return None


def _low_rank_problem(group: ExpertGroup, trace: Trace) -> str | None:
    owner, first = group.members[0].node, group.members[0]
    sources = trace.feeds()
    if len(group.members) == 3 and (not sources or max(map(len, sources.values())) > 1):
        return None  # probably gate, up and down
    fed = [c for c in trace.contractions if any(key != c.weight for key, _ in c.upstream)]
    linear = bool(fed) and all(not nonlinear for c in fed for _, nonlinear in c.upstream)
    # If the dry run shows nothing nonlinear between two factors, half the width is low rank.
    least = 2 if linear else 8 if fed else 4
    siblings = (
        leaf
        for leaf in owner.leaves
        if leaf.kind == "bare" and len(leaf.shape) == 3 and leaf.shape[0] == first.shape[0]
    )
    partners = list(dict.fromkeys((*group.members, *siblings)))
    around = [owner, *owner.children, *([owner.parent] if owner.parent is not None else [])]
    leaves = (leaf for node in around for leaf in node.leaves)
    bases = [leaf for leaf in leaves if leaf.kind != "buffer" and len(leaf.shape) >= 2]
    corrected = [_corrected(leaf, partners, bases, least) for leaf in group.members]
    if corrected[0] is not None and all(corrected):
        partner, base = corrected[0]
        pair_text = f"{first.shape_text} and {partner.shape_text}"
        return f"low-rank factors ({pair_text}) of an update to {base.name}"
    sizes = sorted({size for leaf in group.members for size in leaf.shape[-2:]})
    pair = len(group.members) == 2 and not (group.chain is not None and group.chain.gated)
    if pair and linear and len(sizes) > 1 and sizes[0] * 4 <= sizes[1]:
        return (
            f"low-rank factors: nothing nonlinear lies between {first.shape_text} and "
            f"{group.members[1].shape_text}"
        )
    return None


def _corrected(
    factor: Leaf, partners: Sequence[Leaf], bases: Sequence[Leaf], least: int
) -> tuple[Leaf, Leaf] | None:
    """Return the partner and the base of a factor of low-rank updates; None if it is none.

    The rank is at most 1/`least` of the smaller side of the base.
    """
    first = Matrix(0, *factor.shape[-2:])
    for partner, base in product(partners, bases):
        if len({factor, partner, base}) < 3:
            continue
        second, sides = Matrix(1, *partner.shape[-2:]), base.shape[-2:]
        for rank in first.sizes & second.sizes:
            outer = {first.other(rank), second.other(rank)}
            if outer == set(sides) and rank * least <= min(sides):
                return partner, base
    return None


def _problem_of_use(group: ExpertGroup, trace: Trace, chosen: bool) -> str | None:
    first = group.members[0]
    if any(
        c.weight in {key for key, _ in c.upstream} and not c.picked
        for c in trace.contractions
        if len(group.members[c.weight].shape) == 3
    ):
        return f"the forward applies its matrices one after the other: layers ({first.shape_text})"
    if not chosen:
        return (
            f"the forward of {group.block.name or 'the model'} applies it without choosing among "
            f"{group.router.num_choices} ({first.shape_text})"
        )
    wanted = {(key, leaf.numel // group.counts[key]) for key, leaf in enumerate(group.members)}
    slices = {(c.weight, c.size * c.others) for c in trace.contractions}
    if len(first.shape) == 2 and not wanted <= slices:
        count, shape = group.counts[0], first.shape_text
        return f"the forward applies it whole, not in {count} slices ({shape})"
    return None


def _problem_of_shapes(group: ExpertGroup, trace: Trace) -> str | None:
    first, router, name = group.members[0], group.router, group.router.leaf.known_as
    shape, place = first.shape_text, group.block.name or "the model"
    if group.chain is None or (len(first.shape) == 2 and len(group.members) < 3):
        return (
            f"stands alone: nothing beside it continues its {shape}, and the forward of {place} "
            f"could not be followed ({trace.error or 'it was not used'})"
        )
    if not router.strong:
        rows = [leaf.shape[0] for leaf in first.node.leaves if len(leaf.shape) == 2]
        if sum(count in group.counts for count in rows) >= len(group.members):
            return (
                f"no router: the only matrix with {group.counts[0]} rows beside it is a bias for "
                "each slice"
            )
    sizes = {size for leaf in group.members for size in leaf.shape}
    if group.exact and not group.chain.fused and router.width not in sizes:
        return f"{name} reads {router.width} features, which no side of {shape} has"
    if not group.chain.fused and (router.num_choices >= router.width or len(set(group.counts)) > 1):
        # Without a run, only a narrow matrix over members of one size speaks for a choice.
        return f"{name} ({router.leaf.shape_text}) is wider than a router would be"
    if not group.exact and not (group.chain.gated and plausible(router, sizes)):
        return f"no router chooses among {group.counts[0]} ({shape})"
    return None


def _why_soft(leaf: Leaf, soft: Mapping[Leaf, Sequence[Leaf]]) -> str:
    """Return the role of a leaf in a soft mixture, or ""; `soft` has the experts by router."""
    if leaf in soft:
        names = ", ".join(_name_beside(other, leaf) for other in soft[leaf])
        return (
            f"scores {leaf.shape[2]} slots for each of {leaf.shape[1]} experts ({names}): the "
            f"router of a soft mixture ({leaf.shape_text})"
        )
    slots = next((scores for scores, served in soft.items() if leaf in served), None)
    if slots is None:
        return ""
    return (
        f"a soft mixture: {_name_beside(slots, leaf)} ({slots.shape_text}) scores "
        f"{slots.shape[2]} slots for each of {leaf.shape[0]}, which all run on mixtures of tokens, "
        f"so that nothing chooses among them ({leaf.shape_text}); not packed"
    )


class Classifier:
    """Classifies the tensors of one model; caches decisions and dry runs of blocks."""

    def __init__(self, leaves: Sequence[Leaf], index: RouterIndex) -> None:
        self.leaves, self.index = leaves, index
        self._by_leaf: dict[Leaf, Classification] = {}
        self._traces: dict[object, Trace] = {}

    def classify(self) -> list[Classification]:
        """Classify parameters of three or more dimensions, and flat ones that hold experts."""
        candidates = []
        for leaf in self.leaves:
            if leaf.kind == "buffer":
                continue
            if len(leaf.shape) < 3:
                if leaf.kind == "bare" and len(leaf.shape) == 2 and min(leaf.shape) > 1:
                    candidates.append(leaf)
            elif (reason := _not_a_candidate(leaf)) is not None:
                self._reject(leaf, reason)
            else:
                candidates.append(leaf)
        for group in find_groups(candidates, self.index):
            self._classify_group(group)
        self._find_shared(candidates)
        experts: dict[Leaf, list[Leaf]] = defaultdict(list)  # of a soft mixture, by its router
        for leaf in candidates:
            said = self._by_leaf.get(leaf)
            if len(leaf.shape) != 3 or (said is not None and said.expert is not None):
                continue
            if (scores := self.index.slot_scores(leaf)) is not None:
                experts[scores].append(leaf)
        soft = {scores: served for scores, served in experts.items() if len(served) > 1}
        for leaf in candidates:
            # Also where a matrix of the model around it was taken for a router that does not choose
            reason = _why_soft(leaf, soft)
            if leaf not in self._by_leaf:
                self._reject(leaf, reason or self._why_ungrouped(leaf))
            elif reason and self._by_leaf[leaf].expert is None:
                self._reject(leaf, reason)
        return [self._by_leaf[leaf] for leaf in self.leaves if leaf in self._by_leaf]

    def _why_ungrouped(self, leaf: Leaf) -> str:
        count, shape = leaf.shape[0], leaf.shape_text
        if near := self.index.candidates(leaf, count):
            return (
                f"{near[0].leaf.known_as} with its {count} choices stands nearer to other "
                f"weights, or this {shape} chains with none of its siblings"
            )
        if len(leaf.shape) == 4 and min(leaf.shape) > 1:
            layers, experts = leaf.shape[:2]
            return (
                f"no router: nothing near it chooses among {layers} or {experts} ({shape}); if "
                f"these are {layers} layers of {experts} experts, give each layer a parameter of "
                "its own beside its router to have it packed"
            )
        return f"no router: nothing near it chooses among {count} ({shape})"

    def _reject(self, leaf: Leaf, reason: str) -> None:
        self._by_leaf[leaf] = Classification(leaf, rejection=reason)

    def _classify_group(self, group: ExpertGroup) -> None:
        trace = self._trace(group)
        if not group.exact:
            ranked = {ranking.size for ranking in trace.rankings}
            routers = (c for c in group.alternatives if c.num_choices in ranked)
            group.router = next(routers, group.router)
        routed = _follows_a_choice(group, trace)
        problem = _why_no_experts(group, trace, routed)
        rankings = (ranking for ranking in trace.rankings if ranking.size in group.sizes)
        ranked_from = {key for ranking in rankings for key, _ in ranking.upstream}
        for key, leaf in enumerate(group.members):
            if problem is not None:
                self._reject(leaf, problem)
            elif group.chain is None and key in ranked_from:
                reason = "the block's choice is computed from it: weights of routers"
                self._reject(leaf, f"{reason} ({leaf.shape_text})")
            else:
                evidence = _evidence(group, key, routed)
                count = group.counts[key]
                use = use_of(group.members, key, group.axis, count, group.chain, trace)
                self._accept(leaf, count, use, evidence, group.router)

    def _accept(
        self, leaf: Leaf, count: int, use: Use, evidence: str, router: RouterCandidate | None
    ) -> None:
        expert = ExpertParam(
            name=leaf.name,
            module_name=leaf.node.name,
            parameter_name=leaf.attribute,
            shape=leaf.shape,
            num_experts=count,
            dtype=leaf.dtype,
            nbytes=leaf.nbytes,
            evidence=evidence,
            aliases=tuple(leaf.aliases),
            packed=leaf.packed,
            **use._asdict(),
        )
        self._by_leaf[leaf] = Classification(leaf, expert, router=router)

    def _trace(self, group: ExpertGroup) -> Trace:
        block, start = group.block, len(group.block.name)
        signature = tuple(
            (node.name[start:], type(node.module), leaf.attribute, leaf.shape, leaf.packed)
            for node in block.subtree()
            for leaf in node.leaves
        )
        key = (type(block.module), signature, tuple(leaf.name[start:] for leaf in group.members))
        if key in self._traces:
            return self._traces[key]
        sizes, count = group.hidden_sizes, group.router.num_choices
        others = group.alternatives if group.exact else ()
        routers = [group.router.leaf, *(router.leaf for router in others)]
        trace = self._traces[key] = best_trace(
            block, group.members, self.leaves, sizes, count, routers
        )
        if not trace.contractions:
            # Orientation can still be seen on the owners alone; whether a router chooses cannot.
            owners = dict.fromkeys(leaf.node for leaf in group.members if leaf.node is not block)
            for owner in owners:
                alone = best_trace(owner, group.members, self.leaves, sizes, max(group.counts))
                trace.contractions.extend(alone.contractions)
        return trace

    def _find_shared(self, candidates: Sequence[Leaf]) -> None:
        # By block with routed experts, and by the module around it: (expert, is it their block).
        scopes: dict[Node, list[tuple[ExpertParam, bool]]] = defaultdict(list)
        for item in self._by_leaf.values():
            if item.expert is not None and item.router is not None:
                block = item.router.block.common_ancestor(item.leaf.node)
                scopes[block].append((item.expert, True))
                if block.parent is not None and not is_list(block.parent):
                    scopes[block.parent].append((item.expert, False))
        left = (
            leaf
            for leaf in candidates
            if len(leaf.shape) >= 3
            if leaf not in self._by_leaf or self._by_leaf[leaf].expert is None
        )
        for owner, group in groupby(list(left), attrgetter("node")):
            members = list(group)
            count = members[0].shape[0]
            scope = next((scopes[node] for node in owner.ancestors() if node in scopes), None)
            if scope is None or any(leaf.shape[0] != count for leaf in members):
                continue
            hidden_sizes: set[int] = set()
            for expert, _ in scope:
                sides = {size for size in (expert.in_features, expert.out_features) if size}
                hidden_sizes |= sides or set(expert.shape[-2:])
            chain = chain_of(members, 0, [count] * len(members), hidden_sizes)
            if chain is None or chain.hidden not in hidden_sizes or not chain.gated:
                continue
            if chain.fused or any(direct for _, direct in scope):
                trace = best_trace(owner, members, self.leaves, [chain.hidden], count)
                for key, leaf in enumerate(members):
                    evidence = (
                        f"{count} matrices in one {leaf.shape_text} parameter that chain "
                        f"({chain.describe()}) beside the routed expert weight {scope[0][0].name} "
                        "of the same hidden size: shared experts, which always run"
                    )
                    use = use_of(members, key, 0, count, chain, trace)
                    self._accept(leaf, count, use, evidence, None)


def _name_beside(other: Leaf, leaf: Leaf) -> str:
    return other.attribute if other.node is leaf.node else other.name


def _evidence(group: ExpertGroup, key: int, routed: bool) -> str:
    leaf, count, router = group.members[key], group.counts[key], group.router
    rows = slice_size(leaf, group.axis, count) // leaf.shape[-1]
    words = [f"{count} matrices of {rows} x {leaf.shape[-1]} in one {leaf.shape_text} parameter"]
    if group.chain is not None and len(group.members) > 1:
        siblings = (other for other in group.members if other is not leaf)
        names = [_name_beside(other, leaf) for other in siblings]
        words.append(f"they chain with {', '.join(names)} ({group.chain.describe()})")
    relation = ""
    if router.num_choices % count:
        relation = f", of which {router.num_choices - count} are not held here"
    elif router.num_choices > count:
        relation = f", of which these {count} are one rank's share"
    how = " (seen in a dry run of the block)" if routed else ""
    name, shape = router.leaf.known_as, router.leaf.shape_text
    chooses = f"{name} ({shape}) chooses among {router.num_choices}"
    return "; ".join([*words, chooses + relation + how])
