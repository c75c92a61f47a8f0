"""The table of kernels for x [W | B]^T or x [W ; A] of all experts; a matmul uses the first.

One file holds one kernel and its `Kernel` record. Kernels in Gluon, whose language changes with
Triton's versions, and rare branches of kernels (`Kernel.tried`) are validated by small products,
once for each device; where one is wrong, or does not compile, the next row is used. Cuts follow
from card and shape: measured ones were within the noise of these (tools/bench/NOTES.md).
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import cards, workspace
from .factors import Factors
from .routing import Routing, route
from .weights import MX_BLOCK, MXFP4, NF4, TABLES, PackedWeight, WeightSpec


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
    # The kind of codes that it is validated with on a device before it is chosen; None: no need
    tried: Callable[[WeightSpec], str | None] = lambda spec: None
    cut: Callable[[Matmul, int], Any] = lambda matmul, tile: None  # How it is cut for a card


KERNELS: list[Kernel] = []  # Filled by `kernels`, since their files import this one
validated: dict[tuple[str, str, int], bool] = {}  # By kernel's name, kind of codes, CUDA device


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
        if kernel.supports(matmul) and works(kernel, matmul.packed.spec):
            return with_kernel(matmul, kernel)
    raise AssertionError("the last row of the table supports everything")


def with_kernel(matmul: Matmul, kernel: Kernel) -> Matmul:
    """Return the matmul with this kernel, its tile and its cut."""
    tile = kernel.tile(matmul)
    return matmul._replace(kernel=kernel, tile=tile, cut=kernel.cut(matmul, tile))


def multiply(x: Tensor, matmul: Matmul, routing: Routing, products: Any = None) -> Tensor:
    """Return `(R, N)`: a product of all features by itself, outside of a layer."""
    whole = 0, matmul.features
    operand = matmul.kernel.prepare(matmul, routing, whole, "first")
    y: Tensor = matmul.kernel.launch(x, matmul, operand, routing, whole, products)
    return y


def works(kernel: Kernel, spec: WeightSpec) -> bool:
    """Whether a kernel is right for such codes on their device; validates it at the first call."""
    kind = kernel.tried(spec)
    if kernel.hopper and cards.of_index(spec.device).capability != cards.HOPPER:
        return False
    if kind is None or spec.device == cards.META:
        return True
    key = kernel.name, kind, spec.device
    if key not in validated:
        if torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing():
            return False  # validated at a later call
        validated[key] = is_right(kernel, cards.device_of(spec.device), kind)
    return validated[key]


def prepare(device: torch.device) -> None:
    """Validate the kernels for ordinary codes on a CUDA device now."""
    spec = WeightSpec((1, 64, 64), NF4, 64, 0, device.index or 0)
    for kernel in kernels():
        works(kernel, spec)


def is_right(kernel: Kernel, device: torch.device, kind: str) -> bool:
    """Whether a kernel's small products, with LoRA, are those of the decoded weights."""
    # Several steps and blocks of features, the last one half full.
    packed = random_weight((2, 192, 512), kind, device, torch.Generator(device).manual_seed(0))
    ways = [(rows, by_rows) for rows in (20, 300) for by_rows in (True, False)]
    asked = (Matmul(packed, packed.dtype, *way) for way in ways)
    tried = [matmul for matmul in asked if kernel.supports(matmul)]
    try:
        return bool(tried) and all(_is_right(kernel, matmul) for matmul in tried)
    except Exception:  # noqa: BLE001 - this Triton does not compile it: another kernel runs
        return False


def _is_right(kernel: Kernel, matmul: Matmul) -> bool:
    packed, count, inner, out = matmul.packed, matmul.rows, matmul.inner, matmul.features
    generator = torch.Generator(packed.device).manual_seed(0)
    shapes = (count, inner), (count, 16), (2, out, 16)
    values = (torch.randn(each, device=packed.device, generator=generator) for each in shapes)
    x, products, factor = (each.to(packed.dtype) for each in values)
    routing = route((torch.arange(count, device=packed.device) >= 5).long()[:, None], 2)
    factors = Factors(factor[..., :0].transpose(1, 2), factor, 1.0)
    matmul = with_kernel(matmul, kernel)._replace(factors=factors)
    ordered = x if kernel.reorder is None else kernel.reorder(x)
    y = multiply(ordered, matmul, routing, products.flatten())
    weight = torch.empty(packed.shape, device=packed.device, dtype=packed.dtype)
    _file("grouped_mm").decode(packed, weight)
    weight = torch.cat([weight.transpose(1, 2) if matmul.by_rows else weight, factor.mT], 1)
    read = torch.cat([x, products], 1)
    right = torch.cat([read[:5] @ weight[0], read[5:] @ weight[1]]).float()
    return bool((y.float() - right).norm() < 4e-3 * right.norm())


def random_weight(
    shape: tuple[int, int, int], kind: str, device: torch.device, generator: torch.Generator
) -> PackedWeight:
    """Return a packed weight of random codes, in bf16 on CUDA, else in fp32."""
    numel, blocksize = math.prod(shape), {MXFP4: MX_BLOCK}.get(kind, 64)
    codes = torch.randint(256, (numel,), device=device, generator=generator).to(torch.uint8)
    absmax = torch.rand(numel // blocksize, device=device, generator=generator)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if kind not in TABLES:
        codes, absmax = codes.view(torch.int8), absmax[: shape[0] * shape[1]].clone()
        return PackedWeight(codes, absmax, None, 0, None, shape, kind, dtype)
    codes, table = codes[: numel // 2].clone(), torch.tensor(TABLES[kind], device=device)
    return PackedWeight(codes, absmax, table, blocksize, None, shape, kind, dtype)
