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

Of both `rows` only the r columns exist: a matmul reads the tokens' own rows by index.
Saved for backward besides the inputs: pre, s1 x A1^T, s2 h A2^T and 8 R bytes of routing. The host
never waits for the device, and every sum has one order.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import table, workspace
from .factors import Lora, factor_grad, pad_factors
from .gate_kernels import Gate, apply_gate, gate_backward
from .grouped_mm import owner_of
from .lang import aligned
from .limits import row_stride
from .routing import Routing, route
from .row_kernels import multiply_tokens, sum_to_tokens
from .table import Matmul
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
    """A call's tensors, without its layer and top-k assignments."""

    x: Tensor  # `(T, H)`, contiguous, in the layer's dtype
    weights: Tensor  # `(T, k)`: the routing weights
    biases: Sequence[Tensor | None]  # `(E, P)` and `(E, H)`, or None
    loras: Sequence[Lora | None]  # Of both projections


class ForwardState(NamedTuple):
    """A forward up to the down projection."""

    assignments: Tensor  # `(T, k)`: the top-k index
    operands: Operands
    routing: Routing
    # For backward: pre `(R, P)`; and `(R (r1 + r2),)`, s1 x A1^T and behind it s2 h A2^T
    saved: tuple[Tensor, Tensor]
    inner: Tensor  # `(R, I + r2)`
    matmul: Matmul  # Of the down projection
    name: str  # The workspace's buffer


def _strip(count: int, width: int, like: Tensor, matmul: Matmul) -> Tensor:
    stride = row_stride(width, like.dtype.itemsize, quantized=matmul.kernel.on_codes)
    return torch.empty(count, stride, dtype=like.dtype, device=like.device)[:, :width]


def _gather_gemm(
    routing: Routing, x: Tensor, matmul: Matmul, name: str, product: Tensor,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return the matmul of the tokens' rows x, and their products with a bias.

    Products with LoRA's factor, A or in backward B, are written to `product`.
    """
    factors, dots, out = matmul.factors, None, None
    if bias is not None:
        dots = torch.empty(routing.count, dtype=torch.float32, device=x.device)
    if factors is not None or bias is not None:
        factor = None if factors is None else factors.b if matmul.backward else factors.a
        scaling = 1.0 if factors is None else factors.scaling
        multiply_tokens(
            x, routing, factor, matmul.rank, not matmul.backward, scaling, product, bias, dots
        )
    ordered = x if matmul.kernel.reorder is None else matmul.kernel.reorder(x)
    for span in matmul.spans():
        operand = matmul.kernel.prepare(matmul, routing, span, name)
        y = matmul.kernel.launch(ordered, matmul, operand, routing, span, product)
        if span == (0, matmul.features):
            return y, dots
        if out is None:
            out = y.new_empty(routing.count, matmul.features)
        out[:, slice(*span)] = y
    assert out is not None
    return out, dots


def gate_up_forward(layer: Layer, index: Tensor, operands: Operands) -> ForwardState:
    """Compute the forward up to the gate, as a checkpoint recomputes it.

    index: `(T, k)` integers below E.
    """
    x, bias1 = aligned(operands.x), operands.biases[0]
    count, recomputed, experts = index.numel(), workspace.in_backward(), layer.first.experts
    f1, f2 = pad_factors(operands.loras, experts, layer.dtype)
    # Backward reuses a recomputation's dequantized weights in the workspace, if still there.
    matmul1, matmul2 = (
        table.choose(
            Matmul(packed, layer.dtype, count, not layer.transposed, reused=reused, factors=f)
        )
        for packed, reused, f in ((layer.first, recomputed, f1), (layer.second, False, f2))
    )
    routing = route(aligned(index.contiguous()), experts)
    sizes = count * matmul1.rank, count * matmul2.rank
    products = torch.empty(sum(sizes), dtype=layer.dtype, device=x.device)
    product1, product2 = products.split_with_sizes(sizes)
    pre, _ = _gather_gemm(routing, x, matmul1, "first", product1)
    inner = _strip(count, layer.sizes[-1] + matmul2.rank, x, matmul2)
    apply_gate(
        layer.gate, pre, bias1, routing, inner, None if f2 is None else f2.a, matmul2.rank,
        1.0 if f2 is None else f2.scaling, product2, ordered=matmul2.kernel.reorder is not None,
    )  # fmt: skip
    name = "second" if recomputed else "first"
    return ForwardState(index, operands, routing, (pre, products), inner, matmul2, name)


def down_forward(layer: Layer, state: ForwardState, out: Tensor | None = None) -> Tensor:
    """Return the layer's output `(T, H)`, in `out` if given: the down projection, summed."""
    return _unpermute(
        layer, state.inner, state.matmul, state.routing, state.name, out,
        state.operands.weights, state.assignments, state.operands.biases[1],
    )  # fmt: skip


def _unpermute(
    layer: Layer, x: Tensor, matmul: Matmul, routing: Routing, name: str,
    out: Tensor | None = None, weights: Tensor | None = None, index: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the matmul of x's rows, summed to tokens `(T, N)`."""
    if out is None:
        tokens = routing.count // routing.top_k
        out = torch.empty(tokens, matmul.features, dtype=layer.dtype, device=x.device)
    for span in matmul.spans():
        operand = matmul.kernel.prepare(matmul, routing, span, name)
        y = matmul.kernel.launch(x, matmul, operand, routing, span)
        sum_to_tokens(y, routing, out, span, weights, index, bias)
    return out


def backward(
    layer: Layer,
    routing: Routing,
    saved: Sequence[Tensor],
    grad: Tensor,
    operands: Operands,
    *,
    needs_x: bool = True,
) -> list[Tensor | None]:
    """Return the gradients of a forward, from its operands, what it saved and `grad` `(T, H)`.

    Those of x, None if not asked for, of the routing weights, of A1, B1, A2, B2, None without LoRA.
    """
    experts, hidden, width, inner_size = layer.sizes
    count, device = routing.count, routing.ints.device
    grad = aligned(grad.to(layer.dtype).contiguous())
    x, weights = aligned(operands.x), operands.weights
    bias1, bias2 = operands.biases
    lora1, lora2 = operands.loras
    f1, f2 = pad_factors(operands.loras, experts, layer.dtype)

    owners = [owner_of(packed, routing) for packed in (layer.first, layer.second)]
    held1 = workspace.is_current("first", device, owners[0])
    held2 = workspace.is_current("second", device, owners[1])
    name = "second" if held1 or held2 else "first"
    held2 = held2 or workspace.is_current(name, device, owners[1])
    matmul1, matmul2 = (
        table.choose(Matmul(packed, layer.dtype, count, layer.transposed, True, held, factors=f))
        for packed, held, f in ((layer.first, held1, f1), (layer.second, held2, f2))
    )

    product_g = torch.empty(count * matmul2.rank, dtype=layer.dtype, device=grad.device)
    u, dots = _gather_gemm(routing, grad, matmul2, name, product_g, bias2)
    sizes = count * matmul1.rank, count * matmul2.rank
    pre, products = saved
    product1, product2 = products.split_with_sizes(sizes)
    # u becomes h, the gate's output, and product_g is weighted, where a factor's gradient needs it.
    d_pre = _strip(count, width + matmul1.rank, u, matmul1)
    d_weights, weighted2 = torch.empty_like(weights), torch.empty_like(product2)
    gate_backward(
        layer.gate, u, pre, bias1, weights, dots, routing, d_pre, d_weights,
        None if f1 is None else f1.b, matmul1.rank, 1.0 if f1 is None else f1.scaling, product_g,
        product2, weighted2, matmul2.rank,
    )  # fmt: skip
    a1 = b1 = a2 = b2 = None
    if f2 is not None and lora2 is not None:
        a2 = factor_grad(lora2.a, product_g, f2.rank, u, routing, inner_size)
        b2 = factor_grad(
            lora2.b, weighted2, f2.rank, grad, routing, hidden, gathers=True, over=True
        )
    del u, weighted2
    if f1 is not None and lora1 is not None:
        a1 = factor_grad(
            lora1.a, d_pre[:, width:], d_pre.stride(0), x, routing, hidden, gathers=True,
            rank=f1.rank,
        )  # fmt: skip
        b1 = factor_grad(lora1.b, product1, f1.rank, d_pre, routing, width, over=True)
    dx = _unpermute(layer, d_pre, matmul1, routing, "first") if needs_x else None
    return [dx, d_weights, a1, b1, a2, b2]
