"""Fused attention of a step on meta: it allocates, and saves for backward, as CUDA's kernels do.

bitsandbytes' Linear layers and this package's experts run by their own operators, whose rules on
meta allocate what their kernels allocate. torch's rule for attention would count all scores.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor


def _planned_attention(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    # The kernels lay their output out as (batch, length, heads, size), so that no copy follows.
    batch, heads, length, _ = query.shape
    size = value.shape[-1]
    strides = (length * heads * size, size, heads * size, 1)
    out = query.new_empty_strided((batch, heads, length, size), strides)
    return out, query.new_empty(query.shape[:-1], dtype=torch.float32)


@cache
def _define_operator() -> None:
    """Define the attention of plans as an operator, so that checkpoints can keep its output."""
    define: Any = torch.library.custom_op
    operator = define("moe_qlora::planned_attention", _planned_attention, mutates_args=())
    operator.register_fake(_planned_attention)


class FusedAttentionCall(torch.autograd.Function):
    """Allocates what CUDA's fused attention allocates; saves no scores."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any) -> Tensor:
        if mask is not None and mask.dtype == torch.bool:
            mask = mask.new_empty(mask.shape, dtype=query.dtype)
        _define_operator()
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


def fused_attention() -> AbstractContextManager[Any]:
    """In this block, `scaled_dot_product_attention` on meta is `FusedAttentionCall`."""
    stock = F.scaled_dot_product_attention

    def attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        if query.dim() != 4 or not query.is_meta:
            return stock(query, key, value, attn_mask, *args, **kwargs)
        out: Tensor = FusedAttentionCall.apply(query, key, value, attn_mask)
        return out

    return patch.object(F, "scaled_dot_product_attention", attention)
