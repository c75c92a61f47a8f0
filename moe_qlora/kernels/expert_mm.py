"""x [W | B]^T and x [W ; A] for each expert's rows: on the codes, or over the workspace.

Few rows an expert go into the quantized matmul (`quantized_mm.py`). For many, a weight is
dequantized into the shared workspace, LoRA's factors beside it, and multiplied by torch's grouped
matmul, or by `grouped_mm.py` where torch's would wait for the device (`cards.py`). Where a
dequantized weight, or what comes out, is over the workspace's cap, both go in slices of the
features that come out: every expert's rows are then still there, and nobody has to know on the host
where they begin.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import autotune, cards, dequantize, grouped_mm, quantized_check, quantized_mm, workspace
from .factors import Factors
from .limits import TILE, WIDEST_TILE, few_rows, prefers_wide, row_stride, suits_registers
from .quantized_config import REGISTERS, Config, Gather
from .routing import Routing
from .weights import PackedWeight


class ExpertMatmul(NamedTuple):
    """One matmul of all experts: of a projection, forward or backward."""

    packed: PackedWeight
    factors: Factors | None  # Of LoRA, or None
    by_rows: bool  # Whether the weight's rows are the features that come out, else its columns
    back: bool  # Whether it belongs to backward
    on_quantized: bool  # Whether it is the quantized matmul, on the codes
    dtype: torch.dtype  # bf16 or fp16

    @property
    def rank(self) -> int:
        """r, by which LoRA lengthens the contraction."""
        return 0 if self.factors is None else self.factors.rank

    @property
    def features(self) -> int:
        """Features that come out."""
        return self.packed.spec.shape[1 if self.by_rows else 2]

    @property
    def _beside(self) -> tuple[Tensor | None, Tensor | None]:
        """What lies to the right of a dequantized weight, and below it."""
        if self.factors is None:
            return None, None
        if self.by_rows == self.back:  # stored (E, in, out)
            return self.factors.a.transpose(1, 2), self.factors.b.transpose(1, 2)
        return self.factors.b, self.factors.a

    @property
    def factor(self) -> Tensor | None:
        """`(E, N, r)`: the factor that the product's last r columns meet."""
        right, below = self._beside
        return right if self.by_rows or below is None else below.transpose(1, 2)


def runs_quantized(
    packed: PackedWeight,
    count: int,
    dtype: torch.dtype,
    *,
    back: bool,
    reused_in_backward: bool = False,
    in_order: bool = False,
) -> bool:
    """Whether a matmul of `count` rows runs on the codes; where `back`, it sums over stored rows.

    `reused_in_backward` says that a second matmul would find the dequantized weight, `in_order`
    that columns of rows stay in their order, as those of backward do.
    """
    if packed.kind == "int8" and not quantized_check.takes_int8(packed.device):
        return False
    spec = packed.spec
    registers = suits_registers(count, spec.shape[0]) and not in_order
    if registers and quantized_check.in_registers(spec, dtype, back=back):
        return True
    hopper = quantized_check.on_hopper(spec, dtype, back=back) and not reused_in_backward
    few = few_rows(count, spec.shape[0], hopper=hopper)
    return few and quantized_mm.supports(spec)


def prefers_wide_tiles(packed: PackedWeight, count: int, dtype: torch.dtype) -> bool:
    """Whether the quantized matmul is faster in tiles of `WIDE_TILE` rows than of 64."""
    least = TILE if quantized_check.on_hopper(packed.spec, dtype, back=False) else 4 * TILE
    return prefers_wide(count, packed.experts, least=least)


def reorders(matmul: ExpertMatmul, routing: Routing) -> bool:
    """Whether the matmul takes rows in the order of columns of `quantized_mm_registers.py`."""
    # Backward's rows stay in the order of columns that its other products, of factors, take.
    if not matmul.on_quantized or matmul.back or routing.counts[2] == 0:
        return False
    suits = suits_registers(routing.count, routing.experts)
    spec, back = matmul.packed.spec, not matmul.by_rows
    return suits and quantized_check.in_registers(spec, matmul.dtype, back=back)


def quantized_cut(matmul: ExpertMatmul, routing: Routing, wide: bool) -> tuple[Config, Tensor, int]:
    """Return how the quantized matmul is cut, its table of tiles, and the rows in each."""
    if reorders(matmul, routing):
        return REGISTERS, routing.widest, WIDEST_TILE
    tiles, tile = routing.cut(wide)
    back = not matmul.by_rows
    return autotune.chosen(matmul.packed, matmul.dtype, tile, back=back), tiles, tile


def gathers(matmul: ExpertMatmul, routing: Routing, wide: bool) -> bool:
    """Whether the matmul fetches tokens' rows itself, so that nobody copies them in order."""
    # Hopper's own kernels have no small tiles: with few tokens, the host need not look further.
    large = matmul.on_quantized and routing.tile == TILE
    return large and quantized_cut(matmul, routing, wide)[0].hopper


def multiply(
    x: Tensor, matmul: ExpertMatmul, routing: Routing, wide: bool, name: str,
    gather: Gather | None = None,
) -> Tensor:  # fmt: skip
    """Return `(R, N)`: x `(R, K + r)`, whose last r columns are LoRA's, times weight and factor.

    With `gather`, which needs `gathers`, x is the tokens' `(T, K)`. Where the matmul `reorders`,
    the first K columns of x are in that order.
    """
    out = None
    for (first, end), part in slices(x, matmul, routing, wide, name, gather):
        if end - first == matmul.features:
            return part
        if out is None:
            out = torch.empty(routing.count, matmul.features, dtype=x.dtype, device=x.device)
        out[:, first:end] = part
    assert out is not None
    return out


def slices(
    x: Tensor, matmul: ExpertMatmul, routing: Routing, wide: bool, name: str,
    gather: Gather | None = None,
) -> Iterator[tuple[tuple[int, int], Tensor]]:  # fmt: skip
    """Yield `multiply` by slices of features: (first, end), and `(R, end - first)`."""
    experts, n_rows, n_cols = matmul.packed.spec.shape
    inner = (n_cols if matmul.by_rows else n_rows) + matmul.rank
    # What comes out may be half of the cap: in backward it stands beside two others of its kind.
    dequantized = 0 if matmul.on_quantized else experts * inner
    each = matmul.dtype.itemsize * max(2 * routing.count, dequantized)
    step = max(64, workspace.workspace_cap(x.device) // each // 64 * 64)
    absmax = config = None
    if matmul.on_quantized:
        config, tiles, tile = quantized_cut(matmul, routing, wide)
        if matmul.packed.nested is not None and not config.direct:
            shape = tuple(matmul.packed.absmax.shape)
            absmax, _ = workspace.take("absmax", shape, torch.float32, x.device)
    for first in range(0, matmul.features, step):
        span = first, min(first + step, matmul.features)
        if config is not None:
            part = quantized_mm.launch(
                x, matmul.packed, matmul.factor, absmax, routing.expert_offsets, tiles, tile,
                config, back=not matmul.by_rows, span=span, gather=gather,
            )  # fmt: skip
        elif step >= matmul.features:
            part = _grouped(x, _whole(matmul, routing, name), matmul, routing)
        else:
            part = _grouped(x, _slice(matmul, routing, span), matmul, routing)
        yield span, part


def _grouped(x: Tensor, matrices: Tensor, matmul: ExpertMatmul, routing: Routing) -> Tensor:
    """Return `(R, N)`: each expert's rows of x `(R, K + r)` times its matrix `(K + r, N)`."""
    if cards.multiplies_by_torch(x.device, x.dtype):
        return F.grouped_mm(x, matrices, offs=routing.ends)
    tiles, tile = routing.cut(prefers_wide(routing.count, routing.experts))
    cut = autotune.chosen_cut(matmul.packed, x.dtype, tile, back=not matmul.by_rows)
    return grouped_mm.launch(x, matrices, routing.expert_offsets, tiles, tile, cut)


def _whole(matmul: ExpertMatmul, routing: Routing, name: str) -> Tensor:
    """Return the operand `(E, K + r, N)` of a grouped matmul, as a view of the workspace."""
    # Both lie beside the weight: what the forward dequantized serves backward as well.
    right, below = matmul._beside
    experts, n_rows, n_cols = matmul.packed.spec.shape
    device = routing.ints.device
    owner = owner_of(matmul.packed, routing)
    width = n_cols + matmul.rank
    stride = row_stride(width, matmul.dtype.itemsize)
    full, held = workspace.take(
        name, (experts, n_rows + matmul.rank, stride), matmul.dtype, device, owner, (routing.ints,)
    )
    full = full[:, :, :width]
    if not held:
        offsets = routing.expert_offsets
        dequantize.decode(matmul.packed, full, expert_offsets=offsets, right=right, below=below)
    return full[:, :n_rows].transpose(1, 2) if matmul.by_rows else full[:, :, :n_cols]


def owner_of(packed: PackedWeight, routing: Routing) -> tuple[int, int]:
    """Return the workspace's name of a dequantized weight."""
    codes = packed.codes.data_ptr() if packed.serial is None else -packed.serial
    return routing.ints.data_ptr(), codes


def _slice(matmul: ExpertMatmul, routing: Routing, span: tuple[int, int]) -> Tensor:
    """Return the columns `span` of `_whole`, dequantized apart."""
    experts, n_rows, n_cols = matmul.packed.spec.shape
    first, width = span[0], span[1] - span[0]
    right, below = matmul._beside
    if matmul.by_rows:
        shape, corner = (width, n_cols + matmul.rank), (first, 0)
        right, below = None if right is None else right[:, slice(*span)], None
    else:
        shape, corner = (n_rows + matmul.rank, width), (0, first)
        right, below = None, None if below is None else below[:, :, slice(*span)]
    expert_offsets = routing.expert_offsets
    part, _ = workspace.take("first", (experts, *shape), matmul.dtype, expert_offsets.device)
    dequantize.decode(
        matmul.packed, part, corner=corner, expert_offsets=expert_offsets, right=right, below=below
    )
    return part.transpose(1, 2) if matmul.by_rows else part


def in_backward() -> bool:
    """Whether the autograd engine runs this forward: a checkpoint's recomputation."""
    return torch._C._current_graph_task_id() != -1
