"""Fake operations that packed layers and fused attention are replaced by while a step runs on meta.

A fake operation computes nothing. It makes tensors of the sizes that the real one makes, keeps for
backward what that keeps, and holds for a moment what that holds, so that allocations can be counted
as on a GPU. They are put on instances of a model that exists for planning only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..experts.backend import stored_transposed
from ..experts.operands import active_lora
from ..kernels.weights import PackedWeight
from ..packing.codecs import codec_of
from .experts import Adapter, ExpertsCall, kept_nbytes, working_nbytes

_CALL, _SHAPE = "_moe_qlora_planned_call", "_moe_qlora_planned_shape"
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
    """Let a packed parameter's parametrization give out a tensor of the right size."""
    shape, dtype = weight.shape, weight.dtype
    set_forward(parametrization, lambda self, codes: codes.new_empty(shape, dtype=dtype))


class _Sized(torch.autograd.Function):
    """Gives out a tensor like x, and holds so many bytes: kept, in forward, in backward."""

    @staticmethod
    def forward(ctx: Any, sizes: tuple[int, int, int], x: Tensor, *others: Tensor) -> Tensor:
        ctx.working = sizes[2]
        kept, working = _bytes(sizes[0]), _bytes(sizes[1])
        out = torch.empty_like(x)
        del working
        ctx.save_for_backward(kept, x, *others)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        _, *inputs = ctx.saved_tensors
        working = _bytes(ctx.working)
        grads = [
            torch.empty_like(tensor) if needed else None
            for tensor, needed in zip(inputs, ctx.needs_input_grad[1:], strict=True)
        ]
        del working
        return None, *grads


class _AllToAll(torch.autograd.Function):
    """Gives out as many rows as it takes, in forward and in backward; keeps nothing."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return torch.empty_like(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return torch.empty_like(grad)


def dispatched(
    run: Callable[[Tensor, Tensor, Tensor], Tensor],
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """Run a rank's experts as transformers' `AllToAllEP` does, where each gets as much as it sends.

    Rows are sorted by expert and sent, the experts run on what arrives with one expert a row, and
    what comes back is put in order, weighted and summed.
    """
    top_k = top_k_index.shape[-1]
    order = torch.argsort(top_k_index.reshape(-1))
    received = _AllToAll.apply(x[order // top_k])
    local_index = torch.empty_like(order).unsqueeze(-1)
    out = run(received, local_index, torch.ones_like(local_index, dtype=received.dtype))
    returned = _AllToAll.apply(out)
    ordered = torch.empty_like(returned)
    ordered[order] = returned
    ordered = ordered.view(*top_k_weights.shape, x.shape[-1])
    return (ordered * top_k_weights.unsqueeze(-1)).sum(dim=1).to(x.dtype)


def fake_experts(module: Any, down: PackedWeight, *, dispatched_rows: bool = False) -> None:
    """Replace the forward of a packed experts module that `experts_forward` computes.

    With `dispatched_rows`, the module holds one rank's experts, and tokens come from all ranks.
    """
    names = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
    experts, rows, columns = down.shape
    hidden, intermediate = (columns, rows) if module.is_transposed else (rows, columns)
    shape: dict[str, Any] = {  # the fields of a call that depend on the weights alone
        "experts": experts,
        "hidden": hidden,
        "intermediate": intermediate,
        "gated": bool(module.has_gate),
        "transposed": stored_transposed(module, down),
        "weight_itemsize": down.dtype.itemsize,
        "known": down.spec.is_known,
        "blocksize": down.blocksize,
        "nested": down.nested is not None,
    }

    def run(self: Any, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        loras = [active_lora(self, name) for name in names]
        first, second = (
            tuple(Adapter(lora.a.shape[0] // experts, lora.a.itemsize) for lora in active)
            for active in loras
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
        factors = [factor for active in loras for lora in active for factor in (lora.a, lora.b)]
        sizes = (kept_nbytes(call), *working_nbytes(call))
        return _Sized.apply(sizes, x, top_k_weights, *factors)

    def forward(self: Any, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if dispatched_rows:
            return dispatched(partial(run, self), x, top_k_index, top_k_weights)
        return run(self, x, top_k_index, top_k_weights)

    module.__dict__[_SHAPE] = shape
    set_forward(module, forward)


def expert_calls(model: nn.Module) -> list[ExpertsCall]:
    """Return the last call of each fake experts module that has run."""
    return [m.__dict__[_CALL] for m in model.modules() if _CALL in m.__dict__]


def fake_layer(module: nn.Module, top_k: int) -> None:
    """Replace the forward of a whole layer, which then gives out hidden states like its own.

    A rough estimate: what its Linear layers and its experts give out, and eight hidden states.
    """
    linears = [part for part in module.modules() if isinstance(part, nn.Linear)]
    width = sum(linear.out_features for linear in linears)
    experts = [part for part in module.modules() if _SHAPE in part.__dict__]

    def compute(x: Tensor) -> Tensor:
        tokens, hidden = x.numel() // x.shape[-1], x.shape[-1]
        kept = x.element_size() * tokens * (width + _LAYER_WIDTH * hidden)
        before = after = 0
        for part in experts:
            call = ExpertsCall(tokens=tokens, top_k=top_k, **part.__dict__[_SHAPE])
            part.__dict__[_CALL] = call
            kept += kept_nbytes(call)
            before, after = map(max, (before, after), working_nbytes(call))
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        return _Sized.apply((kept, before, after), x, *trained)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        x = first_floating(args, kwargs)
        # transformers checkpoints inside the forward that this one replaces.
        if getattr(self, "gradient_checkpointing", False):
            return self._gradient_checkpointing_func(compute, x)
        return compute(x)

    set_forward(module, forward)


class Passthrough(torch.autograd.Function):
    """Gives out a tensor like `hidden`; keeps nothing, and needs a gradient as the anchor does."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, grad_anchor: Tensor) -> Tensor:
        return torch.empty_like(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class FusedAttentionCall(torch.autograd.Function):
    """Takes and gives out the bytes of CUDA's fused attention; keeps no scores."""

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
    """A mode in which `scaled_dot_product_attention` takes the bytes of CUDA's fused kernels."""

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
