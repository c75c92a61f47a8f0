"""Do matrices chain as one expert's projections do (H -> I -> H), and which way round are they.

Pure arithmetic on sizes. An expert's matrices, whatever their orientation, are `{H, I}` (non-gated
input, gate, up or output projection) or `{H, 2 I}` (gate and up in one); H is common to all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..layout import DOWN, GATE, GATE_UP, UP


@dataclass(frozen=True, slots=True)
class Matrix:
    """One expert's slice of a stack: `rows x cols`, in the order in which they are stored."""

    key: int
    rows: int
    cols: int

    @property
    def sizes(self) -> frozenset[int]:
        return frozenset((self.rows, self.cols))

    def has(self, first: int, second: int) -> bool:
        return (self.rows, self.cols) in ((first, second), (second, first))


@dataclass(frozen=True, slots=True)
class Fit:
    """What shapes alone say of one matrix: its role, and is it stored (in, out); None: unknown."""

    role: str | None
    transposed: bool | None


@dataclass(frozen=True, slots=True)
class Chain:
    """Matrices that chain: hidden size, intermediate size, and what is known of each matrix."""

    hidden: int
    intermediate: int
    gated: bool
    fits: dict[int, Fit]

    def describe(self) -> str:
        """The chain in words, as in "64 -> 2 x 32 -> 64"."""
        middle = f"2 x {self.intermediate}" if self.gated else f"{self.intermediate}"
        return f"{self.hidden} -> {middle} -> {self.hidden}"


def _oriented(matrix: Matrix, in_features: int, out_features: int) -> bool | None:
    if matrix.rows == matrix.cols:
        return None
    return (matrix.rows, matrix.cols) == (in_features, out_features)


def _agree(flags: Iterable[bool | None]) -> bool | None:
    known = {flag for flag in flags if flag is not None}
    return known.pop() if len(known) == 1 else None


def _fused(matrices: Sequence[Matrix], hidden: int, inner: int) -> Chain | None:
    wide = [m for m in matrices if m.has(hidden, 2 * inner)]
    narrow = [m for m in matrices if m not in wide and m.has(hidden, inner)]
    if (
        not wide
        or not narrow
        or len(wide) + len(narrow) != len(matrices)
        or len(wide) != len(narrow)
    ):
        return None
    flags = {m.key: _oriented(m, hidden, 2 * inner) for m in wide}
    flags |= {m.key: _oriented(m, inner, hidden) for m in narrow}
    common = _agree(flags.values())
    fits = {m.key: Fit(GATE_UP, flags[m.key] if flags[m.key] is not None else common) for m in wide}
    fits |= {m.key: Fit(DOWN, flags[m.key] if flags[m.key] is not None else common) for m in narrow}
    return Chain(hidden, inner, True, fits)


def _separate(
    matrices: Sequence[Matrix], hidden: int, inner: int, known_hidden: bool
) -> Chain | None:
    """Every matrix is {H, I}; of three, the two stored alike are gate and up if H is known."""
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


def chain(matrices: Sequence[Matrix], hidden_hints: Iterable[int] = ()) -> Chain | None:
    """Whether two or more matrices chain, and what their shapes say of each.

    `hidden_hints` are sizes that are the hidden size for sure (the router's input); they settle
    which of two sizes is which. Returns None where the matrices do not chain.
    """
    if len(matrices) < 2 or any(min(m.rows, m.cols) < 2 for m in matrices):
        return None
    hints = set(hidden_hints)
    sizes = sorted(
        set.intersection(*(set(m.sizes) for m in matrices)), key=lambda s: (s not in hints, -s)
    )
    for hidden in sizes:
        others = {_other(m, hidden) for m in matrices}
        inner = min(others)
        if len(others) == 2:
            found = _fused(matrices, hidden, inner)
            if found is not None:
                return found
    for hidden in sizes:
        others = {_other(m, hidden) for m in matrices}
        if len(others) == 1 and len(matrices) <= 3:
            return _separate(matrices, hidden, others.pop(), hidden in hints)
    return None


def _other(matrix: Matrix, size: int) -> int:
    return matrix.cols if matrix.rows == size else matrix.rows


def low_rank_pair(first: Matrix, second: Matrix, base: tuple[int, int], least: int) -> bool:
    """Whether two matrices are the factors of a low-rank update of a `base` (out, in) matrix.

    Their rank must be at most 1/`least` of either side of `base`.
    """
    for a, b in ((first, second), (second, first)):
        for rank in a.sizes & b.sizes:
            if {_other(a, rank), _other(b, rank)} == set(base) and rank * least <= min(base):
                return True
    return False
