"""Random MXFP4 weights, and a decode of them that shares nothing with the package."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from moe_qlora.checkpoint.folder import INDEX
from moe_qlora.kernels.weights import MX_BLOCK, PackedWeight
from moe_qlora.packing.mxfp4 import KeptPacker
from moe_qlora.packing.settings import CodecSettings

from .prequantized import write_both


def random_mxfp4(*shape: int, seed: int = 0, spread: int = 4) -> tuple[Tensor, Tensor]:
    """Return blocks `(..., cols / 32, 16)` and scales `(..., cols / 32)` of a matrix `(..., cols)`.

    Every code occurs, and scales of `spread` powers of two around 1 / 32.
    """
    generator = torch.Generator().manual_seed(seed)
    grid = (*shape[:-1], shape[-1] // 32)
    blocks = torch.randint(256, (*grid, 16), generator=generator, dtype=torch.uint8)
    low = 122 - spread // 2
    scales = torch.randint(low, low + spread, grid, generator=generator, dtype=torch.uint8)
    return blocks, scales


def slow_decode(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the fp32 matrix `(..., cols)` by the definition of E2M1 and e8m0, bit by bit."""
    codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2).double()
    sign, rest = 1 - 2 * (codes // 8), codes % 8
    exponent, mantissa = rest // 2, rest % 2
    normal = (1 + mantissa / 2) * 2 ** (exponent - 1)
    value = sign * torch.where(exponent == 0, mantissa / 2, normal)
    return (value * 2.0 ** (scales.double()[..., None] - 127)).flatten(-2).float()


def mxfp4_weight(
    *stored_shape: int, seed: int = 0, transposed: bool = False, dtype: torch.dtype = torch.float32
) -> PackedWeight:
    """Return a packed weight of random codes; where `transposed`, its decoded matrices are."""
    blocks, scales = random_mxfp4(*stored_shape, seed=seed)
    return keep(blocks, scales, transposed=transposed, dtype=dtype)


def keep(
    blocks: Tensor, scales: Tensor, *, transposed: bool, dtype: torch.dtype = torch.float32
) -> PackedWeight:
    """Return the packed weight of blocks and scales."""
    *lead, rows, cols = *scales.shape[:-1], scales.shape[-1] * 32
    shape = (*lead, cols, rows) if transposed else (*lead, rows, cols)
    settings = CodecSettings("mxfp4", stored_transposed=transposed)
    packer = KeptPacker(shape, dtype, "cpu", settings)
    packer.add(blocks, scales)
    return packer.finish()


def expert_keys(keys: Iterable[str]) -> list[str]:
    return [key for key in keys if key.endswith(("experts.gate_up_proj", "experts.down_proj"))]


def write_gpt_oss(root: Path, **sizes: int) -> None:
    """Write `maker`, a folder as gpt-oss is shipped, and `plain`, the bf16 one it stands for."""
    folder = write_both(root, "gpt_oss mxfp4", overrides=sizes, shards=1) / "maker"
    (folder / "model-00001-of-00001.safetensors").rename(folder / "model.safetensors")
    (folder / INDEX).unlink()


def mxfp4_blocks(packed: PackedWeight) -> tuple[Tensor, Tensor]:
    """Return an MXFP4 weight's blocks and scales as its checkpoint had them."""
    *lead, rows, cols = packed.stored_shape
    codes = packed.flat_codes
    blocks = ((codes << 4) | (codes >> 4)).view(*lead, rows, cols // MX_BLOCK, MX_BLOCK // 2)
    return blocks, packed.absmax.view(*lead, rows, cols // MX_BLOCK)
