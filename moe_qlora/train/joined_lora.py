"""LoRA of Linear layers that are given the same input, such as q, k and v: one product A x for all.

PEFT computes `y = W x + s B (A x)` for each layer by itself: x is read once for each A, and again
for each dA, and as many gradients of x are added. Here, with n layers of one parent:

    first of them    z = s [A_1; ...; A_n] x, for its input x of this call
    each             y_i = W_i x + B_i z_i, if it is given that very tensor; else PEFT's forward

A forward of a few tokens shows which layers these are, and that none changes x in place. In the
order of their calls, the first puts z into the model's `_Shared`, and the last one empties it.
Dynamo sees both in one frame, and the same guards in each decoder layer. What an exception in
between leaves is replaced next time.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from types import MethodType
from typing import Any, NamedTuple

import torch
from peft.tuners.lora import Linear
from peft.tuners.lora.bnb import Linear4bit, Linear8bitLt
from torch import Tensor, nn
from torch.nn.functional import linear

from ..lora import layer as ours
from ..lora.targets import base_model

_MEMBER = "_moe_qlora_joined"  # Entry of a layer's `__dict__`: its `_Member`
# Layers that compute y as above; another subclass may not
_KINDS = (Linear, Linear4bit, Linear8bitLt, ours.Linear4bit, ours.Linear8bitLt)
_TOKENS = 8


def join_lora(model: nn.Module) -> JoinedLora:
    """Compute the A products of LoRA layers with the same parent and the same input as one.

    Results and gradients are PEFT's up to rounding. A layer in evaluation, or whose active adapters
    have dropout, a bias or a variant such as DoRA, or are disabled or merged, runs PEFT's forward;
    so does a group of which a part has hooks, whose calls would be left out or find x changed.
    Adapters may be added, switched and deleted; state dicts and module names stay the same.

    Call it after `get_peft_model`, before layers are compiled or recorded. The model runs once, on
    a few tokens without gradients, and raises what it raises on `input_ids` alone.
    """
    shared, joined, groups = _Shared(), JoinedLora(), _groups(model)
    joined.products, joined.layers = len(groups), sum(map(len, groups))
    for layers in groups:
        for place, layer in enumerate(layers):
            vars(layer)[_MEMBER] = _Member(layers, place, shared)
            layer.forward = MethodType(_forward, layer)
            joined.callback(_restore, layer)
    return joined


class JoinedLora(ExitStack):
    """What was joined, until it is closed: `products` A x are those of `layers` LoRA layers."""

    products = layers = 0


def _restore(layer: nn.Module) -> None:
    vars(layer).pop(_MEMBER, None)
    if getattr(vars(layer).get("forward"), "__func__", None) is _forward:  # Else of other code
        del layer.forward


class _Shared:
    held: tuple[Any, ...] | None = None  # `_products` of the group that is being computed

    def __deepcopy__(self, memo: dict[int, Any]) -> _Shared:
        memo[id(self)] = copied = _Shared()
        return copied


class _Member(NamedTuple):
    """A layer's place among the layers with the same input, in the order of their calls."""

    layers: tuple[Any, ...]
    place: int
    shared: _Shared


def _forward(layer: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    member: _Member | None = getattr(layer, _MEMBER, None)
    pairs = None if member is None else _pairs(member, x, not args and not kwargs)
    if not pairs:
        own: Callable[..., Tensor] = type(layer).forward
        return own(layer, x, *args, **kwargs)
    result = total = layer.base_layer(x)
    for z, b in pairs:
        total = total + b(z)
    return total.to(result.dtype)


def _pairs(member: _Member, x: Tensor, alone: bool) -> list[tuple[Tensor, Any]] | None:
    """Return (s A x, B) of active adapters; None for PEFT's forward, with other arguments too."""
    layers, place, shared = member
    if place == 0:
        found = _products(layers, x) if alone else None
        shared.held = None if found is None else (layers[0], x, found)
    held = shared.held
    if place == len(layers) - 1:
        shared.held = None
    if not alone or held is None or held[0] is not layers[0] or held[1] is not x:
        return None
    pairs: list[list[tuple[Tensor, Any]]] = held[2]
    return pairs[place]


def _products(layers: tuple[Any, ...], x: Tensor) -> list[list[tuple[Tensor, Any]]] | None:
    """Return `_pairs` of each layer of one product, or None to run PEFT's forward."""
    adapters = [_active(layer) for layer in layers]
    flat = [each for found in adapters for each in found or ()]
    factors = [a.weight for a, _, _ in flat]
    if None in adapters or len({(factor.dtype, factor.device) for factor in factors}) != 1:
        return None
    given = x
    # As PEFT: bitsandbytes' layers leave the cast to autocast.
    if type(layers[0]) is Linear or not torch.is_autocast_enabled():
        given = layers[0]._cast_input_dtype(x, factors[0].dtype)
    parts = linear(given, torch.cat(factors)).split([len(factor) for factor in factors], -1)
    rest = iter([z * s for z, (_, _, s) in zip(parts, flat, strict=True)])
    return [[(next(rest), b) for _, b, _ in found or ()] for found in adapters]


def _is_changed(module: Any) -> bool:
    hooks = module._forward_pre_hooks, module._forward_hooks
    if any(map(len, (*hooks, module._backward_pre_hooks, module._backward_hooks))):
        return True
    return "forward" in vars(module) and _MEMBER not in vars(module)


def _active(layer: Any) -> list[tuple[Any, Any, float]] | None:
    """Return (A, B, s) of a layer's active adapters, or None if they compute more than s B A x."""
    plain = layer.training and not layer.disable_adapters and not layer.merged
    if not plain or _is_changed(layer) or _is_changed(layer.base_layer):
        return None
    found: list[tuple[Any, Any, float]] = []
    for name in layer.active_adapters:
        if name in layer.lora_A:
            a, b, dropout = layer.lora_A[name], layer.lora_B[name], layer.lora_dropout[name]
            plain = type(dropout) is nn.Identity and type(a) is nn.Linear and a.bias is None
            plain = plain and b.bias is None and name not in layer.lora_variant
            # Neither A nor its dropout is called, and B is given s A x, where PEFT gives it A x.
            if not plain or any(map(_is_changed, (a, b, dropout))):
                return None
            found.append((a, b, layer.scaling[name]))
    return found


def _groups(model: nn.Module) -> list[tuple[Any, ...]]:
    """Return LoRA layers by parent and input, in the order of their first calls."""
    base: Any = base_model(model)
    parents = {
        child: parent
        for parent in base.modules()
        for child in parent.children()
        if type(child) in _KINDS and "forward" not in vars(child)
    }
    groups: dict[Any, list[nn.Module]] = {}
    inputs: dict[nn.Module, Any] = {}  # alive, so that no other tensor has its identity

    def note(layer: nn.Module, args: Any) -> None:
        if args and layer not in inputs:
            inputs[layer] = args[0]
            key = parents[layer], id(args[0]), args[0]._version
            groups.setdefault(key, []).append(layer)

    weight = next(base.parameters())
    devices = [weight.get_device()] if weight.is_cuda else []
    with ExitStack() as stack:
        for layer in parents:
            stack.callback(layer.register_forward_pre_hook(note).remove)
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.random.fork_rng(devices))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        trunk = getattr(base, "base_model", base)
        trunk(input_ids=torch.arange(_TOKENS, device=weight.device)[None])
    return [tuple(layers) for layers in groups.values() if len(layers) > 1]
