"""Keeps a checkpoint's own codes: MXFP4, as gpt-oss is published, becomes a packed weight as it is.

Nothing is dequantized, so that nothing is rounded. MXFP4 on disk, for a matrix of `rows` features
that come out and `cols` that go in:

    blocks   `(..., rows, cols / 32, 16)` uint8   two E2M1 codes a byte, the first in the low half
    scales   `(..., rows, cols / 32)` uint8       e8m0: byte i stands for 2**(i - 127)

A packed weight has the halves of each byte swapped, as bitsandbytes and all kernels here have it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..errors import UnsupportedWeightError
from ..kernels.weights import MX_BLOCK, PackedWeight
from .codec import microscaled
from .format import CODES, EXPONENTS, overflowing_block, packed_tensors, why_not_packed
from .settings import CodecSettings


def kept_settings(settings: CodecSettings) -> CodecSettings:
    """Return how a weight is packed that keeps its MXFP4 codes, beside weights of `settings`."""
    return replace(settings, kind="mxfp4", skip_modules=(), stored_transposed=True)


class KeptPacker:
    """Puts a weight together from the codes and scales of its experts, which arrive in order."""

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str,
        settings: CodecSettings,
    ) -> None:
        """Make room for a weight that decodes to `shape` and `dtype`.

        Raises:
            UnsupportedWeightError: Rows of this shape are no whole blocks.
        """
        reason = why_not_packed(shape, dtype, settings)
        if reason is not None:
            raise UnsupportedWeightError(f"The weight {reason}.")
        self.shape, self.dtype, self.settings = torch.Size(shape), dtype, settings
        specs = packed_tensors(shape, settings)
        self._codes = torch.empty(specs[CODES].nbytes, dtype=torch.uint8, device=device)
        self._exponents = torch.empty(specs[EXPONENTS].nbytes, dtype=torch.uint8, device=device)
        self._experts = 0

    @property
    def experts(self) -> int:
        """Number of experts that came."""
        return self._experts

    def add(self, blocks: Tensor, scales: Tensor) -> None:
        """Take the next experts: codes `(n, rows, cols / 32, 16)`, scales `(n, rows, cols / 32)`.

        Raises:
            UnsupportedWeightError: They are of another dtype or shape than this weight's.
        """
        *_, first, second = self.shape
        rows, cols = (second, first) if self.settings.stored_transposed else (first, second)
        grid = (len(scales), *self.shape[1:-2], rows, cols // MX_BLOCK)
        for name, tensor, shape in (
            ("blocks", blocks, (*grid, MX_BLOCK // 2)),
            ("scales", scales, grid),
        ):
            if tensor.element_size() != 1 or tuple(tensor.shape) != shape:
                raise UnsupportedWeightError(
                    f"MXFP4 {name} are {tensor.dtype} of shape {tuple(tensor.shape)}; a weight of "
                    f"shape {tuple(self.shape)} has bytes of shape {shape} there."
                )
        if self._experts + len(scales) > self.shape[0]:
            raise UnsupportedWeightError(
                f"MXFP4 blocks came for {self._experts + len(scales)} experts or more; a weight of "
                f"shape {tuple(self.shape)} has {self.shape[0]}."
            )
        blocks, scales = (
            tensor.detach().view(torch.uint8).to(self._codes.device).reshape(-1)
            for tensor in (blocks, scales)
        )
        weights = math.prod(self.shape[1:])
        at, end = self._experts * weights, (self._experts + grid[0]) * weights
        self._codes[at // 2 : end // 2] = (blocks << 4) | (blocks >> 4)
        self._exponents[at // MX_BLOCK : end // MX_BLOCK] = scales
        self._experts += grid[0]

    def finish(self) -> PackedWeight:
        """Return the packed weight.

        Raises:
            UnsupportedWeightError: Experts are missing, or a block decodes to NaN or inf.
        """
        if self._experts != self.shape[0]:
            raise UnsupportedWeightError(
                f"MXFP4 blocks came for {self._experts} experts; a weight of shape "
                f"{tuple(self.shape)} has {self.shape[0]}."
            )
        bad = overflowing_block(self._codes, self._exponents, self.dtype)
        if bad is not None:
            expert = bad.block * MX_BLOCK // math.prod(self.shape[1:])
            raise UnsupportedWeightError(
                f"Expert {expert} has an MXFP4 scale, {bad.exponent}, that decodes to {bad.value}."
            )
        codes = self._codes.unsqueeze(1)
        return microscaled(codes, self._exponents, self.shape, self.dtype, self.settings)


def mxfp4_blocks(packed: PackedWeight) -> tuple[Tensor, Tensor]:
    """Return an MXFP4 weight's blocks and scales as its checkpoint had them."""
    *lead, rows, cols = packed.stored_shape
    codes = packed.flat_codes
    blocks = ((codes << 4) | (codes >> 4)).view(*lead, rows, cols // MX_BLOCK, MX_BLOCK // 2)
    return blocks, packed.absmax.view(*lead, rows, cols // MX_BLOCK)
