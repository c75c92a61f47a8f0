"""Fake operations that replace packed Linear layers and fused attention in a step on meta.

A fake operation computes nothing. It allocates what the real one allocates, and saves as much for
backward, so that allocations can be counted as on a GPU. It replaces the forward of instances in a
model that exists for planning only.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..kernels.weights import PackedWeight
from ..packing.codecs import codec_of


def set_forward(module: nn.Module, forward: Any) -> None:
    """Replace the forward of one instance by a function of (self, ...)."""
    module.__dict__["forward"] = MethodType(forward, module)


def first_floating(args: Any, kwargs: Any) -> Tensor:
    """Return the first floating tensor of a call: a layer's hidden states."""
    items = (*args, *kwargs.values())
    return next(x for x in items if isinstance(x, Tensor) and x.is_floating_point())


class _Linear4bit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        ctx.shape, ctx.dtype = shape, dtype
        weight = x.new_empty(shape, dtype=dtype).to(x.dtype)
        return x.new_empty((*x.shape[:-1], weight.shape[0]))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        weight = grad.new_empty(ctx.shape, dtype=ctx.dtype).to(grad.dtype)
        return grad.new_empty((*grad.shape[:-1], weight.shape[1])), None, None


class _Linear8bit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: tuple[int, ...]) -> Tensor:
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


def fake_linear(module: nn.Module, weight: PackedWeight, compute: Any) -> None:
    """Replace a packed Linear layer's forward; `compute` is `bnb_4bit_compute_dtype`, or None."""
    shape = tuple(weight.shape)

    def forward(self: Any, x: Tensor) -> Tensor:
        if codec_of(weight.kind).loads_in_8bit:
            return _Linear8bit.apply(x, shape)
        return _Linear4bit.apply(x.to(compute or x.dtype), shape, weight.dtype).to(x.dtype)

    set_forward(module, forward)


def fake_dequantize(parametrization: nn.Module, weight: PackedWeight) -> None:
    """Let a packed parameter's parametrization return a tensor of the right size."""
    shape, dtype = weight.shape, weight.dtype
    set_forward(parametrization, lambda self, codes: codes.new_empty(shape, dtype=dtype))


class Passthrough(torch.autograd.Function):
    """Returns a tensor like `hidden`, with a gradient as the anchor has; saves nothing."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, grad_anchor: Tensor) -> Tensor:
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


def _planned_attention(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    # The kernels lay their output out as (batch, length, heads, size), so that no copy follows.
    batch, heads, length, _ = query.shape
    size = value.shape[-1]
    strides = (length * heads * size, size, heads * size, 1)
    out = query.new_empty_strided((batch, heads, length, size), strides)
    return out, query.new_empty(query.shape[:-1], dtype=torch.float32)


def _register_attention() -> None:
    """Define the attention of plans as an operator, once, so that checkpoints can keep it."""
    if not hasattr(torch.ops.moe_qlora, "planned_attention"):
        define: Any = torch.library.custom_op
        operator = define("moe_qlora::planned_attention", _planned_attention, mutates_args=())
        operator.register_fake(_planned_attention)


class FusedAttentionCall(torch.autograd.Function):
    """Allocates what CUDA's fused attention allocates; saves no scores."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any) -> Tensor:
        if mask is not None and mask.dtype == torch.bool:
            mask = mask.new_empty(mask.shape, dtype=query.dtype)
        _register_attention()
        out, sums = torch.ops.moe_qlora.planned_attention(query, key, value)
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
    """A mode in which `scaled_dot_product_attention` allocates as CUDA's fused kernels do."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        names = ("query", "key", "value", "attn_mask")
        inputs = dict(zip(names, args, strict=False))
        inputs |= {name: value for name, value in kwargs.items() if name in names}
        query, key, value = inputs["query"], inputs["key"], inputs["value"]
        if query.dim() != 4 or not query.is_meta:
            return func(*args, **kwargs)
        return FusedAttentionCall.apply(query, key, value, inputs.get("attn_mask"))
