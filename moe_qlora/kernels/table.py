"""The table of kernels, and which of them computes a matmul: the first that supports it.

The kernels in Gluon, whose language changes with Triton's versions, and ways through a kernel that
few models take (`expert_mm.Kernel.tried`), are tried by small products, once for each device.
Where one is not right, or does not compile, the next row of the table serves.

`choose` looks into a file of cuts that were measured, and never measures: that waits for the
device, and a forward must not. `tune` fills the file, which takes seconds to minutes; there is one
for each device, Triton and torch, in Triton's cache folder (`TRITON_CACHE_DIR`, or below the user's
home). Every candidate's result is compared with the decoded product on fresh random rows before it
may be chosen; one that is off, or does not compile, is dropped.
"""

from __future__ import annotations

import importlib
import json
import math
import re
import tempfile
from collections.abc import Callable
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from . import cards, grouped_mm, quantized_mm
from .expert_mm import ExpertMatmul, Kernel, Problem, validated
from .factors import Factors
from .grouped_mm import decode
from .limits import supports_quantized
from .routing import Routing, Tiled, tabulate
from .weights import MX_BLOCK, MXFP4, NF4, TABLES, PackedWeight, WeightSpec


def _in_gluon() -> list[Kernel]:
    """Return the kernels in Gluon: none where this Triton has not the language that they know."""
    names = "quantized_mm_rs", "quantized_mm_hopper", "quantized_mm_skinny"
    try:
        modules = [importlib.import_module(f".{name}", __package__) for name in names]
    except (ImportError, AttributeError):
        return []
    return [module.KERNEL for module in modules]


KERNELS = [
    *_in_gluon(),
    quantized_mm.KERNEL,
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
            return _cut(packed, None, problem, kernel)
    raise AssertionError("the last row of the table supports everything")


def of_rows(matmul: ExpertMatmul, rows: int) -> ExpertMatmul:
    """Return a matmul of so many of the rows by the same kernel."""
    problem = matmul.problem._replace(rows=rows)
    return _cut(matmul.packed, matmul.factors, problem, matmul.kernel)


def _cut(
    packed: PackedWeight, factors: Factors | None, problem: Problem, kernel: Kernel
) -> ExpertMatmul:
    tile = kernel.tile(problem)
    found = tuned(problem, tile, kernel) if kernel.tuned and problem.spec.device >= 0 else None
    kernel, cut = found or (kernel, kernel.default(problem, tile))
    return ExpertMatmul(packed, factors, problem, kernel, tile, cut)


def multiply(
    x: Tensor, matmul: ExpertMatmul, routing: Routing | Tiled, products: Tensor | None = None
) -> Tensor:
    """Return `(R, N)`: a product of all features by itself, outside of a layer."""
    whole = 0, matmul.problem.features
    operand = matmul.kernel.prepare(matmul, routing, whole, "first")
    return matmul.kernel.launch(x, matmul, operand, routing, whole, products)


# What was tuned.


def key_of(problem: Problem, tile: int, section: str) -> str:
    """Return the key of a problem in tuned tables."""
    _, n, k = problem.spec.shape
    kind = problem.spec.kind if section == "codes" else section
    way, dtype = "out" if problem.by_rows else "back", str(problem.dtype).removeprefix("torch.")
    return f"{kind}-{n}x{k}-{way}-{dtype}-{tile}"


def tuned(problem: Problem, tile: int, chosen: Kernel) -> tuple[Kernel, Any] | None:
    """Return the kernel and cut that were quickest, None where the file has none that may run.

    They are of those that share the chosen kernel's `tuned`.
    """
    entry = read_tuned(problem.spec.device).get(key_of(problem, tile, chosen.tuned or ""))
    if entry is None:
        return None
    name, cut = entry
    kernel = next((k for k in KERNELS if k.name == name and k.tuned == chosen.tuned), None)
    return (kernel, cut) if kernel is not None and may_run(kernel, cut, problem, tile) else None


def may_run(kernel: Kernel, cut: Any, problem: Problem, tile: int) -> bool:
    """Whether a kernel may be used or measured with a cut."""
    if kernel.cuts == (None,):  # it is for what it supports alone
        return kernel.supports(problem) and works(kernel, problem.spec)
    return kernel.fits(cut, problem, tile)


def cache_file(device: torch.device) -> Path:
    """Return the path of a device's tuned table."""
    name = f"{torch.cuda.get_device_name(device)}-triton{triton.__version__}"
    name = re.sub(r"[^\w.]+", "-", f"{name}-torch{torch.__version__}")
    return Path(triton.knobs.cache.dir) / "moe_qlora" / f"kernels-{name}.json"


@cache
def read_tuned(index: int) -> dict[str, tuple[str, Any]]:
    """Return a CUDA device's tuned table: by key, the kernel's name and its cut."""
    try:
        read = json.loads(cache_file(torch.device("cuda", index)).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    # A file may be anybody's: what is no candidate of this version is not used.
    known = {json.dumps((k.name, cut)): (k.name, cut) for k in KERNELS if k.tuned for cut in k.cuts}
    entries = read.items() if isinstance(read, dict) else ()
    return {key: known[text] for key, value in entries if (text := json.dumps(value)) in known}


# What works.


def works(kernel: Kernel, spec: WeightSpec) -> bool:
    """Whether a kernel is right for such codes on their device: found out, and waited for, once."""
    kind = kernel.tried(spec)
    if kind is None:
        return True
    key = kernel.name, kind, spec.device
    if key not in validated:
        device = cards.device_of(spec.device)
        if not kernel.capable(cards.actual(device)):
            validated[key] = False
        elif torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing():
            return False  # the next call finds out
        else:
            validated[key] = True  # unless a launch, which then goes on without, says otherwise
            right = is_right(kernel, device, kind)
            validated[key] &= right
    return validated[key]


def prepare(device: torch.device) -> None:
    """Find out now which kernels work for ordinary codes on a CUDA device."""
    spec = WeightSpec((1, 64, 64), NF4, 64, 0, device.index or 0)
    for kernel in KERNELS:
        works(kernel, spec)


def is_right_untested(device: torch.device) -> bool:
    """Whether small products are right on a device that no test has seen, of few rows and many."""
    return is_right(quantized_mm.KERNEL, device, NF4)


def is_right(kernel: Kernel, device: torch.device, kind: str) -> bool:
    """Whether a kernel's small random products are those of the decoded weights."""
    try:
        return all(
            _is_right(kernel, device, kind, tile, by_rows)
            for tile in kernel.tried_tiles
            for by_rows in ((True, False) if kernel.both_ways else (True,))
        )
    except Exception:  # noqa: BLE001 - what this Triton does not know is decoded, or done plainly
        return False


def _is_right(kernel: Kernel, device: torch.device, kind: str, tile: int, by_rows: bool) -> bool:
    generator = torch.Generator(device).manual_seed(0)
    # Several steps and blocks of features, the last one half full.
    shape = 2, 192, 256 if kernel.both_ways else 512
    packed = _random_weight(shape, kind, device, generator)
    weight = torch.empty(shape, device=device, dtype=packed.dtype)
    decode(packed, weight)
    count, inner = 144, shape[2 if by_rows else 1]
    x = torch.randn(count, inner, device=device, generator=generator).to(packed.dtype)
    expert_offsets = torch.tensor([0, 5, count], device=device, dtype=torch.int32)
    problem = Problem(packed.spec, packed.dtype, count, by_rows)
    matmul = ExpertMatmul(packed, None, problem, kernel, tile, kernel.default(problem, tile))
    rows = x if kernel.reorder is None else kernel.reorder(x)
    y = multiply(rows, matmul, tabulate(expert_offsets, 2, count, tile))
    operand = weight.transpose(1, 2) if by_rows else weight
    right = torch.cat([x[:5] @ operand[0], x[5:] @ operand[1]]).float()
    return bool((y.float() - right).norm() < 4e-3 * right.norm())


def _random_weight(
    shape: tuple[int, int, int], kind: str, device: torch.device, generator: torch.Generator
) -> PackedWeight:
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


# Measuring.

_TOLERANCE = 6e-3
"""Largest relative error against the decoded product in 16 bit, whose own rounding is 3e-3."""

_MANY = 128
"""Rows in a tile, of those for which the grouped matmul is measured."""


def can_tune(packed: PackedWeight) -> bool:
    """Whether there is something to measure for a weight."""
    return packed.dequantizes() and supports_quantized(packed.spec.shape[2], packed.blocksize)


def candidates(section: str) -> list[tuple[Kernel, Any]]:
    """Return the kernels and cuts that are measured against each other."""
    return [(k, cut) for k in KERNELS if k.tuned == section for cut in k.cuts]


def tune(
    packed: PackedWeight, dtype: torch.dtype, tiles: tuple[int, ...] = (16, 32, 64, 128)
) -> dict[tuple[int, bool], tuple[str, Any]]:
    """Measure every candidate for weights of this shape and kind; remember the quickest.

    Return what was chosen, a kernel's name and its cut, for each of `tiles` (rows in a tile, from
    16 for few tokens an expert to 128 for many), out (False) and back (True). Where `grouped_mm.py`
    multiplies what is dequantized, its cuts are measured too.
    """
    known = read_tuned(packed.device.index or 0)
    if not cards.multiplies_by_torch(packed.device, dtype):
        for back in (False, True):
            cut = _quickest_cut(packed, dtype, back)
            if cut is not None:
                key = key_of(_problem(packed, dtype, _MANY, back), _MANY, "grouped")
                known[key] = grouped_mm.KERNEL.name, cut
    picked: dict[tuple[int, bool], tuple[str, Any]] = {}
    for tile, back in product(tiles, (False, True)):
        problem = _problem(packed, dtype, tile, back)
        rows = _rows(packed, problem, tile)
        times = {
            (kernel.name, cut): elapsed
            for kernel, cut in candidates("codes")
            if (elapsed := _try(rows, packed, problem, tile, kernel, cut)) is not None
        }
        if times:
            best = min(times, key=lambda candidate: times[candidate])
            picked[tile, back] = known[key_of(problem, tile, "codes")] = best
    _store(cache_file(packed.device), known)
    return picked


def _problem(packed: PackedWeight, dtype: torch.dtype, tile: int, back: bool) -> Problem:
    """Return a problem whose rows go in such tiles."""
    return Problem(packed.spec, dtype, packed.experts * tile * 5 // 8, not back)


def _quickest_cut(packed: PackedWeight, dtype: torch.dtype, back: bool) -> grouped_mm.Cut | None:
    """Return the quickest cut for random matrices of the weight's shape, None where none is right.

    They are of a few experts with four tiles of rows each, the last of them not full.
    """
    experts, device = min(packed.experts, 8), packed.device
    _, n, k = packed.spec.shape
    weight = torch.randn(experts, n, k, device=device, dtype=dtype)
    matrices = weight if back else weight.transpose(1, 2)
    each = 4 * _MANY - _MANY // 4
    x = torch.randn(experts * each, matrices.shape[1], device=device, dtype=dtype)
    starts = torch.arange(experts + 1, device=device, dtype=torch.int32) * each
    within = torch.arange(4, device=device, dtype=torch.int32) * _MANY
    first = (starts[:-1, None] + within).flatten()
    tiles = torch.stack([first // each, first], 1).contiguous()
    right = torch.bmm(x.view(experts, each, -1).float(), matrices.float()).flatten(0, 1)
    times = {}
    for cut in grouped_mm.CANDIDATES:
        if not grouped_mm.fits(cut, _MANY, cards.card(device)):
            continue
        run = partial(grouped_mm.launch, x, matrices, starts, tiles, _MANY, cut)
        elapsed = _elapsed(run, lambda y: (y.float() - right).norm() < _TOLERANCE * right.norm())
        if elapsed is not None:
            times[cut] = elapsed
    return min(times, key=lambda cut: times[cut]) if times else None


def _store(path: Path, known: dict[str, tuple[str, Any]]) -> None:
    """Replace the file as a whole; without a place to write, the table lives for this process."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, delete=False, encoding="utf-8"
        ) as file:
            json.dump(known, file, indent=0, sort_keys=True)
        Path(file.name).replace(path)
    except OSError:
        return


def _rows(packed: PackedWeight, problem: Problem, tile: int) -> tuple[Tensor, Tiled]:
    """Return random rows, three quarters of a tile for each expert, and where they lie."""
    experts, device, each = packed.experts, packed.device, tile * 3 // 4
    x = torch.randn(experts * each, problem.inner, device=device, dtype=problem.dtype)
    offsets = torch.arange(experts + 1, device=device, dtype=torch.int32) * each
    return x, tabulate(offsets, experts, len(x), tile)


def _try(
    rows: tuple[Tensor, Tiled], packed: PackedWeight, problem: Problem, tile: int, kernel: Kernel,
    cut: Any,
) -> float | None:  # fmt: skip
    """Return the median milliseconds on random rows, None where the result is wrong or none."""
    x, tiled = rows
    across = 0 if cut is None else cut.step if problem.by_rows else cut.features
    if across > 2 * max(packed.blocksize, 64):
        return None  # the portable kernel takes one or two blocks of a row at a time
    if not may_run(kernel, cut, problem, tile):
        return None
    matmul = ExpertMatmul(packed, None, problem, kernel, tile, cut)
    run = partial(multiply, x, matmul, tiled)
    return _elapsed(run, lambda y: _matches(x, y, packed, tiled.expert_offsets, problem.by_rows))


def _elapsed(run: Callable[[], Tensor], is_right: Callable[[Tensor], Any]) -> float | None:
    """Return the median milliseconds of a product, None where it is wrong or does not run."""
    try:
        y = run()
    except (triton.compiler.errors.CompilationError, triton.runtime.errors.OutOfResources,
            RuntimeError):  # fmt: skip
        return None
    if not is_right(y):
        return None
    times = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[2]


def _matches(
    x: Tensor, y: Tensor, packed: PackedWeight, expert_offsets: Tensor, by_rows: bool
) -> bool:
    """Compare the first, a middle and the last expert with their decoded product."""
    experts, n, k = packed.spec.shape
    each = x.shape[0] // experts
    for expert in {0, experts // 2, experts - 1}:
        weight = torch.empty(1, n, k, device=x.device, dtype=x.dtype)
        decode(packed, weight, first=expert)
        rows = slice(expert * each, (expert + 1) * each)
        right = (x[rows] @ (weight[0].t() if by_rows else weight[0])).float()
        error = (y[rows].float() - right).norm() / right.norm()
        if not bool(error < _TOLERANCE):
            return False
    return True
