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

from ..experts.forward import can_serve, experts_forward
from ..kernels.weights import PackedWeight
from ..packing.codecs import codec_of
from ..packing.parametrize import holds_packed, read_packed

_LAYER_WIDTH = 8  # hidden states of a layer that no Linear layer gives out: norms, sums, attention


def set_forward(module: nn.Module, forward: Any) -> None:
    """Replace the forward of one instance by a function of (self, ...)."""
    module.__dict__["forward"] = MethodType(forward, module)


def first_floating(args: Any, kwargs: Any) -> Tensor:
    """Return the first floating tensor of a call: a layer's hidden states."""
    items = (*args, *kwargs.values())
    return next(x for x in items if isinstance(x, Tensor) and x.is_floating_point())


def _bytes(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="meta")


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


class _Sized(torch.autograd.Function):
    """Returns a tensor like x, and saves so many bytes for backward."""

    @staticmethod
    def forward(ctx: Any, nbytes: int, x: Tensor, *trained: Tensor) -> Tensor:
        ctx.save_for_backward(_bytes(nbytes), x, *trained)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        _, *inputs = ctx.saved_tensors
        return None, *(torch.empty_like(tensor) for tensor in inputs)


def fake_layer(module: nn.Module, top_k: int) -> None:
    """Replace the forward of a whole layer, which then returns hidden states like its own.

    A rough estimate: its experts, what its Linear layers return, and eight hidden states.
    """
    linears = [part for part in module.modules() if isinstance(part, nn.Linear)]
    width = sum(linear.out_features for linear in linears)
    experts: list[Any] = [p for p in module.modules() if holds_packed(p) and can_serve(p)]
    of_experts = {id(p) for part in experts for p in part.parameters()}

    def compute(x: Tensor) -> Tensor:
        tokens, hidden = x.numel() // x.shape[-1], x.shape[-1]
        for part in experts:
            index = torch.empty(tokens, top_k, dtype=torch.long, device="meta")
            weights = torch.empty(tokens, top_k, dtype=x.dtype, device="meta")
            rows, columns = read_packed(part, "down_proj").shape[1:]
            shape = tokens, columns if part.is_transposed else rows
            out = experts_forward(part, _Resized.apply(x, shape), index, weights)
            x = x + _Resized.apply(out, x.shape)
        saved = x.element_size() * tokens * (width + _LAYER_WIDTH * hidden)
        trained = [p for p in module.parameters() if p.requires_grad and id(p) not in of_experts]
        return _Sized.apply(saved, x, *trained)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        x = first_floating(args, kwargs)
        # transformers checkpoints inside the forward that this one replaces.
        if getattr(self, "gradient_checkpointing", False):
            return self._gradient_checkpointing_func(compute, x)
        return compute(x)

    set_forward(module, forward)


class _Resized(torch.autograd.Function):
    """Returns a tensor of another shape; saves nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        ctx.shape = x.shape
        return x.new_empty(shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.new_empty(ctx.shape), None


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
