"""x [W | B]^T and x [W ; A] for each expert's rows: straight on codes, or over decoded scratch.

Few rows an expert are multiplied on codes (`codes.py`). For many, a stack is decoded into the
shared scratch, LoRA's factors beside it, and multiplied by torch's grouped product. Where a decoded
stack, or what comes out, is over the scratch's cap, both go in slices of the features that come
out: every expert's rows are then still there, and nobody has to know on the host where they begin.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import autotune, dequantize, quantized_mm, workspace
from .limits import few_rows, row_stride
from .routing import Routing
from .weights import PackedWeight


class Factors(NamedTuple):
    """LoRA factors as the kernels read them: a `(E, r, in)`, b `(E, out, r)`, r padded."""

    a: Tensor
    b: Tensor
    scaling: float

    @property
    def rank(self) -> int:
        """r, padded."""
        return self.a.shape[1]


class Rows(NamedTuple):
    """Whose rows are whose, as a product needs it.

    Attributes:
        routing: Has the experts' bounds.
        tiles: `(2 n,)` int32: one of its tables.
        tile: Rows in a tile.
    """

    routing: Routing
    tiles: Tensor
    tile: int


class Side(NamedTuple):
    """One product: of a projection, forward or back.

    Attributes:
        packed: The stack.
        factors: Of LoRA, or None.
        by_rows: Whether the stack's rows are the features that come out, else its columns.
        back: Whether it belongs to backward.
        few: Whether it runs on codes.
        dtype: bf16 or fp16.
    """

    packed: PackedWeight
    factors: Factors | None
    by_rows: bool
    back: bool
    few: bool
    dtype: torch.dtype

    @property
    def rank(self) -> int:
        """Terms that LoRA adds to the contraction."""
        return 0 if self.factors is None else self.factors.rank

    @property
    def features(self) -> int:
        """Features that come out."""
        return self.packed.shape[1 if self.by_rows else 2]

    @property
    def _sides(self) -> tuple[Tensor | None, Tensor | None]:
        """What lies to the right of a decoded stack, and below it."""
        if self.factors is None:
            return None, None
        first, second = self.factors.b, self.factors.a
        if self.by_rows == self.back:  # stored (E, in, out)
            first, second = self.factors.a.transpose(1, 2), self.factors.b.transpose(1, 2)
        return first, second

    @property
    def factor(self) -> Tensor | None:
        """`(E, N, r)`: the factor that the product's last r columns meet."""
        right, below = self._sides
        if self.by_rows or below is None:
            return right
        return below.transpose(1, 2)


def is_few(
    packed: PackedWeight, count: int, dtype: torch.dtype, *, back: bool, twice: bool = False
) -> bool:
    """Whether a product of so many rows runs on codes.

    Args:
        packed: The stack.
        count: R.
        dtype: Of the rows.
        back: Whether the product sums over stored rows.
        twice: Whether a second product would find the decoded stack.
    """
    if packed.kind == "int8" and not quantized_mm.takes_int8(packed.device):
        return False
    spec = packed.spec
    hopper = quantized_mm.on_hopper(spec, dtype, back=back) and not twice
    few = few_rows(count, spec.shape[0], hopper=hopper)
    return few and quantized_mm.supports(spec)


def wants_wide(packed: PackedWeight, count: int, dtype: torch.dtype) -> bool:
    """Whether products on codes want tiles of `WIDE_TILE` rows, and not of 64."""
    least = 64 if quantized_mm.on_hopper(packed.spec, dtype, back=False) else 4 * 64
    return 3 * count > least * packed.experts


def multiply(x: Tensor, side: Side, rows: Rows, name: str) -> Tensor:
    """`(R, N)`: x, whose last r columns are LoRA's, times a stack and its factor.

    Args:
        x: `(R, K + r)` sorted rows.
        side: The product.
        rows: Whose rows are whose.
        name: Of the scratch's buffer.
    """
    out = None
    for (first, end), part in slices(x, side, rows, name):
        if end - first == side.features:
            return part
        if out is None:
            out = torch.empty(x.shape[0], side.features, dtype=x.dtype, device=x.device)
        out[:, first:end] = part
    assert out is not None
    return out


def slices(
    x: Tensor, side: Side, rows: Rows, name: str
) -> Iterator[tuple[tuple[int, int], Tensor]]:
    """`multiply`, a slice of features at a time: (first, end), and `(R, end - first)`."""
    experts, n_rows, n_cols = side.packed.shape
    inner = (n_cols if side.by_rows else n_rows) + side.rank
    # What comes out may be half of the cap: in backward it stands beside two others of its kind.
    each = side.dtype.itemsize * max(2 * x.shape[0], 0 if side.few else experts * inner)
    step = max(64, workspace.workspace_cap(x.device) // each // 64 * 64)
    absmax = config = None
    if side.few:
        config = autotune.chosen(side.packed, x.dtype, rows.tile, back=not side.by_rows)
        absmax = _room(side.packed, config, x.device)
    for first in range(0, side.features, step):
        span = first, min(first + step, side.features)
        if config is not None:
            part = quantized_mm.launch(
                x, side.packed, side.factor, absmax, rows.routing.bounds, rows.tiles, rows.tile,
                config, back=not side.by_rows, span=span,
            )  # fmt: skip
        elif step >= side.features:
            part = F.grouped_mm(x, _whole(side, rows.routing, name), offs=rows.routing.ends)
        else:
            part = F.grouped_mm(x, _slice(side, rows.routing, span), offs=rows.routing.ends)
        yield span, part


def _room(packed: PackedWeight, config: quantized_mm.Config, device: torch.device) -> Tensor | None:
    if packed.nested is None or config.direct:
        return None
    return workspace.take("absmax", tuple(packed.absmax.shape), torch.float32, device)[0]


def _whole(side: Side, routing: Routing, name: str) -> Tensor:
    """The operand `(E, K + r, N)` of a grouped product, as a view of the scratch.

    Both factors lie beside the stack, so that what was decoded forward serves backward as well.
    """
    right, below = side._sides
    experts, n_rows, n_cols = side.packed.shape
    device = routing.ints.device
    owner = owner_of(side.packed, routing)
    width = n_cols + side.rank
    stride = row_stride(width, side.dtype.itemsize)
    full, held = workspace.take(
        name, (experts, n_rows + side.rank, stride), side.dtype, device, owner, (routing.ints,)
    )
    full = full[:, :, :width]
    if not held:
        dequantize.decode(side.packed, full, bounds=routing.bounds, right=right, below=below)
    return full[:, :n_rows].transpose(1, 2) if side.by_rows else full[:, :, :n_cols]


def owner_of(packed: PackedWeight, routing: Routing) -> tuple[int, int] | None:
    """The scratch's name of a decoded stack; None while a graph is captured, which replays."""
    ints = routing.ints
    if ints.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    return ints.data_ptr(), packed.codes.data_ptr()


def _slice(side: Side, routing: Routing, span: tuple[int, int]) -> Tensor:
    """The columns `span` of `_whole`, decoded apart."""
    experts, n_rows, n_cols = side.packed.shape
    first, width = span[0], span[1] - span[0]
    right, below = side._sides
    shape, corner = (width, n_cols + side.rank), (first, 0)
    if side.by_rows:
        right, below = None if right is None else right[:, span[0] : span[1]], None
    else:
        shape, corner = (n_rows + side.rank, width), (0, first)
        right, below = None, None if below is None else below[:, :, span[0] : span[1]]
    bounds = routing.bounds
    part, _ = workspace.take("first", (experts, *shape), side.dtype, bounds.device)
    dequantize.decode(side.packed, part, corner=corner, bounds=bounds, right=right, below=below)
    return part.transpose(1, 2) if side.by_rows else part


def in_backward() -> bool:
    """Whether the autograd engine runs this forward: a checkpoint's recomputation."""
    return torch._C._current_graph_task_id() != -1
