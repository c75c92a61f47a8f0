"""Which backend computes each kind of a model's expert layers on a card, and what that costs.

The model is built and packed on meta, as a memory plan has it; one that has adapters is asked as it
is. Backends and reasons are those of `experts/backend.py`, which is asked as a forward with LoRA
asks it; nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from ..detection.detect import detect
from ..experts.backend import FUSED, UNPACKED, Backend, choose_backend, read_call
from ..experts.forward import can_serve
from ..experts.lora_source import LoraFactors
from ..kernels.cards import Card
from ..layout import ExpertsModule, ModelLayout, name_pattern, unwrapped_name
from ..lora.names import base_model
from ..memory import meta_model
from ..memory.source import ModelSource
from ..packing import parametrize
from .report import LayerKind

OWN_FORWARD = "own forward"
LINEAR_LAYERS = "Linear layers"

COSTS = {
    OWN_FORWARD: (
        "A layer's dequantized weights are kept for backward: 1,441 MiB, not 114 MiB, and 1.4 "
        "times the time of a step without any LoRA on them (Qwen3-30B-A3B's layer, 4,096 tokens, "
        "H200: peer=bnb beside peer=ours of commit 88efafc in tools/bench/results/layer.csv)."
    ),
    "projection by projection": (
        "Two dequantized weights and a gate of their own, one after the other; how much slower "
        "that is than the fused layer was not measured."
    ),
    "reference loop": (
        "Expert by expert: on a GPU it waits for the device once a projection and starts some ten "
        "kernels an expert (tools/bench/NOTES.md); its time was not measured."
    ),
    "unpacked": "16-bit experts, and no LoRA of this package on them.",
}
"""By backend, what it costs beside the fused layer, and where that was measured."""

_TOKENS = 4096  # any number over 0: it decides nothing but within the fused layer


def layer_kinds(
    model: nn.Module, source: ModelSource, card: Card, rank: int
) -> tuple[LayerKind, ...]:
    """Return each kind of expert layer of a source's model, as it will be computed on a card."""
    meta = meta_model.pack(
        model,
        source.quantization,
        linears=source.linears,
        experts=source.experts,
        kept=source.kept,
    )
    return _count(meta.base, meta.layout, partial(_backend, card=card, rank=rank))


def adapted_kinds(model: nn.Module, card: Card) -> tuple[LayerKind, ...]:
    """Return the same of a model with adapters, for those that are active now."""
    base = base_model(model)
    return _count(base, detect(base), partial(_backend, card=card, rank=None))


def _count(
    model: nn.Module, layout: ModelLayout, backend: Callable[..., Backend]
) -> tuple[LayerKind, ...]:
    counted: dict[LayerKind, int] = {}
    for entry in layout.modules:
        kind = _kind(entry, backend(model.get_submodule(entry.name), entry))
        counted[kind] = counted.get(kind, 0) + 1
    for experts in layout.linear_experts:
        why = "experts are lists of Linear layers, which bitsandbytes packs and computes"
        kind = _row(name_pattern(experts.name), "nn.Linear", LINEAR_LAYERS, why, "")
        counted[kind] = counted.get(kind, 0) + 1
    return tuple(
        LayerKind(k.pattern, n, k.class_name, k.backend, k.reason, k.fast, k.cost)
        for k, n in counted.items()
    )


def _kind(entry: ExpertsModule, chosen: Backend) -> LayerKind:
    cost = COSTS.get(chosen.name, "")
    pattern = name_pattern(unwrapped_name(entry.name))
    return _row(pattern, entry.class_name, chosen.name, chosen.reason, cost)


def _row(pattern: str, class_name: str, name: str, reason: str, cost: str) -> LayerKind:
    fast = name in (FUSED.name, LINEAR_LAYERS)
    return LayerKind(pattern, 1, class_name, name, reason, fast, cost)


def _backend(module: nn.Module, entry: ExpertsModule, card: Card, rank: int | None) -> Backend:
    """Return what computes an experts module in training, with LoRA of this rank on all of it.

    None is the LoRA that it has.
    """
    names = [param.parameter_name for param in entry.parameters]
    if not any(parametrize.is_packed(module, name) for name in names):
        return UNPACKED
    if not can_serve(module):
        why = "the class does not compute through transformers' experts interface"
        return Backend(OWN_FORWARD, why)
    host: Any = module
    call = read_call(host, torch.empty(0))  # hidden states on meta have no autocast to ask for
    if rank is not None:
        first, second = (_factors(weight, rank) for weight in call.weights)
        call = call._replace(lora=(first, second))
    packed = next(name for name in names if parametrize.is_packed(module, name))
    device = parametrize.read_packed(module, packed).device
    return choose_backend(host, call._replace(x=_hidden_states(entry, device), card=card))


def _hidden_states(entry: ExpertsModule, device: torch.device) -> torch.Tensor:
    """Return `(tokens, hidden)`, in the dtype that the experts had before packing; no memory."""
    first, dtype = entry.parameters[0], getattr(torch, entry.parameters[0].dtype_name)
    return torch.empty((), dtype=dtype, device=device).expand(_TOKENS, first.in_features or 1)


def _factors(weight: Any, rank: int) -> tuple[LoraFactors, ...]:
    """Return an adapter's factors of a weight `(E, ...)` on meta, in float32 as PEFT's are."""
    if weight is None or len(weight.shape) != 3:  # not packed, or refused for its shape
        return ()
    experts, rows, columns = weight.shape
    a = torch.empty(experts * rank, columns, device="meta")
    return (LoraFactors(a, torch.empty(rows, rank * experts, device="meta"), 1.0),)
