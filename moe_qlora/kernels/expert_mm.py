"""The interface of a kernel, which multiplies each expert's rows by its packed weight.

One file holds one kernel and its `Kernel` record; `table.py` lists the records and chooses. A
matmul of all experts, x [W | B]^T or x [W ; A], is a `Problem` before a kernel is chosen for it,
and an `ExpertMatmul` after.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import workspace
from .cards import Card
from .factors import Factors
from .limits import ColumnOrder, tile_rows
from .streams import SecondStream
from .weights import PackedWeight, WeightSpec


class Problem(NamedTuple):
    """Everything that the choice of a kernel depends on."""

    spec: WeightSpec  # Of the packed weight: shape, codec and device
    dtype: torch.dtype  # bf16 or fp16: of rows
    rows: int  # R, of all experts
    by_rows: bool  # Whether the weight's rows are the features that come out, else its columns
    backward: bool = False  # Whether it belongs to backward, whose rows keep their column order
    held: bool = False  # Whether the workspace has the weight, dequantized
    reused: bool = False  # Whether a second matmul would find the weight there

    @property
    def experts(self) -> int:
        """E."""
        return self.spec.shape[0]

    @property
    def inner(self) -> int:
        """K, the features that are summed over."""
        return self.spec.shape[2 if self.by_rows else 1]

    @property
    def features(self) -> int:
        """N, the features that come out."""
        return self.spec.shape[1 if self.by_rows else 2]

    @property
    def tile(self) -> int:
        """The rows in a tile of `routing.Routing.tiles`."""
        return tile_rows(self.rows, self.experts)


class ExpertMatmul(NamedTuple):
    """One matmul of all experts, and the kernel that computes it."""

    packed: PackedWeight
    factors: Factors | None  # Of LoRA, or None
    problem: Problem
    kernel: Kernel
    tile: int  # Rows in a tile
    cut: Any  # How the kernel is cut, of its own type; None where that is fixed

    @property
    def rank(self) -> int:
        """r, by which LoRA lengthens the contraction."""
        return 0 if self.factors is None else self.factors.rank

    @property
    def beside(self) -> tuple[Tensor | None, Tensor | None]:
        """LoRA's factors: the one to the right of a dequantized weight, and the one below it."""
        if self.factors is None:
            return None, None
        if self.problem.by_rows == self.problem.backward:  # stored (E, in, out)
            return self.factors.a.transpose(1, 2), self.factors.b.transpose(1, 2)
        return self.factors.b, self.factors.a

    @property
    def factor(self) -> Tensor | None:
        """`(E, N, r)`: the factor that the product's last r columns meet."""
        right, below = self.beside
        return right if self.problem.by_rows or below is None else below.transpose(1, 2)

    def ordered(self, x: Tensor, second: SecondStream) -> Tensor:
        """Return tokens' rows `(T, K)` as a kernel reads them that gathers, else as they are.

        They are put in the kernel's order on the second stream.
        """
        if self.kernel.reorder is None or not self.kernel.gathers:
            return x
        out = torch.empty_like(x)
        with second.beside():
            self.kernel.reorder(x, out)
        return out

    def spans(self, count: int) -> Iterator[tuple[int, int]]:
        """Yield the slices of features that a call of `count` rows goes in: one, if the cap allows.

        Where the dequantized weight or the output exceeds the workspace's cap, both are computed
        in slices of features: each slice has all rows, so the host need not know where an expert's
        begin. The output may have half of the cap: in backward two others are alive with it.
        """
        problem, device = self.problem, self.packed.device
        inner = problem.inner + self.rank
        dequantized = 0 if self.kernel.on_codes else problem.experts * inner
        each = problem.dtype.itemsize * max(2 * count, dequantized)
        step = max(64, workspace.workspace_cap(device) // each // 64 * 64)
        for first in range(0, problem.features, step):
            yield first, min(first + step, problem.features)


@dataclass(frozen=True, eq=False)
class Kernel:
    """One row of the table.

    `prepare(matmul, routing, span, name)` returns the operand that a product of the features `span`
    reads instead of the weight; `name` is the workspace's buffer for it. `launch(x, matmul,
    operand, routing, span, products)` returns `(R, span)`: x `(R, K + r)` times weight and LoRA's
    factor, which multiplies the last r columns; x are sorted rows any distance apart. Where the
    kernel `gathers`, x are the tokens `(T, K)`, contiguous, and `products` `(R r,)` are the rows'
    last columns; else `products` is None. `routing` is a `routing.Routing` or `routing.Tiled`;
    spans start at multiples of 64.
    """

    name: str  # In warnings
    supports: Callable[[Problem], bool]  # Whether it takes a problem and is the quickest, with why
    tile: Callable[[Problem], int]  # Rows in a tile
    prepare: Callable[..., Any]
    launch: Callable[..., Tensor]
    on_codes: bool = True  # Whether it multiplies on the codes; else on a dequantized weight
    gathers: bool = False  # Whether it reads tokens' rows by index, so that none are permuted
    order: ColumnOrder | None = None  # In which it reads the columns of rows, None for their own
    reorder: Callable[..., Tensor] | None = None  # (rows `(R, K)`, out): puts them in that order
    # Whether it may be tried on a card
    capable: Callable[[Card], bool] = lambda card: True
    # The kind of codes that it is validated with on a device before it is chosen; None: no need
    tried: Callable[[WeightSpec], str | None] = lambda spec: None
    tried_tiles: tuple[int, ...] = (16, 128)  # The rows in a tile of such products
    both_ways: bool = True  # Whether it sums over stored rows as well as columns
    cut: Callable[[Problem, int], Any] = lambda problem, tile: None  # How it is cut for a card


validated: dict[tuple[str, str, int], bool] = {}
"""Whether a kernel is right, by its name, the kind of codes it was tried with, and CUDA device."""
