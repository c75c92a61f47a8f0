"""Tell low-rank factors of an update (LoRA beside a matrix) from the matrices of experts."""

from __future__ import annotations

from collections.abc import Sequence

from .groups import ExpertGroup
from .shapes import Matrix
from .trace import Trace
from .tree import Leaf, Node


def low_rank_problem(group: ExpertGroup, trace: Trace) -> str | None:
    """Return why a group holds low-rank factors, not experts; None where nothing says so."""
    owner, first = group.members[0].node, group.members[0]
    sources = trace.feeds()
    if len(group.members) == 3 and (not sources or max(map(len, sources.values())) > 1):
        return None  # gate, up and down, as far as can be seen
    fed = [c for c in trace.contractions if any(key != c.weight for key, _ in c.upstream)]
    linear = bool(fed) and all(not nonlinear for c in fed for _, nonlinear in c.upstream)
    # Where the dry run shows that nothing nonlinear lies between two factors, half the width is
    # low rank enough.
    least = 2 if linear else 8 if fed else 4
    siblings = [
        leaf
        for leaf in owner.leaves
        if leaf.kind == "bare" and len(leaf.shape) == 3 and leaf.shape[0] == first.shape[0]
    ]
    partners = list({id(leaf): leaf for leaf in (*group.members, *siblings)}.values())
    bases = _bases(owner)
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


def _bases(owner: Node) -> list[Leaf]:
    """Return the matrices, in or around a module, that low-rank factors on it could correct."""
    nodes = [owner, *owner.children, *([owner.parent] if owner.parent is not None else [])]
    return [
        leaf
        for node in nodes
        for leaf in node.leaves
        if leaf.kind != "buffer" and len(leaf.shape) >= 2
    ]


def _corrected(
    factor: Leaf, partners: Sequence[Leaf], bases: Sequence[Leaf], least: int
) -> tuple[Leaf, Leaf] | None:
    """Return the partner with which a factor makes low-rank updates of a base, and the base."""
    matrix = Matrix(0, *factor.shape[-2:])
    for partner in partners:
        other = Matrix(1, *partner.shape[-2:])
        for base in bases:
            if partner is factor or base is factor or base is partner:
                continue
            if _low_rank_pair(matrix, other, base.shape[-2:], least):
                return partner, base
    return None


def _low_rank_pair(first: Matrix, second: Matrix, base: tuple[int, ...], least: int) -> bool:
    """Return whether two matrices are the factors of a low-rank update of a `base` (out, in).

    Their rank must be at most 1/`least` of either side of `base`.
    """
    return any(
        {first.other(rank), second.other(rank)} == set(base) and rank * least <= min(base)
        for rank in first.sizes & second.sizes
    )
