"""int8, as bitsandbytes packs it: one code a weight, one scale a row.

For n weights under the key `<name>`:

    <name>    int8      as the weight   one code a weight
    .SCB      float32   (rows,)         one scale a row

The value of a weight is code * scale / 127.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from ..errors import UnsupportedWeightError
from ..kernels.weights import PackedWeight
from .codecs import Codec, Shape, Tensors

if TYPE_CHECKING:
    from .settings import CodecSettings

SCALES = ".SCB"


class Int8(Codec):
    """bitsandbytes' int8, whose units are rows."""

    kind = "int8"
    scales = SCALES
    loads_in_8bit = packs_linears = True
    linear_dtype = torch.float16

    def settle(self, settings: CodecSettings) -> Mapping[str, Any]:
        return {"double_quant": False, "storage_dtype": torch.int8}

    def unit(self, shape: Shape, settings: CodecSettings) -> int:
        return shape[-1]

    def codes_shape(self, shape: Shape) -> tuple[int, ...]:
        return tuple(shape)

    def quantize(self, weights: Tensor, unit: int) -> tuple[Tensor, Tensor]:
        """Pack rows; cast to float16 for bitsandbytes' CUDA kernel, which supports nothing else."""
        import bitsandbytes  # noqa: F401 - defines torch.ops.bitsandbytes

        rows = weights.view(-1, unit)
        if rows.device.type == "cuda":
            rows = rows.half()
        codes, scales, _ = torch.ops.bitsandbytes.int8_vectorwise_quant.default(rows, 0.0)
        return codes, scales

    def finish(
        self, codes: Tensor, scales: Tensor, shape: Shape, dtype: torch.dtype,
        settings: CodecSettings,
    ) -> PackedWeight:  # fmt: skip
        if dtype != torch.float16 and not bool(scales.isfinite().all()):
            row = int(torch.nonzero(~scales.isfinite())[0])
            raise UnsupportedWeightError(
                f"Row {row} of the weight holds values that float16 cannot, which bitsandbytes' "
                "int8 kernel takes on this device: pack it to 4 bit, or on the CPU."
            )
        return super().finish(codes, scales, shape, dtype, settings)

    def assemble(
        self, tensors: Tensors, shape: Shape, dtype: torch.dtype | None, settings: CodecSettings
    ) -> PackedWeight:
        # Block size 0 tells kernels that each row has one scale.
        return replace(super().assemble(tensors, shape, dtype, settings), blocksize=0)

    def decode(self, packed: PackedWeight, first: int, last: int) -> Tensor:
        """Decode the weights [first, last) of the flattened weight; both are whole rows."""
        import bitsandbytes  # noqa: F401 - defines torch.ops.bitsandbytes

        columns = packed.shape[-1]
        rows = packed.codes.detach().view(-1, columns)[first // columns : last // columns]
        scales = packed.absmax[first // columns : last // columns]
        decoded = torch.ops.bitsandbytes.int8_vectorwise_dequant.default(rows, scales)
        return cast(Tensor, decoded.to(packed.dtype)).view(-1)


INT8 = Int8()
