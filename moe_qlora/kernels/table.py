"""The table of kernels; a matmul uses the first that supports it.

Kernels in Gluon, whose language changes with Triton's versions, and rarely used branches of kernels
(`expert_mm.Kernel.tried`) are validated by small products, once for each device. Where one is
wrong, or does not compile, the next row of the table is used.

How a kernel is cut follows from the card and the shape, and nothing is measured: a table of the
quickest cuts, measured on an H100, was within the noise of these after five minutes of measuring
(tools/bench/NOTES.md).
"""

from __future__ import annotations

import importlib
import math

import torch
from torch import Tensor

from . import cards, grouped_mm, quantized_mm
from .expert_mm import Kernel, Matmul, validated
from .factors import Factors
from .routing import Routing, Tiled, route
from .weights import MX_BLOCK, MXFP4, NF4, TABLES, PackedWeight, WeightSpec


def _in_gluon() -> list[Kernel]:
    names = "quantized_mm_rs", "quantized_mm_hopper"
    try:
        modules = [importlib.import_module(f".{name}", __package__) for name in names]
    except (ImportError, AttributeError):
        return []
    return [module.KERNEL for module in modules]


KERNELS = [*_in_gluon(), quantized_mm.KERNEL, grouped_mm.BY_TORCH, grouped_mm.KERNEL]
"""In the order in which they are asked; the last supports everything."""


def choose(matmul: Matmul) -> Matmul:
    """Return the matmul with its kernel."""
    for kernel in KERNELS:
        if matmul.held and kernel.on_codes:
            continue
        if kernel.supports(matmul) and works(kernel, matmul.spec):
            tile = kernel.tile(matmul)
            return matmul._replace(kernel=kernel, tile=tile, cut=kernel.cut(matmul, tile))
    raise AssertionError("the last row of the table supports everything")


def multiply(
    x: Tensor, matmul: Matmul, routing: Routing | Tiled, products: Tensor | None = None
) -> Tensor:
    """Return `(R, N)`: a product of all features by itself, outside of a layer."""
    whole = 0, matmul.features
    operand = matmul.kernel.prepare(matmul, routing, whole, "first")
    y: Tensor = matmul.kernel.launch(x, matmul, operand, routing, whole, products)
    return y


def works(kernel: Kernel, spec: WeightSpec) -> bool:
    """Whether a kernel is right for such codes on their device; validates it at the first call."""
    kind = kernel.tried(spec)
    if kernel.hopper and cards.of_index(spec.device).capability != cards.HOPPER:
        return False
    if kind is None or spec.device == cards.META:
        return True
    key = kernel.name, kind, spec.device
    if key not in validated:
        if torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing():
            return False  # validated at a later call
        validated[key] = is_right(kernel, cards.device_of(spec.device), kind)
    return validated[key]


def prepare(device: torch.device) -> None:
    """Validate the kernels for ordinary codes on a CUDA device now."""
    spec = WeightSpec((1, 64, 64), NF4, 64, 0, device.index or 0)
    for kernel in KERNELS:
        works(kernel, spec)


def is_right(kernel: Kernel, device: torch.device, kind: str) -> bool:
    """Whether a kernel's small random products are those of the decoded weights.

    Those of few rows and of many, and in the directions, that it supports.
    """
    # Several steps and blocks of features, the last one half full.
    packed = random_weight((2, 192, 512), kind, device, torch.Generator(device).manual_seed(0))
    asked = [
        Matmul(packed, packed.dtype, rows, by_rows)
        for rows in (20, 300)
        for by_rows in (True, False)
    ]
    tried = [matmul for matmul in asked if kernel.supports(matmul)]
    try:
        return bool(tried) and all(_is_right(kernel, matmul) for matmul in tried)
    except Exception:  # noqa: BLE001 - this Triton does not compile it: another kernel runs
        return False


def _is_right(kernel: Kernel, matmul: Matmul) -> bool:
    """Whether a product of tokens, with LoRA, is right."""
    packed, count, inner, out = matmul.packed, matmul.rows, matmul.inner, matmul.features
    generator = torch.Generator(packed.device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        values = torch.randn(shape, device=packed.device, generator=generator)
        return values.to(packed.dtype)

    x, products, factor = random(count, inner), random(count, 16), random(2, out, 16)
    routing = route((torch.arange(count, device=packed.device) >= 5).long()[:, None], 2)
    tile = kernel.tile(matmul)
    matmul = matmul._replace(
        kernel=kernel, tile=tile, cut=kernel.cut(matmul, tile),
        factors=Factors(factor[..., :0].transpose(1, 2), factor, 1.0),
    )  # fmt: skip
    ordered = x if kernel.reorder is None else kernel.reorder(x)
    y = multiply(ordered, matmul, routing, products.flatten())
    weight = torch.empty(packed.shape, device=packed.device, dtype=packed.dtype)
    grouped_mm.decode(packed, weight)
    weight = torch.cat([weight.transpose(1, 2) if matmul.by_rows else weight, factor.mT], 1)
    read = torch.cat([x, products], 1)
    right = torch.cat([read[:5] @ weight[0], read[5:] @ weight[1]]).float()
    return bool((y.float() - right).norm() < 4e-3 * right.norm())


def random_weight(
    shape: tuple[int, int, int], kind: str, device: torch.device, generator: torch.Generator
) -> PackedWeight:
    """Return a packed weight of random codes, in bf16 on CUDA, else in fp32."""
    numel = math.prod(shape)
    codes = torch.randint(256, (numel,), device=device, generator=generator).to(torch.uint8)
    blocksize = {MXFP4: MX_BLOCK}.get(kind, 64)
    absmax = torch.rand(numel // blocksize, device=device, generator=generator)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if kind not in TABLES:
        codes, absmax = codes.view(torch.int8), absmax[: shape[0] * shape[1]].clone()
        return PackedWeight(codes, absmax, None, 0, None, shape, kind, dtype)
    codes, table = codes[: numel // 2].clone(), torch.tensor(TABLES[kind], device=device)
    return PackedWeight(codes, absmax, table, blocksize, None, shape, kind, dtype)
