"""Classify every candidate: the rules by which it is an expert parameter or not, and their words.

    not_a_candidate     what a tensor's kind, dtype or shape rules out
    find_groups         candidates that belong together, under a router (groups.py)
    why_no_experts      what a dry run of their block, or shapes where it fails, rules out
    _find_shared        groups that always run, beside one that was accepted
    classify            everything else

The first rule that speaks decides. Its words are what `moe-qlora dump --why` prints.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..layout import ExpertParam
from .dry_run import best_trace
from .groups import ExpertGroup, chain_of, find_groups, plausible
from .low_rank import low_rank_problem
from .orientation import Use, slice_size, use_of
from .routers import RouterCandidate, RouterIndex, is_list
from .trace import Contraction, Trace
from .tree import Leaf


@dataclass(frozen=True, slots=True)
class Classification:
    """What was decided of one tensor: an expert parameter, or why it is not one."""

    leaf: Leaf
    expert: ExpertParam | None = None
    rejection: str = ""
    router: RouterCandidate | None = None  # None for shared experts, which always run


def not_a_candidate(leaf: Leaf) -> str | None:
    """Return why a tensor of three or more dimensions cannot hold experts; None where it may."""
    shape, layer = leaf.shape_text, type(leaf.node.module).__name__
    if leaf.kind == "conv":
        return f"the kernel of a convolution ({layer}, {shape})"
    if leaf.kind != "bare":
        return f"the weight of a {layer} ({shape})"
    if leaf.packed is None and not leaf.dtype.is_floating_point:
        return f"holds {leaf.dtype}, not floating-point weights ({shape}): packed by another tool"
    if len(leaf.shape) > 4:
        return f"{len(leaf.shape)} dimensions; fused expert weights have three or four ({shape})"
    if sorted(leaf.shape[1:])[-2] < 2:
        return f"one vector, not one matrix, for each index of its first dimension ({shape})"
    return None


@dataclass(slots=True)
class Routing:
    """What a dry run showed of how a group's experts are chosen."""

    seen: bool  # the forward returned and used a member
    routed: bool  # what is applied, or what of it is kept, follows a choice among the experts
    layers: bool  # each matrix is applied to what the one before it gave
    mixed: bool  # ranked scores weigh the experts' matrices, which are summed to one
    merged: list[Contraction]  # products that sum over the experts
    ranked_from: set[int]  # keys of members that the choice is computed from


def routing_of(group: ExpertGroup, trace: Trace) -> Routing:
    """Return how a group's experts were chosen in a dry run."""
    sizes = {group.router.num_choices, *group.counts}
    rankings = [ranking for ranking in trace.rankings if ranking.size in sizes]
    flows = trace.chosen.union(*(c.ranked for c in trace.contractions))
    # Scores may pick tokens without being ranked: by a threshold, or each expert among tokens.
    picked = bool(trace.contractions) and all(c.picked for c in trace.contractions)
    merged = [
        c
        for c in trace.contractions
        if c.axis == group.axes[c.weight] and c.size == group.counts[c.weight]
    ]
    return Routing(
        seen=trace.completed and bool(trace.contractions),
        routed=not sizes.isdisjoint(flows) or picked,
        layers=any(
            c.weight in {key for key, _ in c.upstream} and not c.picked
            for c in trace.contractions
            if len(group.members[c.weight].shape) == 3
        ),
        mixed=any(not sizes.isdisjoint(c.ranked) for c in merged),
        merged=merged,
        ranked_from={key for ranking in rankings for key, _ in ranking.upstream},
    )


def why_no_experts(group: ExpertGroup, trace: Trace, routing: Routing) -> str | None:
    """Return why a group does not hold experts; None where it does."""
    problem = low_rank_problem(group, trace)
    if problem is None:
        by_use = _problem_of_use if routing.seen else _problem_of_shapes
        problem = by_use(group, trace, routing)
    first = group.members[0].shape_text
    if problem is not None or not routing.merged or group.chain is not None:
        return problem
    if not routing.mixed:
        return f"the forward sums over its first dimension: one projection, not several ({first})"
    if len(routing.merged) == len(trace.contractions) and not trace.applied:
        return (
            "the forward sums over its first dimension and multiplies nothing by the result: "
            f"no matrices that are applied ({first})"
        )
    return None


def _problem_of_use(group: ExpertGroup, trace: Trace, routing: Routing) -> str | None:
    """Return what a complete dry run says against experts."""
    first = group.members[0]
    if routing.layers:
        return f"the forward applies its matrices one after the other: layers ({first.shape_text})"
    if not (routing.routed or routing.mixed):
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


def _problem_of_shapes(group: ExpertGroup, trace: Trace, routing: Routing) -> str | None:
    """Return what shapes say against experts where the block could not be run."""
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


@dataclass(eq=False, slots=True)
class _SharedExpertScope:
    """A module in which fused shared experts may stand beside routed ones."""

    beside: str  # name of the routed parameter
    hidden_sizes: set[int] = field(default_factory=set)  # one of which shared experts must have
    direct: bool = False  # the routed experts' block, not only the module around it


class Classifier:
    """Classifies the tensors of one model: what was decided so far, and dry runs by block."""

    def __init__(self, leaves: Sequence[Leaf], index: RouterIndex) -> None:
        self.leaves, self.index = leaves, index
        self._by_leaf: dict[int, Classification] = {}
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
            elif (reason := not_a_candidate(leaf)) is not None:
                self._reject(leaf, reason)
            else:
                candidates.append(leaf)
        for group in find_groups(candidates, self.index):
            self._classify_group(group)
        self._find_shared(candidates)
        for leaf in (leaf for leaf in candidates if id(leaf) not in self._by_leaf):
            count, shape = leaf.shape[0], leaf.shape_text
            reason = f"no router: nothing near it chooses among {count} ({shape})"
            if near := self.index.candidates(leaf, count):
                reason = (
                    f"{near[0].leaf.known_as} with its {count} choices stands nearer to other "
                    f"weights, or this {shape} chains with none of its siblings"
                )
            self._reject(leaf, reason)
        return [self._by_leaf[id(leaf)] for leaf in self.leaves if id(leaf) in self._by_leaf]

    def _reject(self, leaf: Leaf, reason: str) -> None:
        self._by_leaf[id(leaf)] = Classification(leaf, rejection=reason)

    def _classify_group(self, group: ExpertGroup) -> None:
        trace = self._trace(group)
        if not group.exact:
            ranked = {ranking.size for ranking in trace.rankings}
            routers = (c for c in group.alternatives if c.num_choices in ranked)
            group.router = next(routers, group.router)
        routing = routing_of(group, trace)
        problem = why_no_experts(group, trace, routing)
        for key, leaf in enumerate(group.members):
            if problem is not None:
                self._reject(leaf, problem)
            elif group.chain is None and key in routing.ranked_from:
                reason = "the block's choice is computed from it: weights of routers"
                self._reject(leaf, f"{reason} ({leaf.shape_text})")
            else:
                evidence = _evidence(group, key, routing.routed)
                count, axis = group.counts[key], group.axes[key]
                use = use_of(group.members, key, axis, count, group.chain, trace)
                self._accept(leaf, count, use, evidence, group.router)

    def _accept(
        self,
        leaf: Leaf,
        num_experts: int,
        use: Use,
        evidence: str,
        router: RouterCandidate | None = None,
    ) -> None:
        expert = ExpertParam(
            name=leaf.name,
            module_name=leaf.node.name,
            parameter_name=leaf.attribute,
            shape=leaf.shape,
            num_experts=num_experts,
            dtype=leaf.dtype,
            nbytes=leaf.nbytes,
            evidence=evidence,
            aliases=tuple(leaf.aliases),
            packed=leaf.packed,
            **use._asdict(),
        )
        self._by_leaf[id(leaf)] = Classification(leaf, expert, router=router)

    def _trace(self, group: ExpertGroup) -> Trace:
        """Return a dry run of the group's block, shared by all blocks that are built alike."""
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
            nodes = (leaf.node for leaf in group.members)
            for owner in {id(node): node for node in nodes if node is not block}.values():
                alone = best_trace(owner, group.members, self.leaves, sizes, max(group.counts))
                trace.contractions.extend(alone.contractions)
        return trace

    def _find_shared(self, candidates: Sequence[Leaf]) -> None:
        """Accept fused shared experts: they always run, and chain over the same hidden size."""
        scopes = self._shared_expert_scopes()
        by_module: dict[int, list[Leaf]] = defaultdict(list)
        for leaf in candidates:
            known = self._by_leaf.get(id(leaf))
            if len(leaf.shape) >= 3 and (known is None or known.expert is None):
                by_module[id(leaf.node)].append(leaf)
        for members in by_module.values():
            owner, count = members[0].node, members[0].shape[0]
            around = (scopes[id(node)] for node in owner.ancestors() if id(node) in scopes)
            scope = next(around, None)
            if scope is None or any(leaf.shape[0] != count for leaf in members):
                continue
            axes, counts = [0] * len(members), [count] * len(members)
            chain = chain_of(members, axes, counts, scope.hidden_sizes)
            if chain is None or chain.hidden not in scope.hidden_sizes or not chain.gated:
                continue
            if scope.direct or chain.fused:
                trace = best_trace(owner, members, self.leaves, [chain.hidden], count)
                for key, leaf in enumerate(members):
                    evidence = (
                        f"{count} matrices in one {leaf.shape_text} parameter that chain "
                        f"({chain.describe()}) beside the routed expert weight {scope.beside} of "
                        "the same hidden size: shared experts, which always run"
                    )
                    use = use_of(members, key, 0, count, chain, trace)
                    self._accept(leaf, count, use, evidence)

    def _shared_expert_scopes(self) -> dict[int, _SharedExpertScope]:
        """Return where shared experts may stand: the blocks of routed ones, and what holds them."""
        scopes: dict[int, _SharedExpertScope] = {}
        for item in self._by_leaf.values():
            if item.expert is None or item.router is None:
                continue
            leaf, expert = item.leaf, item.expert
            sizes = {size for size in (expert.in_features, expert.out_features) if size}
            block = item.router.block.common_ancestor(leaf.node)
            for node, direct in ((block, True), (block.parent, False)):
                if node is None or (is_list(node) and not direct):
                    continue
                scope = scopes.setdefault(id(node), _SharedExpertScope(leaf.name))
                scope.hidden_sizes |= sizes or set(leaf.shape[-2:])
                scope.direct |= direct
        return scopes


def _evidence(group: ExpertGroup, key: int, routed: bool) -> str:
    """Return in words why a member of a routed group is an expert parameter."""
    leaf, count, router = group.members[key], group.counts[key], group.router
    rows = slice_size(leaf, group.axes[key], count) // leaf.shape[-1]
    words = [f"{count} matrices of {rows} x {leaf.shape[-1]} in one {leaf.shape_text} parameter"]
    if group.chain is not None and len(group.members) > 1:
        siblings = (other for other in group.members if other is not leaf)
        names = [other.attribute if other.node is leaf.node else other.name for other in siblings]
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
