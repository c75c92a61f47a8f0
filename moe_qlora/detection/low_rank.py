"""Tell low-rank factors of an update (LoRA beside a matrix) from the matrices of experts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from .groups import ExpertGroup
from .shapes import Matrix
from .trace import Trace
from .tree import Leaf


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
    """Return with what a factor makes updates of rank 1/`least` of its sides or less, of what."""
    first = Matrix(0, *factor.shape[-2:])
    for partner, base in itertools.product(partners, bases):
        if len({factor, partner, base}) < 3:
            continue
        second, sides = Matrix(1, *partner.shape[-2:]), base.shape[-2:]
        for rank in first.sizes & second.sizes:
            outer = {first.other(rank), second.other(rank)}
            if outer == set(sides) and rank * least <= min(sides):
                return partner, base
    return None
