"""Tell the role and the orientation of an expert parameter, by a dry run first, else by shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ..layout import DOWN, EXPERT, GATE, GATE_UP, UP
from .shapes import Chain
from .trace import Trace
from .tree import Leaf


class Use(NamedTuple):
    """How a parameter's matrices are applied, as `ExpertParam` says it; None where unknown."""

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
    """Return how the member `key` is applied, whose dimension `axis` counts `count` experts."""
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
    """Return what one of `number` members of a group does, as `ExpertParam.role` names it."""
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
