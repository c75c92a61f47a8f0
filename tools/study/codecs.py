"""Storing a model's experts in each of the codecs that are compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import moe_qlora
from moe_qlora.experts import forward
from moe_qlora.packing import parametrize
from moe_qlora.packing.mxfp4 import KeptPacker
from moe_qlora.packing.settings import CodecSettings

from .grid import CODECS

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BLOCK = 32


def load(folder: Path, codec: str, device: torch.device) -> Any:
    """Load a base in bf16 (fp32 on the CPU) and pack its experts; "bf16" leaves them as they are.

    "nf4+attention" packs the Linear layers of attention as well, while loading.
    """
    from transformers import AutoModelForCausalLM

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if codec == "nf4+attention":
        with moe_qlora.enabled():
            return AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, quantization_config=bnb_config("nf4", dtype),
                device_map={"": device.index or 0} if device.type == "cuda" else None,
            )  # fmt: skip
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device)
    return pack(model, codec)


def pack(model: Any, codec: str) -> Any:
    """Pack a model's experts, in place."""
    from .train import prepare

    dtype = next(model.parameters()).dtype
    if codec == "bf16":
        return prepare(model)
    if codec == "mxfp4":
        return pack_mxfp4(model, dtype)
    moe_qlora.quantize_experts(model, bnb_config(codec, dtype))
    return model


def bnb_config(codec: str, dtype: torch.dtype) -> Any:
    """Return the `BitsAndBytesConfig` of a codec."""
    from transformers import BitsAndBytesConfig

    if codec.partition("-")[0] not in ("int8", "nf4", "fp4"):
        raise ValueError(f"codec is {codec!r}, which is none of {', '.join(CODECS)}")
    if codec == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="fp4" if codec == "fp4" else "nf4",
        bnb_4bit_use_double_quant=codec == "nf4-dq",
        bnb_4bit_compute_dtype=dtype,
    )


def pack_mxfp4(model: Any, compute_dtype: torch.dtype) -> Any:
    """Round a model's experts to MXFP4, and pack these codes as those of a checkpoint are kept."""
    settings = CodecSettings("mxfp4", compute_dtype=compute_dtype)
    layout = moe_qlora.detect(model)
    for param in layout:
        module = model.get_submodule(param.module_name)
        weight = getattr(module, param.parameter_name).detach()
        blocks, scales = to_mxfp4(weight)
        packer = KeptPacker(weight.shape, weight.dtype, weight.device, settings)
        packer.add(blocks, scales)
        parametrize.attach(module, param.parameter_name, packer.finish())
    forward.activate(model, [module.name for module in layout.modules])
    return model


def to_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round `(..., cols)` to MXFP4: blocks `(..., cols / 32, 16)`, scales `(..., cols / 32)`.

    As the OCP specification has it: the scale of a block is the power of two of its largest weight,
    less 2; numbers go to the nearest code, ties to the even one, and stop at 6.
    """
    parts = weight.detach().float().unflatten(-1, (-1, _BLOCK))
    largest = parts.abs().amax(-1).clamp(min=2.0**-120)
    exponent = (torch.frexp(largest).exponent - 1 - 2).clamp(-127, 127)
    scaled = (parts.abs() * torch.exp2(-exponent.float())[..., None]).clamp(max=6.0)
    table = torch.tensor(_E2M1, device=weight.device)
    upper = torch.searchsorted(table, scaled.contiguous()).clamp(1, 7)
    low, high = table[upper - 1], table[upper]
    middle = (low + high) / 2
    down = (scaled < middle) | ((scaled == middle) & ((upper - 1) % 2 == 0))
    codes = torch.where(down, upper - 1, upper).to(torch.uint8)
    codes = codes | (torch.signbit(parts).to(torch.uint8) << 3)
    blocks = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return blocks, (exponent + 127).to(torch.uint8)
