"""Finds the quickest way to cut the matmuls' kernels, once for each device and version.

`expert_mm.py` asks `chosen` and `chosen_cut`, which look into a table and never measure: a
measurement waits for the device, and a forward must not. The table is filled by `tune`, which takes
seconds to minutes, and kept in Triton's cache folder (`TRITON_CACHE_DIR`, or below the user's
home), one file for each device, Triton and torch (`cache_file`). Every configuration's result is
compared with the decoded product on fresh random rows before it may be chosen; one that is off, or
does not compile, is dropped.
"""

from __future__ import annotations

import json
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

from . import cards, dequantize, grouped_mm
from .grouped_mm import Cut
from .quantized_check import multiplies_few, on_hopper
from .quantized_config import FEW, HOPPER, Config, default, fits
from .quantized_mm import launch
from .weights import PackedWeight

_TOLERANCE = 6e-3
"""Largest relative error against the decoded product in 16 bit, whose own rounding is 3e-3."""

_CANDIDATES = (
    HOPPER,
    FEW,
    *(
        Config(features, step, stages, warps, direct)
        for features, step, stages, warps, direct in product(
            (64, 128, 256), (64, 128), (3, 4), (4, 8), (True, False)
        )
        if features * step <= 256 * 64 and (warps == 4 or features >= 128)
    ),
)

_GROUPED = "grouped"
"""What keys of the grouped matmul begin with, in place of a kind of codes."""

_MANY = 128
"""Rows in a tile, of those for which the grouped matmul is measured."""


def _key(
    packed: PackedWeight, dtype: torch.dtype, tile: int, back: bool, kind: str | None = None
) -> str:
    _, n, k = packed.spec.shape
    way = "back" if back else "out"
    return f"{kind or packed.kind}-{n}x{k}-{way}-{str(dtype).removeprefix('torch.')}-{tile}"


def cache_file(device: torch.device) -> Path:
    """Return the path of this device's table."""
    name = f"{torch.cuda.get_device_name(device)}-triton{triton.__version__}"
    name = re.sub(r"[^\w.]+", "-", f"{name}-torch{torch.__version__}")
    return Path(triton.knobs.cache.dir) / "moe_qlora" / f"kernels-{name}.json"


@cache
def _load(index: int) -> dict[str, Config | Cut]:
    try:
        read = json.loads(cache_file(torch.device("cuda", index)).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    # A file may be anybody's: what is no candidate of this version is not used.
    candidates: list[Config | Cut] = [*_CANDIDATES, *grouped_mm.CANDIDATES]
    known = {json.dumps(candidate): candidate for candidate in candidates}
    entries = read.items() if isinstance(read, dict) else ()
    return {key: known[text] for key, value in entries if (text := json.dumps(value)) in known}


def chosen(packed: PackedWeight, dtype: torch.dtype, tile: int, *, back: bool) -> Config:
    """Return the configuration for a product of this weight: the table's, or one never far behind.

    `tile` is the rows in a tile; `back` says that the stored rows are what is summed over.
    """
    own = _own(packed, dtype, tile, back)
    untuned = own or default(tile, packed.device, back=back)
    if packed.device.type != "cuda":
        return untuned
    config = _load(packed.device.index or 0).get(_key(packed, dtype, tile, back))
    if not isinstance(config, Config) or not _may_run(config, packed, tile, own):
        return untuned
    return config


def _own(packed: PackedWeight, dtype: torch.dtype, tile: int, back: bool) -> Config | None:
    """Return the kernel in Gluon that computes such a product, if one does."""
    if tile >= 64 and on_hopper(packed.spec, dtype, back=back):
        return HOPPER
    return FEW if multiplies_few(packed.spec, dtype, tile, back=back) else None


def _may_run(config: Config, packed: PackedWeight, tile: int, own: Config | None) -> bool:
    """Whether a configuration may be used or measured; `own` is the kernel in Gluon that may."""
    if config.own:
        return config == own
    return fits(config, tile, packed.kind, cards.card(packed.device))


def chosen_cut(packed: PackedWeight, dtype: torch.dtype, tile: int, *, back: bool) -> Cut:
    """Return the cut of the grouped matmul for what this weight is dequantized into, likewise."""
    untuned = grouped_mm.default(tile, packed.device)
    if packed.device.type != "cuda":
        return untuned
    cut = _load(packed.device.index or 0).get(_key(packed, dtype, tile, back, _GROUPED))
    card = cards.card(packed.device)
    return cut if isinstance(cut, Cut) and grouped_mm.fits(cut, tile, card) else untuned


def tune(
    packed: PackedWeight, dtype: torch.dtype, tiles: tuple[int, ...] = (16, 32, 64, 128)
) -> dict[tuple[int, bool], Config]:
    """Measure every configuration for weights of this shape and kind; remember the quickest.

    Return what was chosen for each of `tiles` (rows in a tile, from 16 for few tokens an expert to
    128 for many), out (False) and back (True). Where `grouped_mm.py` multiplies what is
    dequantized, its cuts are measured too.
    """
    table = _load(packed.device.index or 0)
    if not cards.multiplies_by_torch(packed.device, dtype):
        for back in (False, True):
            cut = _quickest_cut(packed, dtype, back)
            if cut is not None:
                table[_key(packed, dtype, _MANY, back, _GROUPED)] = cut
    picked: dict[tuple[int, bool], Config] = {}
    for tile, back in product(tiles, (False, True)):
        problem = _problem(packed, dtype, tile, back)
        times = {
            config: elapsed
            for config in _CANDIDATES
            if (elapsed := _try(problem, packed, tile, back, config)) is not None
        }
        if times:
            best = min(times, key=lambda config: times[config])
            picked[tile, back] = table[_key(packed, dtype, tile, back)] = best
    _store(cache_file(packed.device), table)
    return picked


def _quickest_cut(packed: PackedWeight, dtype: torch.dtype, back: bool) -> Cut | None:
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


def _store(path: Path, table: dict[str, Config | Cut]) -> None:
    """Replace the file as a whole; without a place to write, the table lives for this process."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, delete=False, encoding="utf-8"
        ) as file:
            json.dump(table, file, indent=0, sort_keys=True)
        Path(file.name).replace(path)
    except OSError:
        return


_Problem = tuple[Tensor, Tensor, Tensor, Tensor]
"""Rows, the experts' offsets, tiles, and room for the absmax."""


def _try(
    problem: _Problem, packed: PackedWeight, tile: int, back: bool, config: Config
) -> float | None:
    """Return the median milliseconds on random rows, None where the result is wrong or none."""
    x, expert_offsets, tiles, absmax = problem
    across = config.features if back else config.step
    if not config.own and across > 2 * max(packed.blocksize, 64):
        return None  # the portable kernel takes one or two blocks of a row at a time
    if not _may_run(config, packed, tile, _own(packed, x.dtype, tile, back)):
        return None
    room = None if config.direct or packed.nested is None else absmax
    span = 0, packed.spec.shape[2 if back else 1]

    run = partial(
        launch, x, packed, None, room, expert_offsets, tiles, tile, config, back=back, span=span
    )
    return _elapsed(run, lambda y: _is_right(x, y, packed, expert_offsets, back))


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


def _problem(packed: PackedWeight, dtype: torch.dtype, tile: int, back: bool) -> _Problem:
    """Return random rows, three quarters of a tile for each expert."""
    experts = packed.experts
    device = packed.device
    each = tile * 3 // 4
    x = torch.randn(experts * each, packed.spec.shape[1 if back else 2], device=device, dtype=dtype)
    first = torch.arange(experts + 1, device=device, dtype=torch.int32)
    tiles = torch.stack([first[:-1], first[:-1] * each], 1).contiguous()
    absmax = torch.empty(packed.absmax.shape, device=device, dtype=torch.float32)
    return x, first * each, tiles, absmax


def _is_right(
    x: Tensor, y: Tensor, packed: PackedWeight, expert_offsets: Tensor, back: bool
) -> bool:
    """Compare the first, a middle and the last expert with their decoded product."""
    experts, n, k = packed.spec.shape
    each = x.shape[0] // experts
    for expert in {0, experts // 2, experts - 1}:
        weight = torch.empty(1, n, k, device=x.device, dtype=x.dtype)
        dequantize.decode(packed, weight, first=expert)
        rows = slice(expert * each, (expert + 1) * each)
        right = (x[rows] @ (weight[0] if back else weight[0].t())).float()
        error = (y[rows].float() - right).norm() / right.norm()
        if not bool(error < _TOLERANCE):
            return False
    return True
