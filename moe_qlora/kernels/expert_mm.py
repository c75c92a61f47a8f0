"""A matmul of all experts, x [W | B]^T or x [W ; A], and the interface of its kernels.

One file holds one kernel and its `Kernel` record; `table.py` lists the records and chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import workspace
from .factors import Factors
from .weights import PackedWeight, WeightSpec


class Matmul(NamedTuple):
    """One matmul of all experts; the last four fields are set once its kernel is chosen."""

    packed: PackedWeight
    dtype: torch.dtype  # bf16 or fp16: of rows
    rows: int  # R, of all experts
    by_rows: bool  # Whether the weight's rows are the features that come out, else its columns
    backward: bool = False  # Whether it belongs to backward, whose rows keep their column order
    held: bool = False  # Whether the workspace has the weight, dequantized
    reused: bool = False  # Whether a second matmul would find the weight there
    factors: Factors | None = None  # Of LoRA
    kernel: Any = None  # A `Kernel`
    tile: int = 0  # Rows in a tile
    cut: Any = None  # How the kernel is cut, of its own type; None where that is fixed

    @property
    def spec(self) -> WeightSpec:
        """Of the packed weight: shape, codec and device."""
        return self.packed.spec

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
    def rank(self) -> int:
        """r, by which LoRA lengthens the contraction."""
        return 0 if self.factors is None else self.factors.rank

    @property
    def beside(self) -> tuple[Tensor | None, Tensor | None]:
        """LoRA's factors: the one to the right of a dequantized weight, and the one below it."""
        if self.factors is None:
            return None, None
        if self.by_rows == self.backward:  # stored (E, in, out)
            return self.factors.a.transpose(1, 2), self.factors.b.transpose(1, 2)
        return self.factors.b, self.factors.a

    @property
    def factor(self) -> Tensor | None:
        """`(E, N, r)`: the factor that the product's last r columns meet."""
        right, below = self.beside
        return right if self.by_rows or below is None else below.transpose(1, 2)

    def spans(self) -> Iterator[tuple[int, int]]:
        """Yield the slices of features that a call goes in: one, if the workspace's cap allows.

        Where the dequantized weight or the output exceeds the cap, both are computed in slices of
        features: each slice has all rows, so the host need not know where an expert's begin. The
        output may have half of the cap: in backward two others are alive with it.
        """
        dequantized = 0 if self.kernel.on_codes else self.experts * (self.inner + self.rank)
        each = self.dtype.itemsize * max(2 * self.rows, dequantized)
        step = max(64, workspace.workspace_cap(self.packed.device) // each // 64 * 64)
        for first in range(0, self.features, step):
            yield first, min(first + step, self.features)


@dataclass(frozen=True, eq=False)
class Kernel:
    """One row of the table.

    `prepare(matmul, routing, span, name)` returns the operand that a product of the features `span`
    reads instead of the weight; `name` is the workspace's buffer for it. `launch(x, matmul,
    operand, routing, span, products)` returns `(R, span)`: x `(R, K + r)` times weight and LoRA's
    factor, which multiplies the last r columns; x are sorted rows any distance apart. With
    `products` `(R r,)`, which are the rows' last columns, x are the tokens `(T, K)`, contiguous,
    whose rows it reads by index. `routing` is a `routing.Routing` or `routing.Tiled`; spans start
    at multiples of 64.
    """

    name: str  # In warnings
    supports: Callable[[Matmul], bool]  # Whether it takes a matmul and is the quickest, with why
    tile: Callable[[Matmul], int]  # Rows in a tile
    prepare: Callable[..., Any]
    launch: Callable[..., Tensor]
    on_codes: bool = True  # Whether it multiplies on the codes; else on a dequantized weight
    # Puts rows `(R, K)` into `limits.ORDER`, in which the kernel reads columns; None: their own
    reorder: Callable[..., Tensor] | None = None
    hopper: bool = False  # Whether it runs on Hopper alone
    # The kind of codes that it is validated with on a device before it is chosen; None: no need
    tried: Callable[[WeightSpec], str | None] = lambda spec: None
    cut: Callable[[Matmul, int], Any] = lambda matmul, tile: None  # How it is cut for a card


validated: dict[tuple[str, str, int], bool] = {}
"""Whether a kernel is right, by its name, the kind of codes it was tried with, and CUDA device."""
