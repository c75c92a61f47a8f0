"""GPUs by name, and devices as `plan` is given them."""

import re
from math import ceil
from typing import Any, NamedTuple

from ..errors import ConfigError, did_you_mean
from ..kernels.cards import PORTABLE, Card, of_capability
from ..layout import parse_bytes

CONTEXT_BYTES = 600 << 20
"""Bytes of a CUDA process before its first tensor: context, kernels, libraries."""

FRAGMENTATION = 0.04
"""Part of the peak that the caching allocator reserves beyond it, in gaps between blocks."""

_SMALLEST_DEVICE = 1 << 12  # bytes; a smaller number was meant as GiB


class Gpu(NamedTuple):
    """A GPU that is known by name."""

    nbytes: int  # Memory, in whole GiB
    capability: tuple[int, int]  # Of CUDA
    tflops: int  # Of dense bf16 products (fp16 before capability 8.0), as its maker says


class Pace(NamedTuple):
    """How quick a device copies and computes. As given here: an H200, where all were measured."""

    link: float = 55e9  # Bytes a second, from page-locked host memory
    rate: float = 300e12  # Operations a second in a training step


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
    """Return the entry of `GPUS` that a text names, if any.

    ValueError where cards of that name differ in memory.
    """
    plain = _MAKER.sub("", text.upper())
    sizes = [name for name in GPUS if plain and name.upper().startswith(f"{plain}-")]
    if sizes and plain not in _BY_PLAIN_NAME:
        raise ValueError(f"{text.strip()} has more than one size; write {' or '.join(sizes)}")
    return _BY_PLAIN_NAME.get(plain)


def pace_of(gpu: Gpu | None) -> Pace:
    """Return an estimate of how quick a card is; that of an H200 where it is not known."""
    if gpu is None:
        return Pace()
    # PCIe is of generation 3 for capability 7, 4 for 8 and 5 from 9 on, with 16 lanes.
    link = {7: 11e9, 8: 22e9}.get(gpu.capability[0], Pace().link)
    return Pace(link, Pace().rate * gpu.tflops / GPUS["H200"].tflops)


def pace_named(name: str) -> Pace:
    """Return the pace of a device by the name that CUDA gives it."""
    plain = _MAKER.sub("", name.upper())
    words = {_MAKER.sub("", word.upper()): key for key in GPUS for word in (key.split("-")[0], key)}
    found = max((word for word in words if word and word in plain), key=len, default=None)
    return pace_of(None if found is None else GPUS[words[found]])


def unknown_gpu(text: str) -> str:
    """Return the end of a sentence, without its full stop, that a text names no card of `GPUS`."""
    near = did_you_mean(text.strip(), [*_BY_PLAIN_NAME, *GPUS])
    return f"card that is known{near}: {', '.join(GPUS)}"


def devices_of(gpus: Any, name: str = "gpus") -> tuple[tuple[int, ...], Card, Pace]:
    """Return the bytes of each device that `gpus` names, their card, and how quick the slowest is.

    `gpus` is a text as "24GiB,2xH100", bytes, or a list of these. Where cards differ, or one has no
    name, the card is `PORTABLE`.
    """
    if gpus is None:
        return (), PORTABLE, Pace()
    entries = [gpus] if isinstance(gpus, (str, int)) else gpus
    found: list[tuple[int, Gpu | None]] = []
    try:
        for entry in entries:
            for part in (f"{entry}B" if isinstance(entry, int) else str(entry)).split(","):
                found += _device(part)
        if (least := min(size for size, _ in found)) < _SMALLEST_DEVICE:
            meant = f"{least}GiB" if least < 1000 else "the memory, as in 24GiB"
            raise ValueError(f"{least} is a number of bytes; write {meant}")
    except ValueError as error:
        raise ConfigError(f"{name}: {error}.") from error
    capabilities = {gpu and gpu.capability for _, gpu in found}
    known = capabilities.pop() if len(capabilities) == 1 else None
    pace = Pace(*map(min, zip(*(pace_of(gpu) for _, gpu in found), strict=True)))
    return tuple(size for size, _ in found), of_capability(known) if known else PORTABLE, pace


def _device(text: str) -> list[tuple[int, Gpu | None]]:
    """Return devices such as "24GiB" or "2xH100": bytes, and the card unless it is a size alone."""
    counted = _COUNTED.fullmatch(text.strip())
    count, one = (1, text) if counted is None else (int(counted[1]), counted[2])
    if not 1 <= count <= 1024:
        raise ValueError(f"{text.strip()!r} asks for {count} devices; give 1 to 1024")
    if (name := gpu_named(one)) is not None:
        return [(GPUS[name].nbytes, GPUS[name])] * count
    try:
        size = parse_bytes(one)
    except ValueError:
        if one.strip().isdecimal():
            raise
        said = f"{one.strip()!r} is neither a size (24GiB, 80GB, 500MiB) nor a "
        raise ValueError(said + unknown_gpu(one)) from None
    if size <= 0:
        raise ValueError(f"{one.removesuffix('B')} is no size of a device; it must be over 0")
    return [(size, None)] * count


def reserve_nbytes(peak: int) -> int:
    """Return the bytes that a device needs in addition to a peak: its context, and gaps."""
    return CONTEXT_BYTES + int(peak * FRAGMENTATION) if peak else 0


def tensors_limit(capacity: int, gaps: float = FRAGMENTATION) -> int:
    """Return the largest peak that so many bytes hold with gaps of this part of it."""
    return ceil((capacity + 1) / (1 + gaps)) - 1
