"""MXFP4, as gpt-oss is published: a checkpoint's native codes.

They are never dequantized and packed again. On disk in the checkpoint, for `rows` output and
`cols` input features:

    blocks   `(..., rows, cols / 32, 16)` uint8   two E2M1 codes a byte, the first in the low half
    scales   `(..., rows, cols / 32)` uint8       e8m0: byte i stands for 2**(i - 127); 255 is NaN

A packed weight of n weights has the halves of each byte swapped, as bitsandbytes. Under `<name>`:

    <name>       uint8   (n / 2, 1)   two codes in a byte
    .exponents   uint8   (n / 32,)    one a block of 32 of a row

The value of a weight is table[code] * 2**(exponent - 127). Stored transposed, blocks lie along the
columns of the decoded weight.
"""

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from ..kernels.weights import MX_BLOCK, TABLES, NestedAbsmax, PackedWeight, power_scales
from .codec import Packer
from .codecs import Codec, Shape, Tensors
from .settings import CodecSettings

EXPONENTS = ".exponents"


class Mxfp4(Codec):
    """E2M1 codes with an e8m0 scale for each block of 32."""

    kind = "mxfp4"
    bits = 4
    blocksize = MX_BLOCK
    scales = EXPONENTS
    scale_dtype = torch.uint8
    table = TABLES[kind]
    is_kept = True
    in_quant_state = True

    def constant_nbytes(self, settings: CodecSettings) -> int:
        # both tables, the second level's scale and its offset
        return (16 + 256 + 2) * torch.float32.itemsize

    def why_not(self, shape: Shape, settings: CodecSettings) -> str | None:
        row = shape[-2] if settings.stored_transposed else shape[-1]
        if row % MX_BLOCK:
            return f"has stored rows of {row} weights, which are no whole blocks of {MX_BLOCK}"
        return None

    def assemble(
        self, tensors: Tensors, shape: Shape, dtype: torch.dtype | None, settings: CodecSettings
    ) -> PackedWeight:
        packed = super().assemble(tensors, shape, dtype, settings)
        device = packed.codes.device
        return replace(
            packed,
            table=torch.tensor(self.table, device=device),
            nested=power_scales(device),
            stored_transposed=settings.stored_transposed,
        )

    def decode(self, packed: PackedWeight, first: int, last: int) -> Tensor:
        """Decode the weights [first, last) of the flattened weight, rounded once."""
        begin, end = first // MX_BLOCK, -(-last // MX_BLOCK)
        half = MX_BLOCK // 2
        codes = packed.codes.detach().view(-1)[begin * half : end * half]
        table = cast(Tensor, packed.table)
        pairs = torch.stack([table.repeat_interleave(16), table.repeat(16)], 1)  # of each byte
        values = pairs[codes.int()].view(-1, MX_BLOCK)
        powers = cast(NestedAbsmax, packed.nested).table
        values *= powers[packed.absmax[begin:end].int()][:, None]
        flat = values.to(packed.dtype).view(-1)
        return flat[first - begin * MX_BLOCK : last - begin * MX_BLOCK]


MXFP4 = Mxfp4()


class KeptPacker(Packer):
    """Assembles a weight from the native codes and scales of its experts, added in order."""

    def add(self, blocks: Tensor, scales: Tensor) -> None:  # type: ignore[override]
        """Add the next experts: codes `(n, rows, cols / 32, 16)`, scales `(n, rows, cols / 32)`."""
        codes, first = blocks.detach().view(torch.uint8).to(self.device).flatten(), self._done
        self._done += scales.numel() * MX_BLOCK
        self._codes[first // 2 : self._done // 2] = (codes << 4) | (codes >> 4)
        exponents = scales.detach().view(torch.uint8).flatten()
        self._scales[first // MX_BLOCK : self._done // MX_BLOCK] = exponents
