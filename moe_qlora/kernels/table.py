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
from .expert_mm import ExpertMatmul, Kernel, Problem, validated
from .grouped_mm import decode
from .routing import Routing, Tiled, tabulate
from .weights import MX_BLOCK, MXFP4, NF4, TABLES, PackedWeight, WeightSpec


def _in_gluon() -> list[Kernel]:
    names = "quantized_mm_rs", "quantized_mm_hopper"
    try:
        modules = [importlib.import_module(f".{name}", __package__) for name in names]
    except (ImportError, AttributeError):
        return []
    return [module.KERNEL for module in modules]


KERNELS = [
    *_in_gluon(),
    quantized_mm.KERNEL,
    grouped_mm.ON_BLACKWELL,
    grouped_mm.BY_TORCH,
    grouped_mm.KERNEL,
]
"""In the order in which they are asked; the last supports everything."""


def choose(
    packed: PackedWeight,
    rows: int,
    dtype: torch.dtype,
    *,
    by_rows: bool,
    backward: bool = False,
    held: bool = False,
    reused: bool = False,
) -> ExpertMatmul:
    """Return the matmul of a weight, without LoRA; the arguments are those of `Problem`."""
    problem = Problem(packed.spec, dtype, rows, by_rows, backward, held, reused)
    for kernel in KERNELS:
        if held and kernel.on_codes:
            continue
        if kernel.supports(problem) and works(kernel, problem.spec):
            tile = kernel.tile(problem)
            return ExpertMatmul(packed, None, problem, kernel, tile, kernel.cut(problem, tile))
    raise AssertionError("the last row of the table supports everything")


def multiply(
    x: Tensor, matmul: ExpertMatmul, routing: Routing | Tiled, products: Tensor | None = None
) -> Tensor:
    """Return `(R, N)`: a product of all features by itself, outside of a layer."""
    whole = 0, matmul.problem.features
    operand = matmul.kernel.prepare(matmul, routing, whole, "first")
    return matmul.kernel.launch(x, matmul, operand, routing, whole, products)


def works(kernel: Kernel, spec: WeightSpec) -> bool:
    """Whether a kernel is right for such codes on their device; validates it at the first call."""
    kind = kernel.tried(spec)
    if kind is None:
        return True
    if spec.device == cards.META:
        return kernel.capable(cards.of_index(spec.device))
    key = kernel.name, kind, spec.device
    if key not in validated:
        device = cards.device_of(spec.device)
        if not kernel.capable(cards.actual(device)):
            validated[key] = False
        elif torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing():
            return False  # validated at a later call
        else:
            validated[key] = True  # until a launch fails
            right = is_right(kernel, device, kind)
            validated[key] &= right
    return validated[key]


def prepare(device: torch.device) -> None:
    """Validate the kernels for ordinary codes on a CUDA device now."""
    spec = WeightSpec((1, 64, 64), NF4, 64, 0, device.index or 0)
    for kernel in KERNELS:
        works(kernel, spec)


def is_right(kernel: Kernel, device: torch.device, kind: str) -> bool:
    """Whether a kernel's small random products are those of the decoded weights."""
    try:
        return all(
            _is_right(kernel, device, kind, tile, by_rows)
            for tile in kernel.tried_tiles
            for by_rows in ((True, False) if kernel.both_ways else (True,))
        )
    except Exception:  # noqa: BLE001 - this Triton does not compile it: another kernel runs
        return False


def _is_right(kernel: Kernel, device: torch.device, kind: str, tile: int, by_rows: bool) -> bool:
    generator = torch.Generator(device).manual_seed(0)
    # Several steps and blocks of features, the last one half full.
    shape = 2, 192, 256 if kernel.both_ways else 512
    packed = random_weight(shape, kind, device, generator)
    weight = torch.empty(shape, device=device, dtype=packed.dtype)
    decode(packed, weight)
    count, inner = 144, shape[2 if by_rows else 1]
    x = torch.randn(count, inner, device=device, generator=generator).to(packed.dtype)
    expert_offsets = torch.tensor([0, 5, count], device=device, dtype=torch.int32)
    problem = Problem(packed.spec, packed.dtype, count, by_rows)
    matmul = ExpertMatmul(packed, None, problem, kernel, tile, kernel.cut(problem, tile))
    rows = x if kernel.reorder is None else kernel.reorder(x)
    y = multiply(rows, matmul, tabulate(expert_offsets, 2, count, tile))
    operand = weight.transpose(1, 2) if by_rows else weight
    right = torch.cat([x[:5] @ operand[0], x[5:] @ operand[1]]).float()
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
