"""Sizes of devices, and how a row of blocks is spread over them evenly; free of torch."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from ..errors import did_you_mean
from ..layout import parse_bytes
from .hosting import Pace

CONTEXT_BYTES = 600 << 20
"""Bytes of a CUDA process before its first tensor: context, kernels, libraries."""

_HALVINGS = 32  # Of the interval in which the fullest device's fullness is looked for

FRAGMENTATION = 0.04
"""Part of the peak that the caching allocator reserves beyond it, in gaps between blocks."""


Capability = tuple[int, int]
"""A compute capability of CUDA."""


class Gpu(NamedTuple):
    """A GPU that is known by name."""

    nbytes: int  # Memory, in whole GiB
    capability: Capability
    tflops: int  # Of dense bf16 products (fp16 before capability 8.0), as its maker says


GPUS = {
    "B200": Gpu(178 << 30, (10, 0), 2250),
    "H200": Gpu(139 << 30, (9, 0), 989),
    "H100": Gpu(79 << 30, (9, 0), 989),
    "A100-80GB": Gpu(79 << 30, (8, 0), 312),
    "A100-40GB": Gpu(39 << 30, (8, 0), 312),
    "A30": Gpu(23 << 30, (8, 0), 165),
    "A40": Gpu(44 << 30, (8, 6), 150),
    "A10": Gpu(21 << 30, (8, 6), 125),
    "A10G": Gpu(21 << 30, (8, 6), 70),
    "A6000": Gpu(47 << 30, (8, 6), 155),
    "L4": Gpu(21 << 30, (8, 9), 121),
    "L40": Gpu(44 << 30, (8, 9), 181),
    "L40S": Gpu(44 << 30, (8, 9), 362),
    "RTX6000-Ada": Gpu(47 << 30, (8, 9), 364),
    "RTX-PRO-6000": Gpu(94 << 30, (12, 0), 503),
    "RTX3090": Gpu(23 << 30, (8, 6), 71),
    "RTX4090": Gpu(23 << 30, (8, 9), 165),
    "RTX5090": Gpu(31 << 30, (12, 0), 210),
    "V100-16GB": Gpu(15 << 30, (7, 0), 125),
    "V100-32GB": Gpu(31 << 30, (7, 0), 125),
    "T4": Gpu(14 << 30, (7, 5), 65),
}
"""By name. `gpu_named` reads them in any spelling: RTX 4090, rtx-4090, 4090.

H100 and H200 are what `torch.cuda` reports of them, rounded down. No other card was read: these are
estimates, their nominal sizes less what drivers and error correction keep.
"""

_COUNTED = re.compile(r"(\d+)\s*[xX*]\s*(.+)")


_MAKER = re.compile(r"NVIDIA|GEFORCE|TESLA|QUADRO|RTX|[\s_-]")
_BY_PLAIN_NAME = {_MAKER.sub("", name.upper()): name for name in GPUS}


def gpu_named(text: str) -> str | None:
    """Return the entry of `GPUS` that a text names; None where it names none.

    ValueError where cards of that name differ in memory.
    """
    plain = _MAKER.sub("", text.upper())
    sizes = [name for name in GPUS if plain and name.upper().startswith(f"{plain}-")]
    if sizes and plain not in _BY_PLAIN_NAME:
        raise ValueError(f"{text.strip()} has more than one size; write {' or '.join(sizes)}")
    return _BY_PLAIN_NAME.get(plain)


def gpu_of_device(name: str) -> Gpu | None:
    """Return what is known of a device by the name that CUDA gives it; None for others."""
    plain = _MAKER.sub("", name.upper())
    words = {_MAKER.sub("", word.upper()): key for key in GPUS for word in (key.split("-")[0], key)}
    found = max((word for word in words if word and word in plain), key=len, default=None)
    return None if found is None else GPUS[words[found]]


def pace_of(gpu: Gpu | None) -> Pace:
    """Return an estimate of how quick a card is; that of an H200 where it is not known."""
    if gpu is None:
        return Pace()
    # PCIe is of generation 3 for capability 7, 4 for 8 and 5 from 9 on, with 16 lanes.
    link = {7: 11e9, 8: 22e9}.get(gpu.capability[0], Pace().link)
    return Pace(link, Pace().rate * gpu.tflops / GPUS["H200"].tflops)


def unknown_gpu(text: str) -> str:
    """Return the end of a sentence, without its full stop, that a text names no card of `GPUS`."""
    near = did_you_mean(text.strip(), [*_BY_PLAIN_NAME, *GPUS])
    return f"card that is known{near}: {', '.join(GPUS)}"


def parse_gpus(text: str) -> list[tuple[int, Gpu | None]]:
    """Return each device of "24GiB,2xH100": its bytes, and its card, None for a size alone.

    ValueError where it is no such list.
    """
    found: list[tuple[int, Gpu | None]] = []
    for part in text.split(","):
        counted = _COUNTED.fullmatch(part.strip())
        count, one = (1, part) if counted is None else (int(counted[1]), counted[2])
        if not 1 <= count <= 1024:
            raise ValueError(f"{part.strip()!r} asks for {count} devices; give 1 to 1024")
        name = gpu_named(one)
        try:
            size = parse_bytes(one) if name is None else GPUS[name].nbytes
        except ValueError as error:
            if one.strip().isdecimal():
                raise ValueError(str(error)) from None
            text = f"{one.strip()!r} is neither a size (24GiB, 80GB, 500MiB) nor a "
            raise ValueError(text + unknown_gpu(one)) from None
        if size <= 0:
            raise ValueError(f"{one!r} is no size of a device; it must be over 0")
        found += [(size, None if name is None else GPUS[name])] * count
    return found


def reserve_nbytes(peak: int) -> int:
    """Return the bytes that a device needs in addition to a peak: its context, and gaps."""
    return CONTEXT_BYTES + int(peak * FRAGMENTATION)


def partition(
    count: int, capacities: Sequence[int], load: Callable[[int, int], int]
) -> list[tuple[int, int]]:
    """Spread the blocks 0 .. count - 1 over devices in order, so that the fullest is least full.

    `load` gives the bytes of the blocks [first, last) on one device, and must not fall when a block
    is added. Returns (first, last) for each device.
    """

    def filled(fullness: float) -> list[tuple[int, int]]:
        spans, first = [], 0
        for size in capacities:
            ends = range(first + 1, count + 1)
            last = first + bisect_right(ends, size * fullness, key=partial(load, first))
            spans.append((first, last))
            first = last
        return spans

    low, high = 0.0, 1.000001 * load(0, count) / max(capacities)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if filled(middle)[-1][1] == count else (middle, high)
    return filled(high)
