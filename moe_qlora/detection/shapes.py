"""Decide by sizes alone whether matrices chain as one expert's projections do (H -> I -> H).

Whatever its orientation, an expert's matrix has the sizes `{H, I}` (non-gated input, gate, up or
output projection) or `{H, 2 I}` (gate and up in one), and H is common to all of its matrices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..layout import DOWN, GATE, GATE_UP, UP


@dataclass(frozen=True, slots=True)
class Matrix:
    """One expert's slice of a parameter, `rows x cols` as stored; `key` says which parameter's."""

    key: int
    rows: int
    cols: int

    @property
    def sizes(self) -> frozenset[int]:
        return frozenset((self.rows, self.cols))

    def other(self, size: int) -> int:
        """Return the side that is not `size`."""
        return self.cols if self.rows == size else self.rows

    def transposed(self, in_features: int, out_features: int) -> bool | None:
        """Return whether it is stored `(in, out)`; None for a square matrix."""
        if self.rows == self.cols:
            return None
        return (self.rows, self.cols) == (in_features, out_features)


@dataclass(frozen=True, slots=True)
class Fit:
    """The role and orientation of one matrix as far as shapes tell; None where they do not."""

    role: str | None
    transposed: bool | None


@dataclass(frozen=True, slots=True)
class Chain:
    """Matrices that chain: the two sizes, and the role and orientation of each matrix by key."""

    hidden: int
    intermediate: int
    gated: bool
    fits: dict[int, Fit]

    @property
    def fused(self) -> bool:
        """Whether gate and up are one matrix."""
        return any(fit.role == GATE_UP for fit in self.fits.values())

    def describe(self) -> str:
        """Return the chain in words, as in "64 -> 2 x 32 -> 64"."""
        middle = f"2 x {self.intermediate}" if self.gated else f"{self.intermediate}"
        return f"{self.hidden} -> {middle} -> {self.hidden}"


def find_chain(matrices: Sequence[Matrix], hidden_hints: Iterable[int] = ()) -> Chain | None:
    """Return how matrices chain, if they do; `hidden_hints` are sizes that a router reads."""
    if len(matrices) < 2 or any(min(m.rows, m.cols) < 2 for m in matrices):
        return None
    hints = set(hidden_hints)
    common = set.intersection(*(set(m.sizes) for m in matrices))
    sizes = sorted(common, key=lambda size: (size not in hints, -size))
    for hidden in sizes:
        others = {m.other(hidden) for m in matrices}
        if len(others) == 2 and (fused := _fused(matrices, hidden, min(others))) is not None:
            return fused
    for hidden in sizes:
        others = {m.other(hidden) for m in matrices}
        if len(others) == 1 and len(matrices) <= 3:
            return _separate(matrices, hidden, others.pop(), hidden in hints)
    return None


def _fused(matrices: Sequence[Matrix], hidden: int, inner: int) -> Chain | None:
    """Return the chain of as many {H, 2 I} as {H, I} matrices: gate and up in one, and down."""
    wide = [m for m in matrices if m.sizes == {hidden, 2 * inner}]
    narrow = [m for m in matrices if m not in wide and m.sizes == {hidden, inner}]
    if not wide or len(wide) != len(narrow) or len(wide) + len(narrow) != len(matrices):
        return None
    fits = {m.key: Fit(GATE_UP, m.transposed(hidden, 2 * inner)) for m in wide}
    fits |= {m.key: Fit(DOWN, m.transposed(inner, hidden)) for m in narrow}
    known = {fit.transposed for fit in fits.values() if fit.transposed is not None}
    if len(known) == 1:  # square matrices are stored as the others are
        fits = {key: Fit(fit.role, *known) for key, fit in fits.items()}
    return Chain(hidden, inner, True, fits)


def _separate(
    matrices: Sequence[Matrix], hidden: int, inner: int, known_hidden: bool
) -> Chain | None:
    """Return the chain of {H, I} matrices; of three, the two stored alike are gate and up."""
    fits = {m.key: Fit(None, None) for m in matrices}
    stored: dict[tuple[int, int], list[Matrix]] = {}
    for matrix in matrices:
        stored.setdefault((matrix.rows, matrix.cols), []).append(matrix)
    if known_hidden and hidden != inner and sorted(map(len, stored.values())) == [1, 2]:
        pair, single = sorted(stored.values(), key=len, reverse=True)
        for role, matrix in zip((GATE, UP), pair, strict=True):
            fits[matrix.key] = Fit(role, matrix.rows == hidden)
        fits[single[0].key] = Fit(DOWN, single[0].cols == hidden)
    return Chain(hidden, inner, len(matrices) == 3, fits)
