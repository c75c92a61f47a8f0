"""Bytes that one call of packed experts keeps and needs for a moment in training; free of torch.

This is the only place where a plan depends on how the kernels compute. A call that the fused layer
supports follows `kernels/moe_layer.py`, whose docstring names what is there at each stage, and the
workspace of `kernels/workspace.py`, which stays; any other call follows `kernels/projection.py` and
the table of `experts/forward.py`. Which path a call takes, and whether its products are quantized
matmuls, is asked of `kernels/limits.py`. Cards differ in who multiplies what is dequantized
(`kernels/cards.py`), which holds the same bytes: torch's grouped matmul and our own both take the
workspace and give out the product, and nothing else.

Legend: T tokens, k experts a token, R = T k rows, E experts, H hidden and I intermediate size,
g = 2 for gated experts and 1 for others, b bytes of an activation, r rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..kernels.limits import (
    GROUP,
    cdiv,
    dequantizes_whole,
    padded,
    prefers_quantized,
    row_stride,
    suits_rs,
    supports_fused,
    supports_quantized,
    supports_registers,
)

_INT64 = 8
_FLOAT32 = 4
_ROUTING = 8  # bytes a row of what the fused layer keeps of the routing


@dataclass(frozen=True, slots=True)
class Adapter:
    """LoRA on one projection."""

    rank: int  # r
    itemsize: int  # Bytes of an element of its factors


@dataclass(frozen=True, slots=True)
class ExpertsCall:
    """One call of one experts module."""

    tokens: int  # T
    top_k: int
    experts: int  # E
    hidden: int  # H
    intermediate: int  # I
    gated: bool = True  # Whether the first projection gives out both halves of a gated unit
    itemsize: int = 2  # b, of the activations
    weight_itemsize: int = 2  # Bytes of an element of the dequantized weights
    routing_itemsize: int = 2  # Bytes of a routing weight
    first: tuple[Adapter, ...] = ()  # Active LoRA on the first projection
    second: tuple[Adapter, ...] = ()  # Active LoRA on the second
    transposed: bool = False  # Whether the weights are stored `(E, in, out)`
    known: bool = True  # Whether kernels can decode the codes
    blocksize: int = 64  # 0 for int8
    nested: bool = True

    @property
    def fused(self) -> bool:
        """Whether both projections run as one fused layer."""
        return self.known and supports_fused(
            self.experts,
            (self.hidden, self.intermediate),
            blocksize=self.blocksize,
            rank=max(self.ranks),
            itemsize=self.itemsize,
        )

    @property
    def quantized(self) -> bool:
        """Whether the products are quantized matmuls, so that no weight is dequantized.

        A plan does not know the card, so it takes the limit that holds on all of them, 256 rows an
        expert. On Hopper some are up to 1,024: in between, a plan is more than is used there.
        """
        columns = (self.width if self.transposed else self.intermediate, self.hidden)
        supported = (supports_quantized(size, self.blocksize) for size in columns)
        return prefers_quantized(self.rows, self.experts) and all(supported)

    @property
    def rows(self) -> int:
        """R."""
        return self.tokens * self.top_k

    @property
    def ranks(self) -> tuple[int, int]:
        """Both projections' ranks, of all adapters together."""
        return sum(lora.rank for lora in self.first), sum(lora.rank for lora in self.second)

    @property
    def width(self) -> int:
        """g I, what the first projection gives out for a row."""
        return self.intermediate * (2 if self.gated else 1)


def kept_nbytes(call: ExpertsCall) -> int:
    """Return the bytes that stay from forward to backward, beside the input and the adapters."""
    rows = call.rows
    if call.fused:
        return rows * (call.width + sum(_padded_ranks(call))) * call.itemsize + _ROUTING * rows
    activations = rows * (call.width + call.intermediate) * call.itemsize
    order = _INT64 * (rows + call.experts + 1)
    return activations + order + rows * call.routing_itemsize


def working_nbytes(call: ExpertsCall) -> tuple[int, int]:
    """Return the bytes in use for a moment beside what is kept: (in forward, in backward)."""
    return _fused_working(call) if call.fused else _projections_working(call)


def workspace_nbytes(call: ExpertsCall, *, checkpointing: bool) -> tuple[int, ...]:
    """Return the bytes of each buffer of the workspace, which all layers of a device share.

    What a checkpoint's recomputation dequantizes has a buffer for each projection, since backward
    follows at once; otherwise the two take turns.
    """
    if not call.fused:
        return ()
    weights = call.experts * call.hidden * call.width
    # Nested statistics are decoded apart where nothing else is.
    statistics = (cdiv(weights, call.blocksize) * _FLOAT32,) if call.nested else ()
    if call.quantized:
        return statistics
    first, second = _padded_ranks(call)
    sides = ((call.width, call.hidden, first), (call.hidden, call.intermediate, second))
    buffers = [
        call.experts * (features + rank) * _stride(call, size + rank) * call.itemsize
        for features, size, rank in sides
    ]
    some = _in_registers(call)
    if checkpointing:
        # Where recomputation dequantizes neither, their weights take turns: statistics have room.
        return (*buffers, *statistics) if any(some) and not all(some) else tuple(buffers)
    return (max(buffers), *statistics) if any(some) else (max(buffers),)


def _in_registers(call: ExpertsCall) -> tuple[bool, bool]:
    """Return whether Hopper may compute each projection's forward, not its backward, on codes."""
    suits = suits_rs(call.rows, call.experts) and not call.transposed
    suits = suits and not prefers_quantized(call.rows, call.experts, hopper=True)
    first, second = (
        suits
        and supports_quantized(columns, call.blocksize)
        and supports_registers(call.blocksize, columns)
        for columns in (call.hidden, call.intermediate)
    )
    return first, second


def _fused_working(call: ExpertsCall) -> tuple[int, int]:
    """Return `working_nbytes` of `kernels/moe_layer.py`, in the names of its docstring."""
    first, second = _padded_ranks(call)
    rows, size = call.rows, call.itemsize
    out = call.tokens * call.hidden * size
    gathered = rows * _stride(call, call.hidden + first) * size
    inner = rows * _stride(call, call.intermediate + second) * size
    y = rows * call.hidden * size
    ends_first, ends_second = call.hidden + call.width, call.hidden + call.intermediate
    factors = call.experts * size * (first * ends_first + second * ends_second)
    forward = max(gathered, inner + y + out) + factors
    product = rows * second * size
    u = rows * call.intermediate * size
    d_pre = rows * _stride(call, call.width + first) * size
    grads = call.experts * (
        sum(lora.rank * ends_first * lora.itemsize for lora in call.first)
        + sum(lora.rank * ends_second * lora.itemsize for lora in call.second)
    )
    stages = (
        rows * _stride(call, call.hidden + second) * size + product + u,
        product + u + d_pre,
        product + d_pre + y + grads,
        product + y + grads + out,
    )
    # The caller counts the gradients of the factors and of x from the start of backward.
    return forward, max(max(stages) + factors - grads - out, 0)


def _projections_working(call: ExpertsCall) -> tuple[int, int]:
    """Return `working_nbytes` of the projections one by one."""
    rows, wide = call.rows, _FLOAT32 * call.tokens * call.hidden
    hidden = rows * call.hidden * call.itemsize
    inner = rows * call.intermediate * call.itemsize
    outer = rows * call.width * call.itemsize
    up, down = _dequantized(call, call.width), _dequantized(call, call.intermediate)
    forward = [
        hidden + up + outer,  # tokens gathered to rows, the weight dequantized, the product
        outer + inner + down + hidden,
        outer + inner + 2 * hidden + wide,  # rows scaled, put in the tokens' order, summed
    ]
    backward = [
        outer + inner + hidden + down + inner,  # the gradient's rows, dequantized, the product
        outer + inner + hidden + inner + 3 * rows * call.intermediate * _FLOAT32,  # routing weights
        2 * outer + 4 * inner,  # the gate, computed again; the activations have gone
        outer + 2 * hidden + up,  # pre-activations have gone too: this is their gradient
        outer + 3 * hidden + wide,
    ]
    for lora in call.first:
        in_rows, out_rows = rows * call.hidden, rows * call.width
        forward.append(hidden + outer + _sums(call, lora, out_rows))
        forward.append(hidden + outer + _cast(call, lora, in_rows))
        # The input in LoRA's dtype, the input's gradient, and its sum over a token's rows.
        onward = _sums(call, lora, in_rows) + in_rows * max(lora.itemsize, call.itemsize)
        factors = _factors(call, lora, call.hidden, call.width)
        backward.append(outer + hidden + _cast(call, lora, in_rows) + onward + wide + factors)
    for lora in call.second:
        in_rows, out_rows = rows * call.intermediate, rows * call.hidden
        casts = _cast(call, lora, in_rows) + _cast(call, lora, out_rows)
        forward.append(outer + inner + hidden + _sums(call, lora, out_rows))
        factors = _factors(call, lora, call.intermediate, call.hidden)
        backward.append(outer + 2 * inner + 2 * hidden + casts + factors)
    kept = outer + inner
    return max(forward) - kept, max(backward) - kept


def _padded_ranks(call: ExpertsCall) -> tuple[int, int]:
    """Return both projections' ranks as the fused layer holds them; 0 without LoRA."""
    first, second = (padded(rank) if rank else 0 for rank in call.ranks)
    return first, second


def _stride(call: ExpertsCall, width: int) -> int:
    return row_stride(width, call.itemsize, quantized=call.quantized)


def _dequantized(call: ExpertsCall, features: int) -> int:
    """Return the bytes of a projection dequantized at once: all experts, or one of them."""
    whole = dequantizes_whole(call.experts, call.hidden, features)
    return (call.experts if whole else 1) * call.hidden * features * call.weight_itemsize


def _sums(call: ExpertsCall, lora: Adapter, elements: int) -> int:
    """Return the bytes of what LoRA adds, and of the sum in the wider of both dtypes."""
    return elements * (lora.itemsize + max(lora.itemsize, call.itemsize))


def _cast(call: ExpertsCall, lora: Adapter, elements: int) -> int:
    """Return the bytes of rows in LoRA's dtype, 0 where they are in it."""
    return elements * lora.itemsize if lora.itemsize != call.itemsize else 0


def _factors(call: ExpertsCall, lora: Adapter, inputs: int, outputs: int) -> int:
    """Return the bytes of the factors laid out for grouped matmuls, and of their gradients."""
    rank = cdiv(lora.rank, GROUP) * GROUP
    return 2 * call.experts * rank * (inputs + outputs) * lora.itemsize
