"""Packs weights into bitsandbytes' formats, and dequantizes any range of their experts.

A weight of two or more dimensions, `(E, out, in)` or any other, is packed in row-major order as
bitsandbytes packs one tensor (format.py has the format). Codes and statistics equal, bit for bit,
what `bitsandbytes.functional.quantize_4bit` and `int8_vectorwise_quant` give for the whole tensor.
Weights that keep a checkpoint's own codes (kept.py) are only decoded here, in plain torch. Unlike
bitsandbytes, packing goes chunk by chunk, so that it costs little more than the packed form
(bitsandbytes' own CPU path holds about 20 bytes a weight), and so that a tensor may hold more than
2**31 - 1 weights, where bitsandbytes' int32 counts overflow.

Codes and statistics are flat and in the order of the weights, so any range of experts is a range of
blocks. Only where a block straddles two experts does decoding a range touch a neighbour's block,
and then only that block.

Decoding does not call `bitsandbytes.functional.dequantize_4bit` on the whole tensor on the CPU: its
AVX-512 kernel (0.50.2) looks up the absmax by row, and is wrong wherever a row of the last
dimension is not a whole number of blocks (measured: off by as much as the weights themselves for
rows of 16, 32, 48, 80 or 96). Here the kernel sees one block as one row, which is right for every
shape and equals the CUDA kernel's arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import bitsandbytes.functional
import torch
from torch import Tensor

from ..errors import QuantizationError, UnsupportedWeightError
from ..kernels.limits import cdiv
from ..kernels.weights import (
    ALL_BLOCKS,
    MX_BLOCK,
    TABLES,
    NestedAbsmax,
    PackedWeight,
    power_scales,
)
from .format import (
    ABSMAX,
    CODES,
    EXPONENTS,
    NESTED_ABSMAX,
    NESTED_BLOCK,
    NESTED_TABLE,
    RECORD,
    SCALES,
    TABLE,
    packed_tensors,
    problems,
    read_record,
    why_not,
)
from .settings import CodecSettings

# bitsandbytes has no type annotations to check against.
bnb: Any = bitsandbytes.functional

MAX_ELEMENTS = 2**31 - 1
"""bitsandbytes' kernels take the number of weights as an int32."""

LARGEST = 1e30
"""Weights from here on are not packed: the sum of their blocks' maxima, of which double
quantization takes the mean, may exceed float32, and every block would decode to NaN."""

# Weights packed or decoded in one piece. The CPU path needs about 20 bytes of temporaries a weight,
# the others half a byte, so that either chunk stays within some megabytes.
_CPU_CHUNK = 2**17
_DEVICE_CHUNK = 2**24


def first_nonfinite(weight: Tensor, limit: float = math.inf) -> tuple[int, ...] | None:
    """Return the index of the first NaN or inf in row-major order, None where all is finite.

    What is not below `limit` in size counts as inf.

    It reads the weight once, in pieces, with small temporaries only: minimum and maximum propagate
    NaN. A finite weight costs one synchronisation with the device.
    """
    weight = weight.detach()
    step = _chunk_elements(weight.device)
    extremes = [torch.stack(torch.aminmax(chunk)) for chunk in _flat_chunks(weight, step, 1)]
    if bool(are_below(torch.stack(extremes), limit).all()):
        return None
    start = 0
    for chunk in _flat_chunks(weight, step, 1):
        nonfinite = torch.nonzero(~are_below(chunk, limit))
        if len(nonfinite):
            flat = start + int(nonfinite[0])
            return tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), weight.shape))
        start += chunk.numel()
    return None


def are_below(values: Tensor, limit: float = LARGEST) -> Tensor:
    """Return which values are finite, and below `limit` in size."""
    wide = torch.promote_types(values.dtype, torch.float32)  # float16 has no 1e30
    return values.to(wide).abs() < limit


def pack(
    weight: Tensor, settings: CodecSettings, mean: Callable[[Tensor], Tensor] = torch.mean
) -> PackedWeight:
    """Pack a weight `(..., rows, columns)`; the result equals bitsandbytes' own, bit for bit.

    Its int8 kernel for CUDA takes float16 only, so that other dtypes are cast to float16 there, as
    its own `Int8Params` does. `mean` is as for `Packer`. A weight that cannot be packed is an
    `UnsupportedWeightError`.
    """
    reason = why_not(weight, settings)
    if reason is not None:
        raise UnsupportedWeightError(f"The weight {reason}.")
    packer = Packer(weight.shape, weight.dtype, weight.device, settings, mean)
    packer.add(weight)
    return packer.finish()


class Packer:
    """Packs a weight that arrives in pieces, so that it need never be whole in memory.

    The result equals `pack` of the whole weight bit for bit, wherever it was cut: blocks that
    straddle two pieces are held back until they are full. It takes memory for the packed form, and
    with double quantization for the fp32 absmax until `finish`. Pieces on other devices are moved.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        settings: CodecSettings,
        mean: Callable[[Tensor], Tensor] = torch.mean,
    ) -> None:
        """`mean` gives the mean of the absmax of the weight that this is, or is a part of."""
        self.shape, self.dtype, self.device = torch.Size(shape), dtype, torch.device(device)
        self.settings, self._mean = settings, mean
        self._int8 = settings.kind == "int8"
        self._unit = self.shape[-1] if self._int8 else settings.blocksize
        self._step = max(_chunk_elements(self.device), self._unit)
        self._specs = packed_tensors(self.shape, settings)
        scales = cast(int, self._specs[SCALES if self._int8 else ABSMAX].numel)
        kind = torch.int8 if self._int8 else torch.uint8
        self._codes = torch.empty(self._specs[CODES].nbytes, dtype=kind, device=self.device)
        self._scales = torch.empty(scales, dtype=torch.float32, device=self.device)
        self._rest = torch.empty(0, dtype=dtype, device=self.device)
        self._done = 0

    @torch.no_grad()
    def add(self, piece: Tensor) -> None:
        """Pack the next weights in row-major order: `(n, ...)` rows of the first dimension."""
        piece = piece.detach().to(self.device, self.dtype)
        if len(self._rest):
            piece = piece.reshape(-1)
            missing = self._unit - len(self._rest)
            self._hold(torch.cat([self._rest, piece[:missing]]))
            piece = piece[missing:]
        if piece.numel():
            for chunk in _flat_chunks(piece, self._step, self._unit):
                self._hold(chunk)

    @torch.no_grad()
    def finish(self) -> PackedWeight:
        """Return the packed weight; raise where weights are missing, or too large for float16."""
        if len(self._rest):
            self._take(self._rest)
        if self._done != math.prod(self.shape):
            raise ValueError(f"{self._done} weights came for a weight of shape {tuple(self.shape)}")
        settings, codes, scales = self.settings, self._codes, self._scales
        if self._int8:
            if self.dtype != torch.float16 and not bool(scales.isfinite().all()):
                row = int(torch.nonzero(~scales.isfinite())[0])
                raise UnsupportedWeightError(
                    f"Row {row} of the weight holds values that float16 cannot, which "
                    "bitsandbytes' int8 kernel takes on this device: pack it to 4 bit, or on the "
                    "CPU."
                )
            codes = codes.view(self.shape)
            return PackedWeight(codes, scales, None, 0, None, self.shape, "int8", self.dtype)
        nested = None
        if settings.double_quant:
            scales, nested = nest_absmax(scales, self._mean(scales))
        codes = codes.view(settings.storage_dtype).unsqueeze(1)
        table = bnb.get_4bit_type(settings.kind, device=self.device)
        return PackedWeight(
            codes, scales, table, self._unit, nested, self.shape, settings.kind, self.dtype,
            settings.compute_dtype,
        )  # fmt: skip

    def _hold(self, chunk: Tensor) -> None:
        """Pack the whole units of a flat chunk, and keep the rest for the next piece."""
        whole = len(chunk) // self._unit * self._unit
        if whole:
            self._take(chunk[:whole])
        self._rest = chunk[whole:].clone()

    def _take(self, chunk: Tensor) -> None:
        start, end = self._done, self._done + len(chunk)
        if end > math.prod(self.shape):
            raise ValueError(f"more weights came than shape {tuple(self.shape)} has")
        if self._int8:
            rows = chunk.view(-1, self._unit)
            if self.device.type == "cuda":
                rows = rows.half()
            codes, scales, _ = torch.ops.bitsandbytes.int8_vectorwise_quant.default(rows, 0.0)
            self._codes[start:end] = codes.view(-1)
        else:
            codes, scales = torch.ops.bitsandbytes.quantize_4bit.default(
                chunk, self._unit, self.settings.kind, torch.uint8
            )
            self._codes[start // 2 : start // 2 + len(codes)] = codes.view(-1)
        first = start // self._unit
        self._scales[first : first + len(scales)] = scales
        self._done = end


def nest_absmax(absmax: Tensor, offset: Tensor) -> tuple[Tensor, NestedAbsmax]:
    """Return the uint8 codes of fp32 absmax, which are overwritten, and their second level."""
    codes, state = bnb.quantize_blockwise(absmax.sub_(offset), blocksize=NESTED_BLOCK)
    return codes, NestedAbsmax(state.code, state.absmax, offset, state.blocksize)


def restore(
    tensors: Mapping[str, Tensor],
    shape: Sequence[int],
    dtype: torch.dtype | None,
    settings: CodecSettings,
) -> PackedWeight:
    """Return the packed weight that a state dict's tensors hold; copy nothing.

    `tensors` are by their key's end: "" for the codes, ".absmax" or ".SCB". `dtype` is that of the
    decoded weight, which a record must name where there is one; None leaves it to that. A
    ValueError says, to follow the weight's name, what is not of this shape and these settings.
    """
    problem = next(problems(tensors, shape, settings, dtype), None)
    if problem is not None:
        raise ValueError(problem)
    shape, codes = torch.Size(shape), tensors[CODES]
    stats = {end: tensor.to(codes.device) for end, tensor in tensors.items() if end != CODES}
    if settings.kind == "int8":
        assert dtype is not None
        return PackedWeight(codes, stats[SCALES], None, 0, None, shape, "int8", dtype)
    if settings.kind == "mxfp4":
        assert dtype is not None
        return microscaled(codes, stats[EXPONENTS], shape, dtype, settings)
    said = read_record(stats[RECORD + settings.kind])
    nested = None
    if settings.double_quant:
        offset = torch.tensor(said["nested_offset"], dtype=torch.float32, device=codes.device)
        nested = NestedAbsmax(stats[NESTED_TABLE], stats[NESTED_ABSMAX], offset, NESTED_BLOCK)
    return PackedWeight(
        codes, stats[ABSMAX], stats[TABLE], settings.blocksize, nested, shape, settings.kind,
        getattr(torch, said["dtype"]), settings.compute_dtype,
    )  # fmt: skip


def microscaled(
    codes: Tensor,
    exponents: Tensor,
    shape: Sequence[int],
    dtype: torch.dtype,
    settings: CodecSettings,
) -> PackedWeight:
    """Return the MXFP4 weight of these codes and e8m0 bytes (format.py), which are not copied."""
    table = torch.tensor(TABLES["mxfp4"], device=codes.device)
    return PackedWeight(
        codes, exponents, table, MX_BLOCK, power_scales(codes.device), torch.Size(shape), "mxfp4",
        dtype, settings.compute_dtype, stored_transposed=settings.stored_transposed,
    )  # fmt: skip


def unpack(packed: PackedWeight) -> Tensor:
    """Dequantize a whole weight in its original shape and dtype."""
    return unpack_range(packed, 0, packed.shape[0])


def unpack_range(
    packed: PackedWeight, start: int, stop: int, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Dequantize the rows `[start, stop)` of the first dimension: `(stop - start, ...)`.

    The result equals, bit for bit, the same slice of the whole dequantized weight, then cast to
    `dtype` (None: the packed weight's own), also where blocks straddle the ends. It never waits for
    the device. Of a weight that is stored transposed it is a transposed view.
    """
    if not 0 <= start <= stop <= packed.shape[0]:
        raise IndexError(f"rows [{start}, {stop}) are not within the shape {tuple(packed.shape)}")
    require_whole(packed)
    if packed.stored_transposed and len(packed.shape) > 2:
        return unpack_range(packed.as_stored(), start, stop, dtype=dtype).transpose(-1, -2)
    shape, dtype = (stop - start, *packed.shape[1:]), dtype or packed.dtype
    row = packed.numel // packed.shape[0]
    first, last = start * row, stop * row
    by_bnb = packed.kind in ("nf4", "fp4")
    decode, unit = _DECODERS[packed.kind], packed.blocksize or packed.shape[-1]
    chunk = _chunk_elements(packed.device)
    # int8 and mxfp4 decode by way of two fp32 copies, which only a chunk may cost.
    limit = (MAX_ELEMENTS if by_bnb else chunk) - 2 * unit
    with torch.no_grad():
        if last - first <= limit:
            return decode(packed, first, last).view(shape).to(dtype)
        out = torch.empty(shape, dtype=dtype, device=packed.device)
        flat = out.view(-1)
        step = max(chunk // unit - 2, 1) * unit
        position = first
        while position < last:
            # All chunks but the first start on a block boundary, so that no block is decoded twice.
            end = min(position - position % unit + step, last)
            flat[position - first : end - first].copy_(decode(packed, position, end))
            position = end
    return out


def require_whole(packed: PackedWeight) -> None:
    """Raise where an engine has not gathered the weight's tensors."""
    if packed.is_share:
        raise QuantizationError(
            f"{packed.name or f'The packed weight of shape {tuple(packed.shape)}'} is sharded and "
            "not gathered now: call the model that was given to fully_shard or DeepSpeed, which "
            "gathers each layer for its forward, not a part of it."
        )


def _decode_4bit(packed: PackedWeight, first: int, last: int) -> Tensor:
    """Decode the weights [first, last) of the flattened weight, in its own dtype."""
    block = packed.blocksize
    begin, blocks = first // block, cdiv(last, block)
    end = min(blocks * block, packed.numel)
    codes = packed.codes.detach().view(-1).view(torch.uint8)[begin * block // 2 : (end + 1) // 2]
    absmax = first_level_absmax(packed, begin, blocks)
    if packed.device.type != "cpu":
        flat = _kernel(packed, codes, absmax, (end - begin * block,))
    else:
        # One block as one row: see the module's docstring. A last block that is not full is a
        # separate row of even length, since the kernel falls back to a compiled path for odd ones.
        full = (end - begin * block) // block
        rest = end - begin * block - full * block
        flat = _kernel(packed, codes[: full * block // 2], absmax[:full], (full, block)).view(-1)
        if rest:
            tail = _kernel(packed, codes[full * block // 2 :], absmax[full:], (1, rest + rest % 2))
            flat = torch.cat([flat, tail.view(-1)[:rest]]) if full else tail.view(-1)[:rest]
    return flat[first - begin * block : last - begin * block]


def _kernel(packed: PackedWeight, codes: Tensor, absmax: Tensor, shape: tuple[int, ...]) -> Tensor:
    decoded = torch.ops.bitsandbytes.dequantize_4bit.default(
        codes, absmax, packed.blocksize, packed.kind, shape, packed.dtype
    )
    return cast(Tensor, decoded)


def first_level_absmax(packed: PackedWeight, begin: int, end: int) -> Tensor:
    """Return the fp32 absmax of the first-level blocks [begin, end)."""
    if packed.nested is None:
        return packed.absmax[begin:end].float()
    return decode_absmax(packed.absmax, packed.nested, begin, end)


def decode_absmax(codes: Tensor, nested: NestedAbsmax, begin: int, end: int) -> Tensor:
    """Return the fp32 absmax [begin, end) of uint8 ones, decoded by their second level."""
    if nested.blocksize == ALL_BLOCKS:  # larger than bitsandbytes' kernels take
        return nested.table[codes[begin:end].int()] * nested.absmax + nested.offset
    first, last = begin // nested.blocksize, cdiv(end, nested.blocksize)
    start = first * nested.blocksize
    absmax = torch.ops.bitsandbytes.dequantize_blockwise.default(
        codes[start : last * nested.blocksize],
        nested.absmax[first:last],
        nested.table,
        nested.blocksize,
        torch.float32,
    )
    absmax += nested.offset
    return cast(Tensor, absmax[begin - start : end - start])


def _decode_mxfp4(packed: PackedWeight, first: int, last: int) -> Tensor:
    """Decode the weights [first, last) of the flattened weight, rounded once, to its own dtype."""
    begin, end = first // MX_BLOCK, cdiv(last, MX_BLOCK)
    half = MX_BLOCK // 2
    codes = packed.codes.detach().view(-1)[begin * half : end * half]
    table = cast(Tensor, packed.table)
    pairs = torch.stack([table.repeat_interleave(16), table.repeat(16)], 1)  # of each byte
    values = pairs[codes.int()].view(-1, MX_BLOCK)
    values *= first_level_absmax(packed, begin, end)[:, None]
    flat = values.to(packed.dtype).view(-1)
    return flat[first - begin * MX_BLOCK : last - begin * MX_BLOCK]


def _decode_int8(packed: PackedWeight, first: int, last: int) -> Tensor:
    """Decode the weights [first, last) of the flattened weight; both are whole rows."""
    columns = packed.shape[-1]
    rows = packed.codes.detach().view(-1, columns)[first // columns : last // columns]
    scales = packed.absmax[first // columns : last // columns]
    decoded = torch.ops.bitsandbytes.int8_vectorwise_dequant.default(rows, scales)
    return cast(Tensor, decoded.to(packed.dtype)).view(-1)


_DECODERS = {
    "nf4": _decode_4bit,
    "fp4": _decode_4bit,
    "mxfp4": _decode_mxfp4,
    "int8": _decode_int8,
}


def _chunk_elements(device: torch.device) -> int:
    return min(_CPU_CHUNK if device.type == "cpu" else _DEVICE_CHUNK, MAX_ELEMENTS)


def _flat_chunks(weight: Tensor, step: int, unit: int) -> Iterator[Tensor]:
    """Cut a weight, in row-major order, into flat pieces of whole `unit`s, of about `step` weights.

    They are views of a contiguous weight; otherwise copies of a few rows of the first dimension at
    a time. Only the last piece may end within a unit.
    """
    step = max(step // unit, 1) * unit
    if weight.is_contiguous():
        yield from torch.split(weight.view(-1), step)
        return
    rows = max(step * len(weight) // weight.numel(), 1)
    pending = weight.new_empty(0)
    for part in torch.split(weight, rows):
        flat = part.reshape(-1)
        if len(pending):
            flat = torch.cat([pending, flat])
        whole = len(flat) // unit * unit
        if whole:
            yield from torch.split(flat[:whole], step)
        pending = flat[whole:].clone()
    if len(pending):
        yield pending
