"""Random MXFP4 weights, and a decode of them that shares nothing with the package."""

import torch
from torch import Tensor

from moe_qlora.kernels.weights import PackedWeight
from moe_qlora.packing.mxfp4 import KeptPacker
from moe_qlora.packing.settings import CodecSettings


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


def keep(
    blocks: Tensor, scales: Tensor, *, transposed: bool, dtype: torch.dtype = torch.float32
) -> PackedWeight:
    """Return the packed weight; where `transposed`, its decoded matrices are."""
    *lead, rows, cols = *scales.shape[:-1], scales.shape[-1] * 32
    shape = (*lead, cols, rows) if transposed else (*lead, rows, cols)
    settings = CodecSettings("mxfp4", stored_transposed=transposed)
    packer = KeptPacker(shape, dtype, "cpu", settings)
    packer.add(blocks, scales)
    return packer.finish()
