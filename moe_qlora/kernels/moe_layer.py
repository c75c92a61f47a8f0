"""A whole layer of packed experts with LoRA, forward and backward.

Shape legend: T tokens, k assignments a token, R = T k rows sorted by expert, E experts, H hidden
size, I intermediate size, P = 2 I (gated) or I, r1 and r2 the padded ranks of both projections.

    rows   (R, H + r1)  the tokens' rows | s1 x A1^T
    pre    (R, P)       = rows [W1 | B1]^T: LoRA makes the contraction r1 longer
    inner  (R, I + r2)  h = gate(pre + bias) | s2 h A2^T
    y      (R, H)       = inner [W2 | B2]^T
    out    (T, H)       the sum over a token's assignments of w (y + bias), in fp32

and backward, from the tokens' gradient g:

    rows   (R, H + r2)  g's rows | s2 g B2
    u      (R, I)       = rows [W2 ; A2]: the gradient of h for w = 1
    dpre   (R, P + r1)  w u gate'(pre) | s1 dpre B1
    dx     (R, H)       = dpre [W1 ; A1], summed to tokens
    dw     <u, h>       needs no saved output: u includes LoRA's part
    dA, dB               outer products over each expert's rows, with (R, r) on one side

Where a matmul gathers tokens' rows itself, only the r columns of `rows` exist.
Saved for backward besides the inputs: pre, s1 x A1^T, s2 h A2^T and 8 R bytes of routing. The host
never waits for the device, and every sum has one order.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import table, workspace
from .expert_mm import ExpertMatmul
from .factors import Factors, Lora, factor_grad, pad_factors
from .gate_kernels import Gate, launch_gate, launch_gate_backward
from .grouped_mm import owner_of
from .launch import aligned
from .limits import reads_stored_factors, row_stride
from .routing import Routing, route
from .row_kernels import copies_apart, launch_copy_rows, launch_permute, launch_unpermute
from .streams import SecondStream
from .weights import PackedWeight


class Layer(NamedTuple):
    """A layer's weights and constants."""

    # Packed weight of gate and up, `(E, P, H)`, or `(E, H, P)` where transposed
    first: PackedWeight
    second: PackedWeight  # Packed weight of down, `(E, H, I)` or `(E, I, H)`
    transposed: bool  # Whether the weights are stored `(E, in, out)`
    gate: Gate
    dtype: torch.dtype  # bf16 or fp16: of rows and dequantized weights

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """E, H, P, I."""
        experts, a, b = self.first.spec.shape
        width, hidden = (b, a) if self.transposed else (a, b)
        return experts, hidden, width, width // 2 if self.gate.gated else width


class Operands(NamedTuple):
    """A call's tensors besides its layer and top-k assignments."""

    x: Tensor  # `(T, H)`, contiguous, in the layer's dtype
    weights: Tensor  # `(T, k)`: the routing weights
    biases: Sequence[Tensor | None]  # `(E, P)` and `(E, H)`, or None
    loras: Sequence[Lora | None]  # Of both projections


class Saved(NamedTuple):
    """Tensors saved for backward besides the inputs and the routing."""

    pre: Tensor  # `(R, P)`
    products: Tensor  # `(R (r1 + r2),)`: s1 x A1^T, and behind it s2 h A2^T


class ForwardState(NamedTuple):
    """A forward up to the down projection."""

    assignments: Tensor  # `(T, k)`: the top-k index
    operands: Operands
    routing: Routing
    saved: Saved
    inner: Tensor  # `(R, I + r2)`
    matmul: ExpertMatmul  # Of the down projection
    name: str  # The workspace's buffer
    operand: Any  # Of its first slice of features, None if it has not been prepared


class Grads(NamedTuple):
    """Gradients of `backward`; None where not asked for or where there is no LoRA."""

    x: Tensor | None
    weights: Tensor
    a1: Tensor | None
    b1: Tensor | None
    a2: Tensor | None
    b2: Tensor | None


def _strip(count: int, width: int, like: Tensor, matmul: ExpertMatmul) -> Tensor:
    stride = row_stride(width, like.dtype.itemsize, quantized=matmul.kernel.on_codes)
    room = torch.empty(count, stride, dtype=like.dtype, device=like.device)
    return room if stride == width else room[:, :width]


def _gather_gemm(
    routing: Routing, x: Tensor, ordered: Tensor, matmul: ExpertMatmul, factor: Tensor | None,
    name: str, product: Tensor, second: SecondStream, bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the matmul of the tokens' rows, and those rows' own products with a bias.

    `ordered` is what `ExpertMatmul.ordered` returns of x. Products with a factor, `(E, r, K)` if it
    is `matmul.factors.a`, else `(E, K, r)`, are written to `product`. The second stream is joined.
    """
    count, kernel = routing.count, matmul.kernel
    dots = torch.empty(count if bias is not None else 0, dtype=torch.float32, device=x.device)
    reads_b = matmul.factors is not None and factor is matmul.factors.b
    if reads_b and not _copies_apart(routing, matmul):
        second.join()  # b is written there, and read by the first stream
    operand, rows = _first_operand(matmul, routing, name, second), ordered
    if not kernel.gathers or factor is not None or bias is not None:
        copied = _permute(routing, x, matmul, factor, product, second, dots, bias)
        rows = rows if kernel.gathers else copied
    second.join()
    products, out = product if kernel.gathers else None, None
    for span in matmul.spans(count):
        if span[0]:
            operand = kernel.prepare(matmul, routing, span, name)
        y = kernel.launch(rows, matmul, operand, routing, span, products)
        if y.shape == (count, matmul.problem.features):
            return y, dots
        if out is None:
            out = y.new_empty(count, matmul.problem.features)
        out[:, slice(*span)] = y
    assert out is not None
    return out, dots


def _first_operand(matmul: ExpertMatmul, routing: Routing, name: str, second: SecondStream) -> Any:
    """Return what the matmul of the first features reads instead of the weight.

    It is prepared on the second stream, beside what launches next.
    """
    with second.beside():
        span = next(iter(matmul.spans(routing.count)))
        return matmul.kernel.prepare(matmul, routing, span, name)


def gate_up_forward(layer: Layer, index: Tensor, operands: Operands) -> ForwardState:
    """Compute what a checkpoint recomputes: the forward without the down projection.

    index: `(T, k)` integers below E.
    """
    x, bias1 = aligned(operands.x), operands.biases[0]
    count, recomputed = index.numel(), workspace.in_backward()
    by_rows = not layer.transposed
    # Backward reuses a recomputation's dequantized weights in the workspace, if still there.
    matmul1 = table.choose(layer.first, count, layer.dtype, by_rows=by_rows, reused=recomputed)
    matmul2 = table.choose(layer.second, count, layer.dtype, by_rows=by_rows)
    few = reads_stored_factors(count, layer.first.experts)
    as_stored = few and matmul1.kernel.on_codes, few and matmul2.kernel.on_codes
    second = SecondStream(x.device, count)
    ordered = matmul1.ordered(x, second)
    f1, f2 = pad_factors(operands.loras, layer.first.experts, layer.dtype, second, as_stored)
    routing = route(aligned(index.contiguous()), layer.first.experts)
    matmul1, matmul2 = matmul1._replace(factors=f1), matmul2._replace(factors=f2)
    sizes = count * matmul1.rank, count * matmul2.rank
    products = torch.empty(sum(sizes), dtype=layer.dtype, device=x.device)
    product1, product2 = products.split_with_sizes(sizes)
    factor = None if f1 is None else f1.a
    pre, _ = _gather_gemm(routing, x, ordered, matmul1, factor, "first", product1, second)
    name = "second" if recomputed else "first"
    operand = None if recomputed else _first_operand(matmul2, routing, name, second)
    inner_size = layer.sizes[-1]
    inner = _strip(count, inner_size + matmul2.rank, x, matmul2)
    bias = None if bias1 is None else aligned(bias1)
    launch_gate(
        (layer.gate, inner_size, inner.stride(0), matmul2.rank, routing.tile, routing.counts[0],
         matmul2.kernel.order, bias is not None, layer.first.spec.device),
        pre, pre if bias is None else bias, x if f2 is None else f2.a, routing.tiles,
        routing.expert_offsets, inner, product2, 1.0 if f2 is None else f2.scaling,
        *layer.gate.numbers,
    )  # fmt: skip
    second.join()
    saved = Saved(pre, products)
    return ForwardState(index, operands, routing, saved, inner, matmul2, name, operand)


def down_forward(layer: Layer, state: ForwardState, out: Tensor | None = None) -> Tensor:
    """Return the layer's output `(T, H)`, in `out` if given: the down projection, summed."""
    return _unpermute(
        layer, state.inner, state.matmul, state.routing, state.name, state.operand, out,
        state.operands.weights, state.assignments, state.operands.biases[1],
    )  # fmt: skip


def _copies_apart(routing: Routing, matmul: ExpertMatmul) -> bool:
    return not matmul.kernel.gathers and copies_apart(routing.tile)


def _permute(
    routing: Routing, x: Tensor, matmul: ExpertMatmul, factor: Tensor | None, product: Tensor,
    second: SecondStream, dots: Tensor, bias: Tensor | None,
) -> Tensor:  # fmt: skip
    """Return the tokens' sorted rows with their product with a factor; fill `product` and `dots`.

    For a kernel that fetches rows itself, none are copied, and x is returned. Many rows are copied
    by a kernel of their own, and multiplied on the second stream.
    """
    out, factors, size, copies = x, matmul.factors, x.shape[-1], not matmul.kernel.gathers
    apart = _copies_apart(routing, matmul)
    if copies:
        out = _strip(routing.count, size + matmul.rank, x, matmul)
    stride = out.stride(0) if copies else 0
    f = x if factor is None else factor
    over_rows = factors is not None and factor is factors.a
    with second.beside() if apart else nullcontext():
        if not apart or factor is not None or bias is not None:
            launch_permute(
                (size, stride, matmul.rank, over_rows, routing.top_k, routing.tile,
                 routing.counts[0], bias is not None),
                x, routing.order, f, routing.tiles, routing.expert_offsets, out, product,
                f if bias is None else bias, dots, 1.0 if factors is None else factors.scaling,
            )  # fmt: skip
    if apart:
        sizes = len(x), size, stride, routing.top_k, routing.experts
        launch_copy_rows(sizes, x, routing.inverse, routing.expert_offsets, out)
    return out


def _unpermute(
    layer: Layer, x: Tensor, matmul: ExpertMatmul, routing: Routing, name: str, operand: Any,
    out: Tensor | None = None, weights: Tensor | None = None, index: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the matmul of x's rows, summed to tokens `(T, N)`.

    `operand` is what `_first_operand` has returned, or None.
    """
    size, tokens = matmul.problem.features, routing.count // routing.top_k
    if out is None:
        out = torch.empty(tokens, size, dtype=layer.dtype, device=x.device)
    weights, index, bias = (None if t is None else aligned(t) for t in (weights, index, bias))
    for span in matmul.spans(routing.count):
        if span[0] or operand is None:
            operand = matmul.kernel.prepare(matmul, routing, span, name)
        y = matmul.kernel.launch(x, matmul, operand, routing, span)
        launch_unpermute(
            (tokens, *span, size, routing.top_k, weights is not None, bias is not None),
            y, routing.inverse, y if weights is None else weights, y if index is None else index,
            y if bias is None else bias, out, tokens, span[0], size,
        )  # fmt: skip
    return out


def backward(
    layer: Layer,
    routing: Routing,
    saved: Saved,
    grad: Tensor,
    operands: Operands,
    *,
    needs_x: bool = True,
) -> Grads:
    """Return the gradients of a forward, from its operands, its state and `grad` `(T, H)`."""
    _, hidden, width, inner_size = layer.sizes
    count = routing.count
    grad = aligned(grad.to(layer.dtype).contiguous())
    x, weights = aligned(operands.x), aligned(operands.weights)
    bias1, bias2 = (None if b is None else aligned(b) for b in operands.biases)
    lora1, lora2 = operands.loras
    second = SecondStream(x.device, count)
    f1, f2 = pad_factors(operands.loras, layer.first.experts, layer.dtype, second)
    matmul1, matmul2, name = _backward_matmuls(layer, routing, f1, f2)
    product_g = torch.empty(count * matmul2.rank, dtype=layer.dtype, device=grad.device)
    factor = None if f2 is None else f2.b
    ordered = matmul2.ordered(grad, second)
    u, dots = _gather_gemm(routing, grad, ordered, matmul2, factor, name, product_g, second, bias2)
    operand = _first_operand(matmul1, routing, "first", second) if needs_x else None
    sizes = count * matmul1.rank, count * matmul2.rank
    product1, product2 = saved.products.split_with_sizes(sizes)
    d_pre, d_weights, weighted2 = _gate_backward(
        layer, routing, saved.pre, u, dots, weights, bias1, bias2, matmul1, product_g, product2,
        matmul2.rank,
    )  # fmt: skip
    second.join()
    a1 = b1 = a2 = b2 = None
    if f2 is not None and lora2 is not None:
        a2 = factor_grad(lora2.a, product_g, f2.rank, u, routing, inner_size, second)
        b2 = factor_grad(lora2.b, weighted2, f2.rank, grad, routing, hidden, second, gathers=True,
                    over=True)  # fmt: skip
    del u, weighted2
    if f1 is not None and lora1 is not None:
        a1 = factor_grad(lora1.a, d_pre[:, width:], d_pre.stride(0), x, routing, hidden, second,
                    gathers=True, rank=f1.rank)  # fmt: skip
        b1 = factor_grad(lora1.b, product1, f1.rank, d_pre, routing, width, second, over=True)
    dx = _unpermute(layer, d_pre, matmul1, routing, "first", operand) if needs_x else None
    second.join()
    return Grads(dx, d_weights, a1, b1, a2, b2)


def _gate_backward(
    layer: Layer, routing: Routing, pre: Tensor, u: Tensor, dots: Tensor, weights: Tensor,
    bias1: Tensor | None, bias2: Tensor | None, matmul: ExpertMatmul,
    product_g: Tensor, product2: Tensor, rank2: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of the pre-activation, with LoRA's columns, and of the routing weights.

    Also product2 `(R, r2)`, each row times its routing weight, as `product_g` becomes in its place.
    u `(R, I)` is the gate's gradient before the routing weights, `dots` those of `_gather_gemm`.
    With LoRA on the second projection, h, the gate's output, is written over u: a factor's gradient
    needs it.
    """
    factors, size = matmul.factors, layer.sizes[-1]
    d_pre = _strip(routing.count, pre.shape[1] + matmul.rank, u, matmul)
    d_weights, weighted2 = torch.empty_like(weights), torch.empty_like(product2)
    launch_gate_backward(
        (layer.gate, size, d_pre.stride(0), matmul.rank, rank2, routing.tile, routing.counts[0],
         bias1 is not None, bias2 is not None, layer.first.spec.device),
        u, pre, u if bias1 is None else bias1, weights, routing.order, dots,
        u if factors is None else factors.b, routing.tiles, routing.expert_offsets, d_pre,
        d_weights, product_g, product2, weighted2, 1.0 if factors is None else factors.scaling,
        *layer.gate.numbers,
    )  # fmt: skip
    return d_pre, d_weights, weighted2


def _backward_matmuls(
    layer: Layer, routing: Routing, f1: Factors | None, f2: Factors | None
) -> tuple[ExpertMatmul, ExpertMatmul, str]:
    by_rows, device = layer.transposed, routing.ints.device
    owners = [owner_of(packed, routing) for packed in (layer.first, layer.second)]
    held1 = workspace.is_current("first", device, owners[0])
    held2 = workspace.is_current("second", device, owners[1])
    name = "second" if held1 or held2 else "first"
    held2 = held2 or workspace.is_current(name, device, owners[1])

    def matmul(packed: PackedWeight, factors: Factors | None, held: bool) -> ExpertMatmul:
        chosen = table.choose(
            packed, routing.count, layer.dtype, by_rows=by_rows, backward=True, held=held
        )
        return chosen._replace(factors=factors)

    return matmul(layer.first, f1, held1), matmul(layer.second, f2, held2), name
