"""The experts forward "moe_qlora": computes from packed codes, through transformers' own interface.

On a GPU the whole module is one operation (`experts/fused.py`) where its layout and dtypes suit
that; the rest of this file is what runs everywhere, projection by projection, and the reference.

`activate` registers `experts_forward` in transformers' `ALL_EXPERTS_FUNCTIONS`, a public extension
point, and selects it on the configuration that the experts modules read. The forward decodes and
decodes again in backward (one expert at a time, or on a GPU one stack into a scratch that lives for
the call), so that no decoded weight is alive in between; LoRA runs as two low-rank products beside
the base product, never as W + B A.

Kept between forward and backward, in bytes, beside the layer's input (which the router keeps too),
the router's output and the adapters, with T tokens, k choices a token, R = T k rows, I the
intermediate size, g = 2 for gated experts and 1 for others, b bytes an element:

    pre-activations        R g I b
    activations            R I b
    sorted order           8 R, and 8 (E + 1) for the experts' bounds
    routing weights        R b
    one term's dropout     R I b for the down projection, T H b for the other, only where it drops

Nothing of a weight's size is among them. The gate runs in ordinary autograd, under a checkpoint of
its own, so that any gate a model defines is right and keeps only its input.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..detection.detect import dispatches
from ..packing import parametrize
from . import fused, fused_op
from .projection import Inputs, Projection, compiled_projection
from .projection_op import register_operators

IMPLEMENTATION = "moe_qlora"

_PROVIDER = "_moe_qlora_lora"
_PREVIOUS = "_moe_qlora_previous"


@dataclass(frozen=True)
class LoraFactors:
    """One adapter's factors for one expert parameter, as PEFT stores them.

    `in` and `out` are of the matrix as it is applied, whichever way round the parameter is stored.

    Attributes:
        a: `(E r, in)`, `lora_A.weight`, expert slowest: `a.reshape(E, r, in)`.
        b: `(out, r E)`, `lora_B.weight`, expert fastest: `b.reshape(out, r, E)`.
        scaling: Factor of the product.
        dropout: Module applied to the projection's input, or None.
    """

    a: Tensor
    b: Tensor
    scaling: float
    dropout: nn.Module | None = None


class LoraSource(Protocol):
    """What the forward asks for LoRA, at each call."""

    def active_lora(self, parameter_name: str) -> tuple[LoraFactors, ...]:
        """The terms of the adapters that are active now; empty where there are none."""


def set_lora_source(module: nn.Module, provider: LoraSource) -> None:
    """Let the module's forward ask `provider` for LoRA terms. It is copied with the module."""
    module.__dict__[_PROVIDER] = provider


def clear_lora_source(module: nn.Module) -> None:
    """Undo `set_lora_source`; nothing where none is set."""
    module.__dict__.pop(_PROVIDER, None)


def lora_source(module: nn.Module) -> LoraSource | None:
    """The module's provider, None where none is set."""
    return cast("LoraSource | None", module.__dict__.get(_PROVIDER))


def activate(model: nn.Module, module_names: Iterable[str]) -> tuple[str, ...]:
    """Select `experts_forward` for the named experts modules.

    The choice is made on the configuration object that each module reads, which it shares with the
    model's other experts modules: those that hold nothing packed go on with what was chosen before.

    Args:
        model: Owner of the modules.
        module_names: Dotted names of experts modules.

    Returns:
        Names of those whose class does not dispatch through transformers' experts interface; their
        own forward runs on, and reads decoded weights.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    left: list[str] = []
    configs: dict[int, Any] = {}
    for name in module_names:
        module = model.get_submodule(name)
        config = getattr(module, "config", None)
        if not dispatches(module) or config is None:
            left.append(name)
            continue
        configs[id(config)] = config
    if configs and IMPLEMENTATION not in ALL_EXPERTS_FUNCTIONS:
        register_operators()
        fused_op.register_operators()
        ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)
    for module in model.modules():
        config = getattr(module, "config", None)
        if id(config) in configs and dispatches(module) and _PREVIOUS not in module.__dict__:
            module.__dict__[_PREVIOUS] = getattr(config, "_experts_implementation", None)
            fused.prepare(module)
    for config in configs.values():
        # The internal name, as `set_experts_implementation` writes it: the property's setter would
        # pass the choice on to sub-configurations that own no packed experts.
        config._experts_implementation_internal = IMPLEMENTATION
    return tuple(left)


def deactivate(model: nn.Module) -> None:
    """Give every experts module back the implementation that it had before `activate`."""
    for module in model.modules():
        if _PREVIOUS in module.__dict__:
            config: Any = module.config
            config._experts_implementation_internal = module.__dict__.pop(_PREVIOUS)


def experts_forward(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The registered forward.

    Args:
        self: An experts module whose class dispatches through transformers' interface.
        hidden_states: `(T, H)`.
        top_k_index: `(T, k)` integers; E and above mean no expert that is held here.
        top_k_weights: `(T, k)`.

    Returns:
        `(T, H)` in the dtype of `hidden_states`.
    """
    first_name = "gate_up_proj" if self.has_gate else "up_proj"
    names = (first_name, "down_proj")
    if not any(parametrize.is_packed(self, name) for name in names):
        return _previous_forward(self)(self, hidden_states, top_k_index, top_k_weights)
    provider = lora_source(self)
    terms = [provider.active_lora(name) if provider is not None else () for name in names]
    whole = fused.run(
        self, first_name, hidden_states, top_k_index, top_k_weights, terms,
        _autocast_dtype(hidden_states),
    )  # fmt: skip
    if whole is not None:
        return whole
    top_k = top_k_index.shape[1]
    experts = _num_experts(self, first_name)
    flat = top_k_index.reshape(-1)
    sorted_ids, order = torch.sort(flat, stable=True)
    edges = torch.arange(experts + 1, device=flat.device, dtype=sorted_ids.dtype)
    routing = order, torch.searchsorted(sorted_ids, edges), top_k
    pre = _project(self, first_name, hidden_states, routing, gathers=True)
    inner = _gate(self, pre)
    weights = top_k_weights.reshape(-1).index_select(0, order)
    if self.has_post_expert_norm:
        rows = _project(self, "down_proj", inner, routing)
        return _normed(self, rows, routing, weights, hidden_states)
    out = _project(self, "down_proj", inner, routing, scatters=True, scale=weights)
    return out.to(hidden_states.dtype)


def _normed(
    module: Any, rows: Tensor, routing: tuple[Tensor, Tensor, int], weights: Tensor, like: Tensor
) -> Tensor:
    """Norm, routing weights and sum, where a norm stands between the last projection and these."""
    order, bounds, top_k = routing
    rows = module.post_expert_norm(rows)
    # Rows of no expert hold what the norm makes of zeros; they must not count.
    live = torch.arange(rows.shape[0], device=rows.device) < bounds[-1]
    rows = torch.where(live[:, None], rows * weights[:, None], 0)
    wide = torch.promote_types(rows.dtype, torch.float32)
    out = torch.zeros(like.shape, dtype=wide, device=rows.device)
    return out.index_add(0, order // top_k, rows.to(wide)).to(like.dtype)


def _previous_forward(module: Any) -> Any:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    own = type(module).forward
    eager = getattr(own, "__wrapped__", own)
    previous = module.__dict__.get(_PREVIOUS)
    if previous in (None, "eager", IMPLEMENTATION):
        return eager
    return ALL_EXPERTS_FUNCTIONS.get_interface(previous, eager)


def _num_experts(module: Any, name: str) -> int:
    if not parametrize.is_packed(module, name):
        return int(getattr(module, name).shape[0])
    return parametrize.packed_shape(module, name)[0]


def _autocast_dtype(like: Tensor) -> torch.dtype | None:
    kind = like.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _gate(module: Any, pre: Tensor) -> Tensor:
    gate = module._apply_gate if module.has_gate else module.act_fn
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        out = checkpoint(gate, pre, use_reentrant=False, preserve_rng_state=False)
    else:
        out = gate(pre)
    return cast(Tensor, out)


def _project(
    module: Any,
    name: str,
    x: Tensor,
    routing: tuple[Tensor, Tensor, int],
    *,
    gathers: bool = False,
    scatters: bool = False,
    scale: Tensor | None = None,
) -> Tensor:
    """One projection with its bias and LoRA terms, from packed codes or from a plain stack."""
    order, bounds, top_k = routing
    bias = getattr(module, f"{name}_bias") if module.has_bias else None
    provider = lora_source(module)
    terms = provider.active_lora(name) if provider is not None else ()
    dropped = [
        t.dropout(x) if t.dropout is not None and t.dropout.training else None for t in terms
    ]
    projection = Projection(
        transposed=bool(module.is_transposed),
        top_k=top_k,
        gathers=gathers,
        scatters=scatters,
        partial=bool(module._is_expert_parallel),
        scalings=tuple(t.scaling for t in terms),
        autocast=_autocast_dtype(x),
    )
    a, b = [t.a for t in terms], [t.b for t in terms]
    inputs = Inputs(x, scale, bias, order, bounds, dropped, a, b)
    if not parametrize.is_packed(module, name):
        return projection.plain(getattr(module, name), inputs)
    if torch.compiler.is_compiling():
        return compiled_projection(module, name, projection, inputs)
    return projection.packed(parametrize.read_packed(module, name), inputs)


__all__ = [
    "IMPLEMENTATION",
    "LoraFactors",
    "LoraSource",
    "activate",
    "clear_lora_source",
    "deactivate",
    "dispatches",
    "experts_forward",
    "lora_source",
    "set_lora_source",
]
