"""Whether the quantized matmul's kernels work on a device: found out by small products, once.

The language of the kernels in Gluon changes with Triton's versions, and int8 and MXFP4 codes are
ways of their own through a kernel. Where one is not right, or does not compile, the portable kernel
or dequantizing serve.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import product

import torch

from . import cards, quantized_mm
from .dequantize import decode
from .limits import FEW_TILE, WIDEST_TILE
from .quantized_config import FEW, HOPPER, REGISTERS, Config, default
from .quantized_mm import supports
from .weights import MX_BLOCK, TABLES, PackedWeight, WeightSpec


def takes_int8(device: torch.device) -> bool:
    """Whether int8 codes are multiplied rightly there: found out, and waited for, once.

    Where they are not, they are dequantized at any number of rows.
    """
    if device.type != "cuda":
        return True
    key = "int8", device.index or 0
    if key not in quantized_mm.works:
        if torch.cuda.is_current_stream_capturing():
            return False  # the next call finds out
        quantized_mm.works[key] = _portable_is_right(device, "int8")
    return quantized_mm.works[key]


def is_right_untested(device: torch.device) -> bool:
    """Whether small products are right on a device that no test has seen, of few rows and many."""
    return _portable_is_right(device, "nf4")


def _portable_is_right(device: torch.device, kind: str) -> bool:
    """Whether the portable kernel is right, as it is cut untuned for few rows and for many."""
    ways = product((16, 128), (False, True))
    configs = {(tile, default(tile, device, back=back)) for tile, back in ways}
    return all(_is_right(device, kind, *pair) for pair in configs)


def on_hopper(spec: WeightSpec, dtype: torch.dtype, *, back: bool) -> bool:
    """Whether the kernel for Hopper can compute this product; False before `prepare`."""
    works = _works(HOPPER, spec) and cards.allows_hopper()
    works = works and _supports_hopper(spec, dtype, back)
    return works and (spec.blocksize != MX_BLOCK or _takes_mxfp4(spec.device))


def in_registers(spec: WeightSpec, dtype: torch.dtype, *, back: bool) -> bool:
    """Whether Hopper's kernel with weights in registers can compute this product."""
    works = not back and _works(REGISTERS, spec) and cards.allows_hopper()
    return works and _supports_registers(spec, dtype)


def multiplies_few(spec: WeightSpec, dtype: torch.dtype, tile: int, *, back: bool) -> bool:
    """Whether the kernel for few rows can compute this product; False before `prepare`."""
    works = tile == FEW_TILE and not back and _works(FEW, spec)
    return works and _supports_registers(spec, dtype)


def _works(config: Config, spec: WeightSpec) -> bool:
    return quantized_mm.works.get((config.own, spec.device), False)


@lru_cache(maxsize=256)
def _supports_registers(spec: WeightSpec, dtype: torch.dtype) -> bool:
    from . import register_weights

    return supports(spec) and register_weights.supports(spec, dtype)


def _takes_mxfp4(index: int) -> bool:
    """Whether the kernel for Hopper multiplies blocks of 32: found out, and waited for, once."""
    key = "mxfp4", index
    if key not in quantized_mm.works:
        if torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing():
            return False  # the next call finds out
        device = torch.device("cuda", index)
        quantized_mm.works[key] = True  # unless a launch says otherwise
        right = all(_is_right(device, "mxfp4", tile, HOPPER) for tile in (64, 128))
        quantized_mm.works[key] &= right
    return quantized_mm.works[key]


@lru_cache(maxsize=256)
def _supports_hopper(spec: WeightSpec, dtype: torch.dtype, back: bool) -> bool:
    from . import quantized_mm_hopper

    return supports(spec) and quantized_mm_hopper.supports(spec, dtype, back=back)


def prepare(device: torch.device) -> None:
    """Find out, and wait for it, once whether kernels in Gluon work: their language changes."""
    index = device.index or 0
    if (HOPPER.own, index) in quantized_mm.works:
        return
    card = cards.actual(device)
    hopper = card.capability == cards.HOPPER
    for config, tile, capable in (
        (HOPPER, 128, hopper),
        (REGISTERS, WIDEST_TILE, hopper),
        (FEW, FEW_TILE, card.maker == "nvidia" and card.capability >= (8, 0)),
    ):
        # Unless a launch, which then goes on without, says otherwise.
        quantized_mm.works[config.own, index] = capable
        right = capable and _is_right(device, "nf4", tile, config)
        quantized_mm.works[config.own, index] &= right


def _is_right(device: torch.device, kind: str, tile: int, config: Config) -> bool:
    """Whether small random products of both directions are those of the decoded weights."""
    generator = torch.Generator(device).manual_seed(0)
    # Several steps and blocks of features, the last one half full.
    forward_alone = config in (REGISTERS, FEW)
    shape = 2, 192, 512 if forward_alone else 256
    numel = math.prod(shape)
    codes = torch.randint(256, (numel,), device=device, generator=generator).to(torch.uint8)
    blocksize = MX_BLOCK if kind == "mxfp4" else 64
    absmax = torch.rand(numel // blocksize, device=device, generator=generator)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if kind == "int8":
        codes, absmax = codes.view(torch.int8), absmax[:384].clone()
        packed = PackedWeight(codes, absmax, None, 0, None, shape, kind, dtype)
    else:
        codes, table = codes[: numel // 2].clone(), torch.tensor(TABLES[kind], device=device)
        packed = PackedWeight(codes, absmax, table, blocksize, None, shape, kind, dtype)
    full_rows = torch.randn(144, shape[2], device=device, generator=generator).to(dtype)
    expert_offsets = torch.tensor([0, 5, 144], device=device, dtype=torch.int32)
    cut = [[0, 0], *([1, first] for first in range(5, 144, tile))]
    tiles = torch.tensor(cut, device=device, dtype=torch.int32)
    weight = torch.empty(shape, device=device, dtype=dtype)
    decode(packed, weight)
    try:
        for back in (False,) if forward_alone else (False, True):
            x = full_rows[:, : shape[1 if back else 2]].contiguous()
            span = 0, shape[2 if back else 1]
            rows = x
            if config == REGISTERS:
                from .quantized_mm_registers import reorder

                rows = reorder(x)
            y = quantized_mm.launch(
                rows, packed, None, None, expert_offsets, tiles, tile, config, back=back, span=span
            )
            operand = weight if back else weight.transpose(1, 2)
            right = torch.cat([x[:5] @ operand[0], x[5:] @ operand[1]]).float()
            if not (y.float() - right).norm() < 4e-3 * right.norm():
                return False
    except Exception:  # noqa: BLE001 - what this Triton does not know is decoded, or done plainly
        return False
    return True
