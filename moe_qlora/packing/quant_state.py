"""Converts between packed weights and bitsandbytes' `QuantState`, in this one place.

A `PackedWeight` holds plain tensors. Of a kind that bitsandbytes does not know, its `QuantState` is
only what holds and moves the tensors. bitsandbytes' own classes (`Params4bit`, its parametrization,
its state-dict keys) want a `QuantState`; both then share the same tensors.
"""

from __future__ import annotations

from typing import Any, cast

import bitsandbytes.functional
import torch
from torch import Tensor, nn

from ..kernels.weights import NestedAbsmax, PackedWeight

# bitsandbytes has no type annotations to check against.
QuantState: Any = cast(Any, bitsandbytes.functional).QuantState
_TRANSPOSED = "stored_transposed"


def from_quant_state(
    codes: Tensor,
    state: Any,
    compute_dtype: torch.dtype | None = None,
    owner: nn.Parameter | None = None,
) -> PackedWeight:
    """Return the packed weight of 4-bit codes and their `QuantState`; copies nothing."""
    nested = None
    if state.nested:
        inner = state.state2
        nested = NestedAbsmax(inner.code, inner.absmax, state.offset, inner.blocksize)
    return PackedWeight(
        codes, state.absmax, state.code, state.blocksize, nested, state.shape, state.quant_type,
        state.dtype, compute_dtype, owner, stored_transposed=bool(state.__dict__.get(_TRANSPOSED)),
    )  # fmt: skip


def to_quant_state(packed: PackedWeight) -> Any:
    """Return a `QuantState` of a 4-bit weight's statistics; copies nothing."""
    offset = inner = None
    if packed.nested is not None:
        table, absmax, offset, blocksize = packed.nested
        inner = QuantState(absmax=absmax, code=table, blocksize=blocksize, dtype=torch.float32)
    state = QuantState(
        absmax=packed.absmax,
        shape=torch.Size(packed.shape),
        code=packed.table,
        blocksize=packed.blocksize,
        quant_type=packed.kind,
        dtype=packed.dtype,
        offset=offset,
        state2=inner,
    )
    if packed.stored_transposed:
        setattr(state, _TRANSPOSED, True)
    return state


def state_tensors(state: Any) -> list[Tensor]:
    """Return every tensor of a `QuantState`, nested ones included."""
    tensors = [state.absmax, state.code]
    if state.nested:
        tensors += [state.offset, state.state2.absmax, state.state2.code]
    return [tensor for tensor in tensors if isinstance(tensor, Tensor)]
