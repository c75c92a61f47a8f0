"""Finds the quickest way to cut the kernel for few tokens, once for each device and version.

`multiply` in `fused.py` asks `chosen`, which looks into a table and never measures: a measurement
waits for the device, and a forward must not. The table is filled by `tune`, which takes seconds,
and kept in Triton's cache folder (`TRITON_CACHE_DIR`, or below the user's home), one file for each
device, Triton and torch:

    <cache>/moe_qlora/kernels-<device>-triton<version>-torch<version>.json

Every configuration's result is compared with the decoded product on fresh random rows before it may
be chosen; one that is off, or does not compile, is dropped.
"""

from __future__ import annotations

import json
import re
import tempfile
from functools import cache
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from . import decode
from .fused import Config, launch
from .packed import Packed

_TOLERANCE = 6e-3
"""Largest relative error against the decoded product in 16 bit, whose own rounding is 3e-3."""

_CANDIDATES = tuple(
    Config(block, unroll, stages, warps)
    for (block, warps), unroll, stages in product(((64, 4), (128, 4), (128, 8)), (1, 2), (3, 4))
)

DEFAULT = Config(64, 1, 4, 4)


def _key(packed: Packed, dtype: torch.dtype, tile: int) -> str:
    _, n, k = packed.shape
    return f"{packed.kind}-{n}x{k}-{str(dtype).removeprefix('torch.')}-{tile}"


def cache_file(device: torch.device) -> Path:
    """Where this device's table is kept."""
    name = f"{torch.cuda.get_device_name(device)}-triton{triton.__version__}"
    name = re.sub(r"[^\w.]+", "-", f"{name}-torch{torch.__version__}")
    return Path(triton.knobs.cache.dir) / "moe_qlora" / f"kernels-{name}.json"


def _is_candidate(value: object) -> bool:
    if not isinstance(value, list) or not all(type(number) is int for number in value):
        return False
    return tuple(value) in {tuple(config) for config in _CANDIDATES}


@cache
def _load(index: int) -> dict[str, list[int]]:
    path = cache_file(torch.device("cuda", index))
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(read, dict):
        return {}
    # A file may be anybody's: what is no candidate of this version is not used.
    return {key: value for key, value in read.items() if _is_candidate(value)}


def chosen(packed: Packed, dtype: torch.dtype, tile: int) -> Config:
    """The configuration for this stack and tile: the table's, or one that is never far behind."""
    device = packed.codes.device
    if device.type != "cuda":
        return DEFAULT
    found = _load(device.index or 0).get(_key(packed, dtype, tile))
    return DEFAULT if found is None else Config(*found)


def tune(
    packed: Packed, dtype: torch.dtype, tiles: tuple[int, ...] = (16, 32, 64)
) -> dict[int, Config]:
    """Measure every configuration for this stack, and remember the quickest that is right.

    Waits for the device; takes a few seconds for each tile the first time, compiling included.

    Args:
        packed: A 4-bit stack on a CUDA device; its shape and kind count, not its values.
        dtype: bf16 or fp16.
        tiles: Rows in a tile: 16, 32 and 64 stand for few, more and many tokens an expert.

    Returns:
        What was chosen for each tile.
    """
    device = packed.codes.device
    table = _load(device.index or 0)
    picked: dict[int, Config] = {}
    for tile in tiles:
        times = {
            config: elapsed
            for config in _CANDIDATES
            if (elapsed := _try(packed, dtype, tile, config)) is not None
        }
        if times:
            picked[tile] = min(times, key=lambda config: times[config])
            table[_key(packed, dtype, tile)] = list(picked[tile])
    _store(cache_file(device), table)
    return picked


def _store(path: Path, table: dict[str, list[int]]) -> None:
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


def _try(packed: Packed, dtype: torch.dtype, tile: int, config: Config) -> float | None:
    """Median milliseconds on random rows, None where the result is wrong or nothing runs."""
    x, bounds, tiles, absmax = _problem(packed, dtype, tile)
    try:
        y = launch(x, packed, None, absmax, bounds, tiles, tile, config)
    except (triton.compiler.errors.CompilationError, triton.runtime.errors.OutOfResources,
            RuntimeError):  # fmt: skip
        return None
    if not _is_right(x, y, packed, bounds):
        return None
    times = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        launch(x, packed, None, absmax, bounds, tiles, tile, config)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[2]


def _problem(
    packed: Packed, dtype: torch.dtype, tile: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows (split as the kernel wants them), bounds, tiles and absmax: three quarters of a tile."""
    experts, _, k = packed.shape
    device = packed.codes.device
    each = tile * 3 // 4
    x = torch.randn(experts * each, k, device=device, dtype=dtype)
    first = torch.arange(experts + 1, device=device, dtype=torch.int32)
    tiles = torch.stack([first[:-1], first[:-1] * each], 1).contiguous()
    absmax = torch.empty(packed.absmax.shape, device=device, dtype=torch.float32)
    return x, first * each, tiles, absmax if packed.nested is not None else packed.absmax


def _is_right(x: Tensor, y: Tensor, packed: Packed, bounds: Tensor) -> bool:
    """Compares the first, a middle and the last expert with their decoded product."""
    experts, n, k = packed.shape
    each = x.shape[0] // experts
    whole = torch.stack([x[:, : k // 2], x[:, k // 2 :]], 2).reshape(x.shape)
    for expert in {0, experts // 2, experts - 1}:
        weight = torch.empty(1, n, k, device=x.device, dtype=x.dtype)
        decode.decode(packed, weight, first=expert)
        rows = slice(expert * each, (expert + 1) * each)
        right = F.linear(whole[rows], weight[0]).float()
        error = (y[rows].float() - right).norm() / right.norm()
        if not bool(error < _TOLERANCE):
            return False
    return True
