"""An experts module projection by projection, in plain autograd, where the fused layer cannot.

Shape legend: T tokens, k assignments a token, R = T k rows sorted by expert, E experts, r rank.

For row i of expert e:  y_i = x_i W_e^T + b_e + sum_j s_j (d_j(x_i) A_je^T) B_je^T
The gate runs under a checkpoint of its own and saves only its input.

Backward decodes again and multiplies by the weight the other way round. Products are grouped
matmuls where the card has them, which decode all experts at once; else loops over the experts that
have rows, which decode one at a time. Sums over a token's rows have one order.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial, wraps
from itertools import pairwise
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..errors import QuantizationError
from ..kernels.limits import GROUP
from ..kernels.weights import PackedWeight
from ..packing.codec import unpack_range
from ..packing.parametrize import is_autocast_on
from .backend import Call, has_grouped, runs_grouped, stored_transposed
from .kept import pop_saved, save
from .operands import packed_weight


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a `backward` that autograd cannot differentiate: create_graph=True raises."""
    # `once_differentiable` lets a second derivative of a loss through as none.

    @wraps(backward)
    def guarded(ctx: Any, *grads: Any) -> Any:
        # Autograd runs with gradients here exactly where it was asked for create_graph=True.
        if torch.is_grad_enabled():
            raise QuantizationError(
                "Packed experts have first derivatives only, and a second one was asked for "
                "(create_graph=True, as for a gradient penalty): keep the experts out of it, or "
                "train them unpacked. What prepare_training sets has first derivatives only too."
            )
        return backward(ctx, *grads)

    return guarded


def no_autocast(like: Tensor) -> Any:
    """Return a context that disables autocast; free where there is none."""
    on = is_autocast_on(like)
    return torch.autocast(like.device.type, enabled=False) if on else nullcontext()


def run(module: Any, call: Call, index: Tensor, routing_weights: Tensor) -> Tensor:
    """Return the module's output `(T, H)` in x's dtype."""
    x, (tokens, top_k) = call.x, index.shape
    first = call.weights[0]
    experts = int((getattr(module, call.names[0]) if first is None else first).shape[0])
    ids, order = torch.sort(index.reshape(-1), stable=True)
    each = torch.arange(experts + 1, device=index.device, dtype=ids.dtype)
    offsets = torch.searchsorted(ids, each).to(torch.int32)
    project = partial(_project, module, call, ids, offsets)

    def spread(x: Tensor) -> Tensor:
        # By copies of each token, whose gradients are summed at once, and rounded once.
        rows = x[:, None].expand(-1, top_k, -1).reshape(tokens * top_k, x.shape[-1])
        return rows.index_select(0, order)

    pre = project(0, x, spread).to(x.dtype)
    gate = module._apply_gate if module.has_gate else module.act_fn
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        inner = checkpoint(gate, pre, use_reentrant=False, preserve_rng_state=False)
    else:
        inner = gate(pre)
    rows = project(1, inner, lambda x: x)
    if module.has_post_expert_norm:
        rows = module.post_expert_norm(rows.to(x.dtype))
    rows = rows * routing_weights.reshape(-1).index_select(0, order)[:, None]
    rows = rows.index_select(0, order.argsort()).view(tokens, top_k, x.shape[-1])
    return rows.sum(1, dtype=torch.promote_types(rows.dtype, torch.float32)).to(x.dtype)


def _project(
    module: Any, call: Call, ids: Tensor, offsets: Tensor, which: int, x: Tensor,
    spread: Callable[[Tensor], Tensor],
) -> Tensor:  # fmt: skip
    """Return a projection of x's rows `(R, out)`; `spread` sorts them, `ids` `(R,)` are experts."""
    name, weight, rows = call.names[which], call.weights[which], spread(x)
    if weight is None:
        plain = getattr(module, name).to(call.autocast or x.dtype)
        y = _product(rows.to(plain.dtype), plain if module.is_transposed else plain.mT, offsets)
    else:  # as in Linear4bit, whose product runs in autocast's dtype
        cast_rows = rows.to(call.autocast or weight.compute_dtype or x.dtype)
        # The first is what a checkpoint that saves tensors of the experts saves
        transposed, keeps = stored_transposed(module, weight), which == 0
        if isinstance(weight, PackedWeight):
            y = _PackedProduct.apply(weight, transposed, keeps, offsets, cast_rows)
        else:
            packed = weight.tensors, weight.numbers, weight.dtype, transposed, keeps
            y = torch.ops.moe_qlora.experts_projection(cast_rows, offsets, *packed)
    if module.has_bias:
        bias = getattr(module, f"{name}_bias")
        # Its gradient sums thousands of rows, on a GPU by atomics: in fp32
        wide = bias.to(torch.promote_types(bias.dtype, torch.float32)).index_select(0, ids)
        y = y + wide.to(y.dtype)
    y = y.to(x.dtype)
    for factors in call.lora[which]:
        source = spread(cast(nn.Module, factors.dropout)(x)) if factors.drops else rows
        source, experts = source.to(call.autocast or factors.a.dtype), len(offsets) - 1
        # Views, so that nothing but the parameters is saved: (E, in, r) and (E, r, out)
        a = factors.a.reshape(experts, -1, factors.a.shape[-1]).mT
        b = factors.b.reshape(factors.b.shape[0], -1, experts).permute(2, 1, 0)
        y = y + _product(_product(source, a, offsets), b, offsets) * factors.scaling
    return y


def _product(x: Tensor, matrices: Tensor, offsets: Tensor) -> Tensor:
    """Return x's sorted rows `(R, K)` times their expert's matrix of `(E, K, N)`, in x's dtype."""
    return cast(Tensor, torch.ops.moe_qlora.experts_product(x, matrices, offsets))


class _PackedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: PackedWeight, transposed: bool, keeps: bool, offsets: Tensor, x: Tensor
    ) -> Tensor:
        # Codes in host memory, or gathered by ZeRO-3, are fetched again
        ctx.weight, ctx.transposed = weight.refetch or weight, transposed
        ctx.save_for_backward(offsets)
        if keeps and (kept := pop_saved()) is not None:
            return kept[0]
        out = multiply_codes(x, offsets, weight, transposed)
        if keeps:
            save([out])
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> Any:
        weight = ctx.weight() if callable(ctx.weight) else ctx.weight
        (offsets,) = ctx.saved_tensors
        back = multiply_codes(grad, offsets, weight, not ctx.transposed)
        return None, None, None, None, back


@torch.no_grad()
def multiply_codes(x: Tensor, offsets: Tensor, weight: PackedWeight, transposed: bool) -> Tensor:
    """Return x's sorted rows `(R, K)` times each expert's decoded matrix, in x's dtype."""
    stored = weight.as_stored()

    def decode(first: int, last: int) -> Tensor:
        matrices = unpack_range(stored, first, last, dtype=x.dtype)
        return matrices if transposed else matrices.mT

    with no_autocast(x):
        if runs_grouped(stored.shape, x, x.dtype):
            return _grouped(x, decode(0, stored.shape[0]), offsets)
        features = stored.shape[2 if transposed else 1]
        return _by_expert(x, lambda expert: decode(expert, expert + 1)[0], features, offsets)


def _by_expert(x: Tensor, matrix: Callable[[int], Tensor], features: int, offsets: Any) -> Tensor:
    """Return rows `(R, K)` times `matrix(expert)` `(K, features)`, expert by expert."""
    out = x.new_zeros(len(x), features)
    for expert, low, high in _spans(x, offsets):
        out[low:high] = x[low:high] @ matrix(expert)
    return out


def _spans(x: Tensor, offsets: Tensor) -> Iterator[tuple[int, int, int]]:
    """Yield each expert with rows, its first row and one past its last; waits for the device."""
    # On meta the first expert has all rows, the most that one can have
    bounds = [0, len(x)] if offsets.is_meta else offsets.tolist()
    for expert, (low, high) in enumerate(pairwise(bounds)):
        if high > low:
            yield expert, low, high


def _grouped(x: Tensor, matrices: Tensor, offsets: Tensor) -> Tensor:
    """Return `(R, N)`: rows of x `(R, K)` times their expert's matrix `(K, N)`."""
    features = matrices.shape[2]
    if not has_grouped(x, x.dtype):
        return _by_expert(x, lambda expert: matrices[expert].to(x.dtype), features, offsets)
    matrices = _padded(_padded(matrices.to(x.dtype), 1), 2)
    matrices = matrices if 1 in matrices.stride()[1:] else matrices.contiguous()
    return _by_torch(_padded(x, 1).contiguous(), matrices, offsets)[:, :features].contiguous()


def _outer(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """Return `(E, P, Q)`: a^T b over each expert's rows, of a `(R, P)` and b `(R, Q)`."""
    if not has_grouped(a, a.dtype):
        out = a.new_zeros(len(offsets) - 1, a.shape[1], b.shape[1])
        for expert, low, high in _spans(a, offsets):
            out[expert] = a[low:high].T @ b[low:high]
        return out
    found = _by_torch(_padded(a, 1).contiguous().T, _padded(b, 1).contiguous(), offsets)
    return found[:, : a.shape[1], : b.shape[1]].contiguous()


def _padded(tensor: Tensor, dim: int) -> Tensor:
    short = -tensor.shape[dim] % GROUP
    return F.pad(tensor, [0, 0] * (tensor.dim() - 1 - dim) + [0, short]) if short else tensor


def _by_torch(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """torch's grouped matmul: of a's rows `(R, K)`, or of its columns `(P, R)`, before each end."""
    ends = offsets[1:]
    if a.is_meta and a.dtype != torch.bfloat16:  # which torch 2.13 computes, but not on meta
        return a.new_empty(*([len(ends)] if b.ndim == 2 else []), a.shape[0], b.shape[-1])
    return F.grouped_mm(a, b, offs=ends)


def register_products() -> None:
    """Define the products as custom operators, which torch.compile does not look into."""
    operator: Any = partial(torch.library.custom_op, mutates_args=())

    def by_codes(
        x: Tensor, offsets: Tensor, packed: Any, numbers: Any, dtype: torch.dtype,
        transposed: bool, keeps: bool,
    ) -> Tensor:  # fmt: skip
        return multiply_codes(x, offsets, packed_weight(iter(packed), numbers, dtype), transposed)

    def plain(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        with no_autocast(tensors[0]):
            return function(*tensors)

    form = "(Tensor a, Tensor b, Tensor offsets) -> Tensor"
    product = operator("moe_qlora::experts_product", partial(plain, _grouped), schema=form)
    outer = operator("moe_qlora::experts_outer", partial(plain, _outer), schema=form)
    form = "(Tensor x, Tensor offsets, Tensor[] packed, int[] numbers, ScalarType dtype, "
    form += "bool transposed, bool keeps) -> Tensor"
    projection = operator("moe_qlora::experts_projection", by_codes, schema=form)

    def setup(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @first_order
    def product_backward(ctx: Any, grad: Tensor) -> Any:
        x, m, offsets = ctx.saved_tensors
        ops, needs = torch.ops.moe_qlora, ctx.needs_input_grad
        back = ops.experts_product(grad, m.mT, offsets) if needs[0] else None
        outer = ops.experts_outer(x, grad, offsets).to(m.dtype) if needs[1] else None
        return back, outer, None

    def save_projection(ctx: Any, inputs: Any, output: Tensor) -> None:
        _, offsets, packed, *ctx.constants = inputs
        ctx.save_for_backward(offsets, *packed)

    @first_order
    def projection_backward(ctx: Any, grad: Tensor) -> Any:
        offsets, *packed = ctx.saved_tensors
        *form, turned, _ = ctx.constants
        form = *form, not turned, False
        back = torch.ops.moe_qlora.experts_projection(grad, offsets, packed, *form)
        return back, None, [None] * len(packed), None, None, None, None

    product.register_fake(lambda x, m, offsets: x.new_empty(x.shape[0], m.shape[2]))
    product.register_autograd(product_backward, setup_context=setup)
    outer.register_fake(lambda a, b, offsets: a.new_empty(len(offsets) - 1, a.shape[1], b.shape[1]))
    projection.register_fake(
        lambda x, _, __, numbers, ___, turned, ____: x.new_empty(
            x.shape[0], numbers[-1 if turned else -2]
        )
    )
    projection.register_autograd(projection_backward, setup_context=save_projection)
