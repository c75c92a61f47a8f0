"""`torch.topk` of a router, within a compiled decoder layer, by the kernel of `kernels/top_k.py`.

Inductor has no code of its own for it, and calls torch's. A layer is compiled within a mode that
sees the calls of torch's functions, so that code compiled elsewhere, and torch itself, stay as they
are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..kernels.lang import HAS_TRITON
from ..kernels.top_k import DTYPES, MAX_COLUMNS, MAX_K, top_k

_FUNCTIONS = (torch.topk, Tensor.topk)


def with_quick_top_k(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function to compile in place of a decoder layer's forward."""
    if not HAS_TRITON:
        return function
    _register()
    # torch.compile compiles the one function of a class once for all of its layers.
    return _of_class(function) if isinstance(function, FunctionType) else _wrapped(function)


def _wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        with _QuickTopK():
            return function(*args, **kwargs)

    return forward


_of_class = cache(_wrapped)


class _QuickTopK(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FUNCTIONS and _takes(*args, **kwargs):
            k = args[1] if len(args) > 1 else kwargs["k"]
            return torch.return_types.topk(torch.ops.moe_qlora.top_k(args[0], k))
        return func(*args, **kwargs)


def _takes(
    x: Tensor,
    k: Any = None,
    dim: int = -1,
    largest: bool = True,
    sorted: bool = True,  # noqa: A002 - torch's name
    **others: Any,
) -> bool:
    """Whether the kernel computes this call of `torch.topk`."""
    if not isinstance(k, int) or not largest or others or not _is_on_device(x):
        return False
    columns = x.shape[-1] if x.ndim else 0
    return (
        k <= min(columns, MAX_K)
        and columns <= MAX_COLUMNS
        and dim in (-1, x.ndim - 1)
        and (x.dtype in DTYPES)
    )


def _is_on_device(x: Tensor) -> bool:
    return x.device.type == "cuda"


def _top_k(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    return top_k(x, k)


def _fake(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    shape = (*x.shape[:-1], k)
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int64)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1])
    ctx.columns = inputs[0].shape[-1]
    ctx.mark_non_differentiable(output[1])


def _autograd(ctx: Any, grad: Tensor, _: Any) -> Any:
    (index,) = ctx.saved_tensors
    return grad.new_zeros(*grad.shape[:-1], ctx.columns).scatter(-1, index, grad), None


def _register() -> None:
    """Define the operator, once; nothing is registered on import."""
    if hasattr(torch.ops.moe_qlora, "top_k"):
        return
    schema = "(Tensor x, int k) -> (Tensor, Tensor)"
    operator: Any = torch.library.custom_op
    defined = operator("moe_qlora::top_k", _top_k, mutates_args=(), schema=schema)
    defined.register_fake(_fake)
    defined.register_autograd(_autograd, setup_context=_setup)
