"""Sizes of devices, and how a row of blocks is spread over them evenly; free of torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import pairwise

from ..layout import parse_bytes

CONTEXT_BYTES = 600 << 20
"""What a process holds on a CUDA device before its first tensor: context, kernels, libraries."""

FRAGMENTATION = 0.04
"""Part of the peak that the caching allocator reserves beyond it, in gaps between blocks."""

_KNOWN = {"H100": 79 << 30, "H200": 139 << 30}
"""What `torch.cuda` reports of cards that go by their name, rounded down: 79.1 and 139.8 GiB."""

_COUNTED = re.compile(r"(\d+)\s*[xX*]\s*(.+)")


def exact_size(nbytes: int) -> str:
    """Return the shortest text that `parse_bytes` reads as so many bytes, such as "24GiB"."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes % size == 0:
            return f"{nbytes // size}{unit}"
    return str(nbytes)


def parse_devices(text: str) -> tuple[int, ...]:
    """Return the bytes of each device of "24GiB,2xH100"; ValueError where it is no such list."""
    sizes: list[int] = []
    for part in text.split(","):
        counted = _COUNTED.fullmatch(part.strip())
        count, one = (1, part) if counted is None else (int(counted[1]), counted[2])
        if not 1 <= count <= 1024:
            raise ValueError(f"{part.strip()!r} asks for {count} devices; give 1 to 1024")
        size = _KNOWN.get(one.strip().upper()) or parse_bytes(one)
        if size <= 0:
            raise ValueError(f"{one!r} is no size of a device; it must be over 0")
        sizes += [size] * count
    return tuple(sizes)


def reserve_nbytes(peak: int) -> int:
    """Return what a device holds beside the tensors of this peak: its context, and gaps."""
    return CONTEXT_BYTES + int(peak * FRAGMENTATION)


def partition(
    count: int, capacities: Sequence[int], load: Callable[[int, int], int]
) -> list[tuple[int, int]]:
    """Spread blocks 0 .. count - 1 over devices, in order, so that the fullest is least full.

    `load` gives the bytes of the blocks [first, last) on one device, and must not fall when a block
    is added. Returns (first, last) for each device that got a block; the last ones may get none.
    """
    devices = min(len(capacities), count)
    # best[d][n]: how full the fullest of the first d devices is that hold the first n blocks
    best = [[float("inf")] * (count + 1) for _ in range(devices + 1)]
    cut = [[0] * (count + 1) for _ in range(devices + 1)]
    best[0][0] = 0.0
    for device in range(1, devices + 1):
        for last in range(device, count + 1):
            for first in range(last - 1, device - 2, -1):
                full = load(first, last) / capacities[device - 1]
                if full >= best[device][last]:
                    break  # more blocks on this device only fill it more
                value = max(best[device - 1][first], full)
                if value < best[device][last]:
                    best[device][last], cut[device][last] = value, first
    ends = [count]
    for device in range(devices, 0, -1):
        ends.append(cut[device][ends[-1]])
    return list(pairwise(reversed(ends)))
