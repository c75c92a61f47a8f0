"""What takes the place of packed layers and of fused attention while a step is rehearsed on meta.

A stand-in computes nothing. It makes tensors of the sizes that the real operation makes, keeps for
backward what that keeps, and holds for a moment what that holds, so that a ledger of allocations
reads as on a GPU:

    packed Linear      bitsandbytes' MatMul4Bit and MatMul8bitLt: the weight decoded, twice
    packed experts     one call of `experts_forward`, by the figures of `memory/experts.py`
    fused attention    the kernels behind `scaled_dot_product_attention` on CUDA
    a layer's twin     hands on hidden states for a layer of which one like it is rehearsed

They are put on instances of a model that exists for planning only.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..experts.forward import lora_source
from .experts import Adapter, ExpertsCall, kept_nbytes, scratch_nbytes

_FUSED_HEAD = 256  # largest head of the kernels that take no mask


def _block(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="meta")


class _Linear4(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        ctx.shape, ctx.dtype = shape, dtype
        weight = x.new_empty(shape, dtype=dtype).to(x.dtype)
        return x.new_empty((*x.shape[:-1], weight.shape[0]))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        weight = grad.new_empty(ctx.shape, dtype=ctx.dtype).to(grad.dtype)
        return grad.new_empty((*grad.shape[:-1], weight.shape[1])), None, None


class _Linear8(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: tuple[int, int]) -> Tensor:
        ctx.shape = shape
        ctx.save_for_backward(x)
        half = x.to(torch.float16)
        codes = half.new_empty(half.shape, dtype=torch.int8)
        del half
        wide = codes.new_empty((*x.shape[:-1], shape[0]), dtype=torch.int32)
        out = wide.new_empty(wide.shape, dtype=torch.float16)
        del wide, codes
        return out.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        weight = grad.new_empty(ctx.shape)
        return grad.new_empty((*grad.shape[:-1], weight.shape[1])), None


def linear_forward(
    module: nn.Module, shape: tuple[int, int], kind: str, dtype: torch.dtype, compute: Any
) -> None:
    """Let a packed Linear layer's forward be its stand-in.

    Args:
        module: `bnb.nn.Linear4bit` or `Linear8bitLt`, on meta.
        shape: `(out, in)`.
        kind: "nf4", "fp4" or "int8".
        dtype: Of the decoded weight.
        compute: `bnb_4bit_compute_dtype`, or None.
    """

    def forward(self: Any, x: Tensor) -> Tensor:
        if kind == "int8":
            return _Linear8.apply(x, shape)
        return _Linear4.apply(x.to(compute or x.dtype), shape, dtype).to(x.dtype)

    module.__dict__["forward"] = MethodType(forward, module)


_CALL = "_moe_qlora_planned_call"


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: ExpertsCall, x: Tensor, weights: Tensor, *factors: Tensor
    ) -> Tensor:
        before, ctx.scratch = scratch_nbytes(call)
        kept = _block(kept_nbytes(call))
        scratch = _block(before)
        out = torch.empty_like(x)
        del scratch
        ctx.save_for_backward(x, weights, kept, *factors)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weights, _, *factors = ctx.saved_tensors
        need = ctx.needs_input_grad[1:]
        scratch = _block(ctx.scratch)
        grads = [
            torch.empty_like(tensor) if wanted else None
            for tensor, wanted in zip((x, weights, *factors), need, strict=True)
        ]
        del scratch
        return None, *grads


def experts_forward(module: nn.Module, names: tuple[str, str], shape: dict[str, Any]) -> None:
    """Let a packed experts module's forward be its stand-in.

    Args:
        module: An experts module whose class dispatches through transformers' interface.
        names: Its first and its second projection.
        shape: `experts`, `hidden`, `intermediate`, `gated`, `transposed` and `weight_itemsize` of
            an `ExpertsCall`.
    """

    def forward(self: Any, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        provider = lora_source(self)
        terms = [provider.active_lora(name) if provider is not None else () for name in names]
        first, second = (
            tuple(Adapter(_rank(term.a, shape["experts"]), term.a.element_size()) for term in some)
            for some in terms
        )
        call = ExpertsCall(
            tokens=x.shape[0],
            top_k=top_k_index.shape[-1],
            itemsize=x.element_size(),
            routing_itemsize=top_k_weights.element_size(),
            first=first,
            second=second,
            **shape,
        )
        self.__dict__[_CALL] = call
        factors = [factor for some in terms for term in some for factor in (term.a, term.b)]
        return _Experts.apply(call, x, top_k_weights, *factors)

    module.__dict__["forward"] = MethodType(forward, module)


def calls(model: nn.Module) -> list[ExpertsCall]:
    """The last call of each experts module that has a stand-in and has run."""
    return [m.__dict__[_CALL] for m in model.modules() if _CALL in m.__dict__]


def _rank(a: Tensor, experts: int) -> int:
    return a.shape[0] // experts


def decoded(parametrization: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Let a packed parameter's decoding give a tensor of the right size."""

    def forward(self: Any, codes: Tensor) -> Tensor:
        return codes.new_empty(shape, dtype=dtype)

    parametrization.__dict__["forward"] = MethodType(forward, parametrization)


class _Echo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, spark: Tensor) -> Tensor:
        return torch.empty_like(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


def echo(hidden: Tensor, spark: Tensor) -> Tensor:
    """A tensor like `hidden` that keeps nothing; it needs a gradient where `spark` does."""
    out: Tensor = _Echo.apply(hidden, spark)
    return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any) -> Tensor:
        if mask is not None and mask.dtype == torch.bool:
            mask = mask.new_empty(mask.shape, dtype=query.dtype)
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        # The kernels lay their output out as (batch, length, heads, size), so that no copy follows.
        batch, heads, length, _ = query.shape
        out = query.new_empty((batch, length, heads, value.shape[-1])).transpose(1, 2)
        ctx.save_for_backward(query, key, value, mask, sums, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        query, key, value, _, sums, _ = ctx.saved_tensors
        heads = query.shape[1]
        delta = torch.empty_like(sums)
        wide = query.new_empty(query.shape, dtype=torch.float32)  # sums of the query's gradient
        grads = [torch.empty_like(query)]
        for tensor in (key, value):
            # With fewer key heads than query heads, gradients are made for each of the latter.
            full = tensor.new_empty((tensor.shape[0], heads, *tensor.shape[2:]))
            grads.append(full if tensor.shape[1] == heads else torch.empty_like(tensor))
        del wide, delta
        return (*grads, None)


class FusedAttention(TorchFunctionMode):
    """Inside, `scaled_dot_product_attention` on meta tensors is what CUDA's fused kernels are."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        names = ("query", "key", "value", "attn_mask")
        given = dict(zip(names, args, strict=False)) | {
            k: v for k, v in kwargs.items() if k in names
        }
        query, key, value = given["query"], given["key"], given["value"]
        if query.dim() != 4 or not query.is_meta:
            return func(*args, **kwargs)
        return _Attention.apply(query, key, value, given.get("attn_mask"))
