"""The packed weight: codes and statistics as plain tensors, and the key that kernels depend on."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .cards import META

NF4, MXFP4 = "nf4", "mxfp4"

TABLES: dict[str, tuple[float, ...]] = {
    NF4: (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
    "fp4": (
        0.0, 0.0052083334885537624, 0.6666666865348816, 1.0,
        0.3333333432674408, 0.5, 0.1666666716337204, 0.25,
        0.0, -0.0052083334885537624, -0.6666666865348816, -1.0,
        -0.3333333432674408, -0.5, -0.1666666716337204, -0.25,
    ),
    MXFP4: (
        0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0,
        -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0,
    ),
}  # fmt: skip
"""The 4-bit codes' values: nf4 and fp4 as bitsandbytes' `get_4bit_type` gives them, mxfp4 is E2M1.

`packing.codecs.register` adds those of other codecs. int8 has none; no kernel decodes any other
codec that is not here."""

MX_BLOCK = 32  # Weights in a block of MXFP4, which share one scale

ALL_BLOCKS = 2**30
"""Block size of a second level that has a single block, however long the first level is."""


class WeightSpec(NamedTuple):
    """The properties of a packed weight that kernels are chosen and compiled by."""

    shape: tuple[int, ...]  # `(E, rows, cols)`, of the weight as it is stored
    kind: str  # Of the codec, such as "nf4"
    blocksize: int  # Weights in a block; 0 for int8, whose rows have one scale each
    nested: int  # Block size of the second level, 0 without one
    device: int  # Index of the CUDA device, -1 for the CPU, `cards.META` for meta

    @property
    def is_int8(self) -> bool:
        """Whether the codes are int8 with a scale for each row, rather than of 4 bits."""
        return self.blocksize == 0

    @property
    def is_known(self) -> bool:
        """Whether kernels can decode the codes."""
        return self.is_int8 or self.kind in TABLES


class NestedAbsmax(NamedTuple):
    """The second level of double quantization, from which the uint8 absmax are decoded."""

    table: Tensor  # `(256,)` fp32 values of the absmax's codes
    absmax: Tensor  # fp32, one for each block of the first level's absmax
    offset: Tensor  # `()` fp32, added to each decoded absmax
    blocksize: int  # First-level absmax in a block


def power_scales(device: torch.device | str) -> NestedAbsmax:
    """Return the second level under which uint8 absmax are e8m0 bytes: i stands for 2**(i - 127).

    It is constant, with an outer scale of 1 for all blocks and no offset. Byte 255 is NaN.
    """
    target = torch.device(device)
    powers = torch.pow(2.0, torch.arange(-127, 129, dtype=torch.float64))
    powers[255] = torch.nan
    table, outer, offset = powers.float(), torch.ones(1), torch.zeros(())
    return NestedAbsmax(table.to(target), outer.to(target), offset.to(target), ALL_BLOCKS)


class Origin:
    """A weight of a module, by identity; compiled code that read a number would serve one layer."""

    name = ""  # Its full name, for messages, once known


@dataclass(eq=False)
class PackedWeight:
    """One packed weight, such as all experts' gate_up projections: codes and their statistics."""

    # 4-bit: `(bytes / itemsize, 1)` in the storage dtype, two codes to a byte, the first in the
    # high half; int8: int8 in the weight's own shape
    codes: Tensor
    # 4-bit: fp32 or, with double quantization, uint8, one a block; mxfp4: the e8m0 scales' bytes;
    # int8: fp32, one a row of the last dimension
    absmax: Tensor
    table: Tensor | None  # `(16,)` fp32 values of the 4-bit codes; None for int8
    blocksize: int  # Weights in a block, a power of two; 0 for int8
    # The second level; None without double quantization; mxfp4: `power_scales`
    nested: NestedAbsmax | None
    shape: tuple[int, ...]  # Shape of the decoded weight: `(E, rows, cols)` for experts
    kind: str  # Of the codec, such as "nf4"
    dtype: torch.dtype  # Dtype of the weight that was packed, which `unpack` gives again
    # The config's compute dtype; None: that of the activations
    compute_dtype: torch.dtype | None = None
    # The module's parameter with `codes`, once attached. Attaching the same packed weight to a
    # second module shares that parameter
    owner: nn.Parameter | None = field(default=None, repr=False)
    # Which weight of a module it is. Addresses do not tell: FSDP2 gathers one weight's codes where
    # another's were before
    origin: Origin | None = field(default=None, repr=False)
    # Reads the weight anew where its tensors are freed after the forward: under ZeRO-3, which
    # gathers them into other memory for backward, and where it lies in host memory
    refetch: "Callable[[], PackedWeight] | None" = field(default=None, repr=False)
    # Reserves the tensors, where they are a copy of what lies in host memory, for as long as this
    # object, or another one with the same tensors, is referenced
    lease: object | None = field(default=None, repr=False)
    # Whether codes and blocks run along the decoded weight's columns: its last two dimensions are
    # stored the other way round, as `stored_shape` has them
    stored_transposed: bool = False

    @property
    def device(self) -> torch.device:
        """Where the codes are."""
        return self.codes.device

    @property
    def numel(self) -> int:
        """Number of weights once decoded."""
        return math.prod(self.shape)

    @property
    def experts(self) -> int:
        """E."""
        return self.shape[0]

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape in whose row-major order codes are stored: the weight's shape for kernels."""
        shape = tuple(self.shape)
        return (*shape[:-2], shape[-1], shape[-2]) if self.stored_transposed else shape

    @property
    def is_share(self) -> bool:
        """Whether an engine has sharded the tensors, so that they must be gathered first."""
        parts = self.codes, self.absmax
        return any(hasattr(t, "device_mesh") or t.numel() == 0 < self.numel for t in parts)

    @property
    def statistics(self) -> tuple[Tensor, ...]:
        """Every tensor but the codes: absmax, nested absmax and tables of values."""
        parts = (self.absmax, self.table, *(self.nested or ())[:3])
        return tuple(part for part in parts if isinstance(part, Tensor))

    @property
    def nbytes(self) -> int:
        """Bytes of codes and statistics."""
        return self.codes.nbytes + sum(part.nbytes for part in self.statistics)

    @cached_property
    def flat_codes(self) -> Tensor:
        """`(bytes,)`: the codes as the kernels read them, uint8, or int8 for int8."""
        flat = self.codes.detach().view(-1)
        return flat.view(torch.uint8) if self.blocksize else flat

    @cached_property
    def spec(self) -> WeightSpec:
        """The key that kernels are chosen and launched by."""
        nested = 0 if self.nested is None else self.nested.blocksize
        device = META if self.codes.is_meta else self.codes.get_device()
        return WeightSpec(self.stored_shape, self.kind, self.blocksize, nested, device)

    def as_stored(self) -> "PackedWeight":
        """Return the weight whose decoded shape is this one's stored shape."""
        if not self.stored_transposed:
            return self
        return replace(self, shape=self.stored_shape, stored_transposed=False)

    def map(self, change: Callable[[Tensor], Tensor]) -> "PackedWeight":
        """Return this weight with every tensor changed, attached to no module."""
        nested = self.nested
        if nested is not None:
            table2, absmax2, offset, blocksize = nested
            nested = NestedAbsmax(change(table2), change(absmax2), change(offset), blocksize)
        table = None if self.table is None else change(self.table)
        codes, absmax = change(self.codes), change(self.absmax)
        return replace(self, codes=codes, absmax=absmax, table=table, nested=nested, owner=None)

    def to(self, device: torch.device | str | int) -> "PackedWeight":
        """Return this weight on another device, attached to no module."""
        return self.map(lambda tensor: tensor.to(device))

    def aligned(self) -> "PackedWeight":
        """Return this weight, or a copy whose tensors all start at multiples of 16 bytes."""
        at_16 = all(part.data_ptr() % 16 == 0 for part in (self.codes, *self.statistics))
        return self if at_16 else self.map(Tensor.clone)
