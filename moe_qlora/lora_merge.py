"""Merging LoRA into packed experts: decoded + delta, expert by expert, plain or packed again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from . import codec, storage
from .codec import CodecSettings, PackedStack

if TYPE_CHECKING:
    from .lora import ParamWrapper


def merged_weight(
    wrapper: ParamWrapper, stack: PackedStack, adapters: list[str], dtype: torch.dtype | None = None
) -> Tensor:
    """decoded + sum of s B A, summed in fp32 and rounded once.

    Beside the result, one expert's decoded weight and delta are alive.

    Args:
        wrapper: Holds the adapters.
        stack: The packed weight without any of them.
        adapters: Which adapters to add.
        dtype: Of the result; None is the dtype that the packed weight had.

    Returns:
        `stack.shape`, on the stack's device.
    """
    out = torch.empty(stack.shape, dtype=dtype or stack.dtype, device=stack.device)
    wide = torch.promote_types(stack.dtype, torch.float32)
    with torch.no_grad():
        parts = []
        for name in adapters:
            a, b = wrapper.lora_A[name].weight, wrapper.lora_B[name].weight
            left, right = wrapper.factors(a.to(stack.device, wide), b.to(stack.device, wide))
            parts.append((left, right, wrapper.scaling[name]))
        if len(stack.shape) == 2:  # one matrix, whatever number of experts it stacks
            total = codec.unpack(stack).to(wide)
            for left, right, scaling in parts:
                total.addmm_(left[0], right[0], alpha=scaling)
            return out.copy_(total)
        for expert in range(stack.shape[0]):
            total = codec.unpack_range(stack, expert, expert + 1, dtype=wide)[0]
            for left, right, scaling in parts:
                total.addmm_(left[expert], right[expert], alpha=scaling)
            out[expert].copy_(total)
    return out


def all_finite(weight: Tensor) -> bool:
    """Whether no entry is NaN or inf; looks at one slice of the first dimension at a time."""
    return all(bool(torch.isfinite(part).all()) for part in weight)


def settings_of(stack: PackedStack) -> CodecSettings:
    """How this stack was packed, so that another weight can be packed the same way."""
    if stack.kind == "int8":
        return CodecSettings("int8", storage_dtype=torch.int8, compute_dtype=stack.compute_dtype)
    state: Any = stack.state
    return CodecSettings(
        stack.kind,
        double_quant=bool(state.nested),
        storage_dtype=stack.codes.dtype,
        compute_dtype=stack.compute_dtype,
        blocksize=state.blocksize,
    )


def put(module: nn.Module, name: str, weight: Tensor, like: PackedStack | None) -> None:
    """Replace a parameter, packed or plain, by `weight`: plain, or packed the way `like` was."""
    if storage.is_packed(module, name):
        storage.detach(module, name, weight)
    else:
        module._parameters[name] = nn.Parameter(weight, requires_grad=False)
    if like is not None:
        storage.attach(module, name, codec.pack(weight, settings_of(like)))


def restore(module: nn.Module, name: str, stack: PackedStack) -> None:
    """Put a packed weight back, on the device where the module's parameter is now."""
    if storage.is_packed(module, name):
        device = storage.read_packed(module, name).device
        storage.detach(module, name, torch.empty(0, device=device))
    else:
        device = module._parameters[name].device  # type: ignore[union-attr]
    if stack.device != device:
        stack.codes = stack.codes.to(device)
        stack.state.to(device)
        stack.owner = None
    storage.attach(module, name, stack)
