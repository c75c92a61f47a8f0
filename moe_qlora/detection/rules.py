"""Classify every candidate: the rules for expert parameters, and the reasons they give.

The first rule that applies decides. `moe-qlora dump --why` prints its reason.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter

from ..layout import DOWN, ExpertParam
from .structure import (
    Chain,
    ExpertGroup,
    RouterCandidate,
    RouterIndex,
    chains,
    choose,
    dispatches,
    find_groups,
    is_transformers,
    slice_of,
    stated_orientation,
    written_class,
)
from .tree import Leaf, Node


@dataclass(frozen=True, slots=True)
class Classification:
    """The decision on one tensor: an expert parameter, or the reason why not."""

    leaf: Leaf
    expert: ExpertParam | None = None
    rejection: str = ""
    router: RouterCandidate | None = None  # None for shared experts, which always run


def classify(leaves: Sequence[Leaf], index: RouterIndex) -> list[Classification]:
    """Classify parameters of three or more dimensions, and flat ones that hold experts."""
    found: dict[Leaf, Classification] = {}
    reasons = {leaf: _not_a_candidate(leaf) for leaf in leaves if len(leaf.shape) > 2}
    deep = [leaf for leaf, reason in reasons.items() if reason is None]
    flat = [leaf for leaf in leaves if leaf.kind == "bare" and len(leaf.shape) == 2]
    for group in find_groups(deep, flat, index):
        slices = [slice_of(*item) for item in zip(group.members, group.counts, strict=True)]
        chain = choose(group.members, chains(slices), [group.router.width])
        problem = _problem(group, chain)
        for key, (leaf, count) in enumerate(zip(group.members, group.counts, strict=True)):
            if problem is not None or chain is None:
                reasons[leaf] = problem
                continue
            words = _evidence(group, key, chain)
            found[leaf] = _accepted(leaf, key, count, chain, words, group.router)
    _find_shared([leaf for leaf in deep if leaf not in found], found)
    _orient_by_class(found)
    for leaf, reason in reasons.items():
        if leaf not in found:
            found[leaf] = Classification(leaf, rejection=reason or _why_ungrouped(leaf, index))
    return [found[leaf] for leaf in leaves if leaf in found]


def _not_a_candidate(leaf: Leaf) -> str | None:
    shape = leaf.shape_text
    if leaf.kind != "bare":
        what = "kernel of a convolution" if leaf.kind == "conv" else "weight of a layer"
        return f"the {what} ({type(leaf.node.module).__name__}, {shape})"
    if leaf.packed is None and not leaf.dtype.is_floating_point:
        return f"holds {leaf.dtype}, not floating-point weights ({shape}): packed by another tool"
    if 0 in leaf.shape:
        return f"holds no value ({shape})"
    if len(leaf.shape) > 3:
        layers, experts = leaf.shape[:2]
        return (
            f"{len(leaf.shape)} dimensions; fused expert weights have three ({shape}). If these "
            f"are {layers} layers of {experts} experts, give each layer a parameter of its own "
            "beside its router to have it packed"
        )
    if min(leaf.shape[1:]) < 2:
        return f"one vector, not one matrix, for each index of its first dimension ({shape})"
    return None


def _why_ungrouped(leaf: Leaf, index: RouterIndex) -> str:
    count, shape = leaf.shape[0], leaf.shape_text
    if near := index.candidates(leaf, count):
        return (
            f"{near[0].leaf.known_as} with its {count} choices stands nearer to other "
            f"weights, or this {shape} chains with none of its siblings"
        )
    return f"no router: nothing near it chooses among {count} ({shape})"


def _problem(group: ExpertGroup, chain: Chain | None) -> str | None:
    if chain is None:
        shapes = " and ".join(dict.fromkeys(leaf.shape_text for leaf in group.members))
        return (
            f"its {len(group.members)} matrices for each expert ({shapes}) have no single reading: "
            "nothing tells which is applied first and which side is the input; decorate their "
            "class with transformers' use_experts_implementation, which says so"
        )
    first, router, name = group.members[0], group.router, group.router.leaf.known_as
    sizes = {size for leaf in group.members for size in leaf.shape[-2:]}
    if dispatches(first.node.module):
        return None
    if not router.strong:
        rows = [leaf.shape[0] for leaf in first.node.leaves if len(leaf.shape) == 2]
        if sum(count in group.counts for count in rows) >= len(group.members):
            return (
                f"no router: what has {group.counts[0]} rows beside it may be a bias for each "
                "slice; a router in a module of its own is none"
            )
    if router.width != chain.hidden and (router.width in sizes or not chain.fused):
        return (
            f"{name} reads {router.width} features, and these matrices chain over {chain.hidden} "
            f"({first.shape_text})"
        )
    if chain.inner > 8 * chain.hidden or (not chain.gated and chain.hidden > 8 * chain.inner):
        return f"low-rank factors: these matrices chain over {chain.hidden} ({first.shape_text})"
    if not chain.fused and (router.num_choices >= router.width or len(set(group.counts)) > 1):
        return f"{name} ({router.leaf.shape_text}) is wider than a router would be"
    return None


def _accepted(
    leaf: Leaf, key: int, count: int, chain: Chain, evidence: str, router: RouterCandidate | None
) -> Classification:
    transposed = chain.transposed[key]
    inside, outside = (None, None) if transposed is None else chain.sides(key)
    how = "the sizes of its siblings leave one orientation"
    if transposed is None:
        how = "undecided: its shapes fit both ways round"
    elif stated_orientation(leaf) is not None:
        how = "its module says so, and its siblings' sizes agree"
    expert = ExpertParam(
        leaf.name, leaf.node.name, leaf.attribute, leaf.shape, num_experts=count,
        in_features=inside, out_features=outside, transposed=transposed, role=chain.roles[key],
        dtype=leaf.dtype, nbytes=leaf.nbytes, evidence=evidence, aliases=tuple(leaf.aliases),
        packed=leaf.packed, orientation_evidence=how,
    )  # fmt: skip
    return Classification(leaf, expert, router=router)


def _orient_by_class(found: dict[Leaf, Classification]) -> None:
    """Give square matrices the orientation of the others of their class, if transformers' own."""
    known: dict[type, set[bool | None]] = defaultdict(set)
    for leaf, item in found.items():
        if item.expert is not None and is_transformers(leaf.node.module):
            known[written_class(leaf.node.module)].add(item.expert.transposed)
    for leaf, item in found.items():
        kind, expert, (*_, rows, side) = written_class(leaf.node.module), item.expert, leaf.shape
        ways = known[kind] - {None}
        if expert is None or expert.transposed is not None:
            continue
        if rows == side and len(ways) == 1:
            how = f"other weights of {kind.__name__} are stored so"
            expert = replace(expert, in_features=side, out_features=side, orientation_evidence=how)
            found[leaf] = replace(item, expert=replace(expert, transposed=ways.pop()))


def _find_shared(left: Sequence[Leaf], found: dict[Leaf, Classification]) -> None:
    scopes: dict[Node, list[ExpertParam]] = defaultdict(list)
    for item in found.values():
        if item.expert is not None and item.router is not None:
            scopes[item.router.block.common_ancestor(item.leaf.node)].append(item.expert)
    for owner, group in groupby(left, attrgetter("node")):
        members = list(group)
        count = members[0].shape[0]
        scope = next((scopes[node] for node in owner.ancestors() if node in scopes), None)
        if scope is None or any(leaf.shape[0] != count for leaf in members):
            continue
        widths = {e.out_features if e.role == DOWN else e.in_features for e in scope}
        chain = choose(members, chains([leaf.shape[1:] for leaf in members]), widths)
        if chain is None or chain.hidden not in widths or not chain.gated:
            continue
        for key, leaf in enumerate(members):
            words = (
                f"{count} matrices in one {leaf.shape_text} parameter that chain "
                f"({chain.describe()}) beside the routed expert weight {scope[0].name} "
                "of the same hidden size: shared experts, which always run"
            )
            found[leaf] = _accepted(leaf, key, count, chain, words, None)


def _evidence(group: ExpertGroup, key: int, chain: Chain) -> str:
    leaf, count, router = group.members[key], group.counts[key], group.router
    rows, columns = slice_of(leaf, count)
    words = [f"{count} matrices of {rows} x {columns} in one {leaf.shape_text} parameter"]
    siblings = [other for other in group.members if other is not leaf]
    names = [other.attribute if other.node is leaf.node else other.name for other in siblings]
    words.append(f"they chain with {', '.join(names)} ({chain.describe()})")
    relation = ""
    if router.num_choices % count:
        relation = f", of which {router.num_choices - count} are not held here"
    elif router.num_choices > count:
        relation = f", of which these {count} are one rank's share"
    name, shape = router.leaf.known_as, router.leaf.shape_text
    words.append(f"{name} ({shape}) chooses among {router.num_choices}{relation}")
    return "; ".join(words)
