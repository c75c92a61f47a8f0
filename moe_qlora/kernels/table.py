"""The table of kernels for x [W | B]^T or x [W ; A] of all experts; a matmul uses the first.

One file holds one kernel and its `Kernel` record. Cuts follow from card and shape: measured ones
were within the noise of these (tools/bench/NOTES.md).
"""

import importlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import cards, workspace
from .factors import Factors
from .weights import PackedWeight


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
    cut: Any = None  # How the kernel is cut, of its own type; None if that is fixed

    @property
    def inner(self) -> int:
        """K, the features that are summed over."""
        return self.packed.spec.shape[2 if self.by_rows else 1]

    @property
    def features(self) -> int:
        """N, the features that come out."""
        return self.packed.spec.shape[1 if self.by_rows else 2]

    @property
    def rank(self) -> int:
        """r, by which LoRA lengthens the contraction."""
        return 0 if self.factors is None else self.factors.rank

    @property
    def stored_factors(self) -> tuple[Tensor | None, Tensor | None]:
        """LoRA's factors: the one to the right of a dequantized weight, and the one below it."""
        if self.factors is None:
            return None, None
        if self.by_rows == self.backward:  # stored (E, in, out)
            return self.factors.a.transpose(1, 2), self.factors.b.transpose(1, 2)
        return self.factors.b, self.factors.a

    @property
    def factor(self) -> Tensor | None:
        """`(E, N, r)`: the factor that the product's last r columns meet."""
        right, below = self.stored_factors
        return right if self.by_rows or below is None else below.transpose(1, 2)

    def spans(self) -> Iterator[tuple[int, int]]:
        """Yield the slices of features that a call goes in: one, if the workspace's cap allows."""
        # Each slice has all rows, so the host need not know where an expert's begin. The output may
        # have half of the cap: in backward two others are alive with it.
        dequantized = 0 if self.kernel.on_codes else self.packed.experts * (self.inner + self.rank)
        each = self.dtype.itemsize * max(2 * self.rows, dequantized)
        step = max(64, workspace.workspace_cap(self.packed.device) // each // 64 * 64)
        for first in range(0, self.features, step):
            yield first, min(first + step, self.features)


@dataclass(frozen=True, eq=False)
class Kernel:
    """One row of the table.

    `prepare(matmul, routing, span, name)` returns the operand that a product of the features `span`
    (a multiple of 64 and an end) reads instead of the weight; `name` is its workspace buffer.
    `launch(x, matmul, operand, routing, span, products)` returns `(R, span)`: sorted rows x
    `(R, K + r)`, any distance apart, times weight and LoRA's factor, which multiplies the last r
    columns. With `products` `(R r,)` as these columns, x are the tokens `(T, K)`, contiguous, whose
    rows it reads by index.
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
    cut: Callable[[Matmul, int], Any] = lambda matmul, tile: None  # How it is cut for a card


KERNELS: list[Kernel] = []  # Filled by `kernels`, since their files import this one


def kernels() -> list[Kernel]:
    """Return the rows in the order in which they are asked; the last supports everything."""
    if not KERNELS:
        with suppress(ImportError, AttributeError):  # a Triton without Gluon's names
            KERNELS.extend([_file("quantized_mm_rs").KERNEL, _file("quantized_mm_hopper").KERNEL])
        grouped_mm = _file("grouped_mm")
        KERNELS.extend([_file("quantized_mm").KERNEL, grouped_mm.BY_TORCH, grouped_mm.KERNEL])
    return KERNELS


def _file(name: str) -> Any:
    return importlib.import_module(f".{name}", __package__)


def choose(matmul: Matmul) -> Matmul:
    """Return the matmul with its kernel."""
    for kernel in kernels():
        if matmul.held and kernel.on_codes:
            continue
        on = cards.of_index(matmul.packed.spec.device)
        if kernel.supports(matmul) and (not kernel.hopper or on.capability == cards.HOPPER):
            tile = kernel.tile(matmul)
            return matmul._replace(kernel=kernel, tile=tile, cut=kernel.cut(matmul, tile))
    raise AssertionError("the last row of the table supports everything")
