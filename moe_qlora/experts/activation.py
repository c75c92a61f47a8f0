"""Finds which gate an experts module computes, by trying it: no name says what one does."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_GATE = "_moe_qlora_gate"


def find_gate(module: Any) -> tuple[Any, ...] | None:
    """Return the fields of `row_kernels.Gate` that compute the module's gate; None if none do.

    The gate is tried once, on the CPU in fp64, against every combination of the activations that
    the kernels know and the numbers that the module has. The result is kept on the module.
    """
    if torch.compiler.is_compiling():
        return module.__dict__.get(_GATE)
    if _GATE not in module.__dict__:
        module.__dict__[_GATE] = _find_gate(module)
    return module.__dict__[_GATE]


@torch.no_grad()
def _find_gate(module: Any) -> tuple[Any, ...] | None:
    gated = bool(module.has_gate)
    gate = module._apply_gate if gated else module.act_fn
    numbers = sorted({
        float(value) for value in vars(module).values()
        if isinstance(value, float) and math.isfinite(value) and value > 0
    })  # fmt: skip
    spread = max([3.0, *(3 * n for n in numbers if n < 100)])
    probe = torch.linspace(-spread, spread, 4 * 257, dtype=torch.float64)
    probe = probe[torch.randperm(len(probe), generator=torch.Generator().manual_seed(0))]
    probe = probe.view(4, -1)[:, :256].contiguous()
    try:
        expected = gate(probe.clone())
    except Exception:  # noqa: BLE001 - whatever it is, the module's own gate stays in use
        return None
    limits = [None, *numbers] if gated else [None]
    combinations = product(
        ("silu", "gelu_tanh", "gelu", "relu", "relu2"),
        (False, True) if gated else (False,),
        limits,
        [1.0, *(n for n in numbers if n != 1.0)],
        (0.0, 1.0) if gated else (0.0,),
    )
    for act, interleaved, limit, alpha, shift in combinations:
        if act != "silu" and alpha != 1.0:
            continue
        fields = (act, gated, interleaved, limit, alpha, shift)
        out = plain_gate(probe, *fields)
        if expected.shape == out.shape and torch.allclose(expected, out, rtol=1e-6, atol=1e-9):
            return fields
    return None


def plain_gate(pre: Tensor, *fields: Any) -> Tensor:
    """Compute what the kernels do for a `Gate` of these fields: `(R, P)` -> `(R, I)`."""
    act, gated, interleaved, limit, alpha, shift = fields
    acts = {
        "silu": lambda z: z * torch.sigmoid(alpha * z),
        "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
        "gelu": F.gelu,
        "relu": F.relu,
        "relu2": lambda z: F.relu(z).square(),
    }
    if not gated:
        return acts[act](pre)
    gate, up = (pre[..., ::2], pre[..., 1::2]) if interleaved else pre.chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + shift) * acts[act](gate)
