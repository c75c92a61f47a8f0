"""Packs weights into bitsandbytes' formats, and dequantizes any range of their experts.

A weight is packed in row-major order, bit for bit as by bitsandbytes' `functional.quantize_4bit`
and `int8_vectorwise_quant`, but chunk by chunk: that needs little more memory than the packed form,
and a tensor may have more than 2**31 - 1 weights, where bitsandbytes' int32 counts overflow.

Decoding on the CPU shows one block as one row to bitsandbytes' AVX-512 kernel (0.50.2), which looks
up the absmax by row, and is wrong wherever a row is not a whole number of blocks.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ..errors import QuantizationError, UnsupportedWeightError
from ..kernels.weights import PackedWeight
from .codecs import CODES, codec_of
from .settings import CodecSettings, packed_tensors, problems, why_not

MAX_ELEMENTS = 2**31 - 1  # bitsandbytes' kernels take the number of weights as an int32
LARGEST = 1e30
"""Weights of this size and above are not packed: the sum of their blocks' maxima, which double
quantization averages, may exceed float32, and every block would decode to NaN."""

# Weights packed or decoded in one piece: 20 bytes of temporaries a weight, half a byte on GPUs.
_CPU_CHUNK = 2**17
_DEVICE_CHUNK = 2**24


def first_nonfinite(weight: Tensor, limit: float = math.inf) -> tuple[int, ...] | None:
    """Return the index of the first value in row-major order that is NaN, or not below `limit`."""
    weight = weight.detach()
    step = _chunk_elements(weight.device)
    extremes = [torch.stack(torch.aminmax(chunk)) for chunk in _flat_chunks(weight, step)]
    if bool(are_below(torch.stack(extremes), limit).all()):
        return None
    start = 0
    for chunk in _flat_chunks(weight, step):
        nonfinite = torch.nonzero(~are_below(chunk, limit))
        if len(nonfinite):
            flat = start + int(nonfinite[0])
            return tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), weight.shape))
        start += chunk.numel()
    return None


def are_below(values: Tensor, limit: float = LARGEST) -> Tensor:
    """Return which values are finite, and below `limit` in size."""
    wide = torch.promote_types(values.dtype, torch.float32)  # 1e30 overflows float16
    return values.to(wide).abs() < limit


def pack(weight: Tensor, settings: CodecSettings) -> PackedWeight:
    """Pack a weight `(..., rows, columns)` as bitsandbytes does, bit for bit."""
    reason = why_not(weight, settings)
    if reason is not None:
        raise UnsupportedWeightError(f"The weight {reason}.")
    packer = Packer(weight.shape, weight.dtype, weight.device, settings)
    packer.add(weight)
    return packer.finish()


class Packer:
    """Packs a weight that arrives in pieces as `pack` does the whole, wherever it was cut."""

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device,
        settings: CodecSettings,
    ) -> None:  # fmt: skip
        self.shape, self.dtype, self.device = torch.Size(shape), dtype, torch.device(device)
        self.settings = settings
        self._codec = settings.codec
        self._unit = self._codec.unit(self.shape, settings)
        self._step = max(_chunk_elements(self.device) // self._unit, 1) * self._unit
        specs, units = packed_tensors(shape, settings), -(-math.prod(shape) // self._unit)
        self._codes = torch.empty(specs[CODES].nbytes, dtype=torch.uint8, device=self.device)
        self._scales = torch.empty(units, dtype=self._codec.scale_dtype, device=self.device)
        self._rest = torch.empty(0, dtype=dtype, device=self.device)
        self._done = 0

    @torch.no_grad()
    def add(self, piece: Tensor) -> None:
        """Pack the next weights in row-major order: `(n, ...)` rows of the first dimension."""
        piece = piece.detach().to(self.device, self.dtype)
        for chunk in _flat_chunks(piece, self._step) if piece.numel() else ():
            flat = torch.cat([self._rest, chunk]) if len(self._rest) else chunk
            whole = len(flat) // self._unit * self._unit
            self._take(flat[:whole])
            self._rest = flat[whole:].clone()

    @torch.no_grad()
    def finish(self) -> PackedWeight:
        self._take(self._rest)
        assert self._done == math.prod(self.shape), (self._done, self.shape)
        return self._codec.finish(self._codes, self._scales, self.shape, self.dtype, self.settings)

    def _take(self, chunk: Tensor) -> None:
        if not len(chunk):
            return
        assert self._done + len(chunk) <= math.prod(self.shape), self.shape
        codes, scales = self._codec.quantize(chunk, self._unit)
        at, first = self._done * self._codec.bits // 8, self._done // self._unit
        self._codes[at : at + codes.numel()] = codes.view(torch.uint8).view(-1)
        self._scales[first : first + len(scales)] = scales
        self._done += len(chunk)


def restore(
    tensors: Mapping[str, Tensor], shape: Sequence[int], dtype: torch.dtype | None,
    settings: CodecSettings,
) -> PackedWeight:  # fmt: skip
    """Return the packed weight of a state dict's tensors, by their key's end; copy nothing.

    `dtype` is the decoded weight's, and a record must agree with it; None: the record's. A
    ValueError, to follow the weight's name, where a tensor does not match shape and settings.
    """
    problem = next(problems(tensors, shape, settings, dtype), None)
    if problem is not None:
        raise ValueError(problem)
    device = tensors[CODES].device
    moved = {end: tensor.to(device) for end, tensor in tensors.items()}
    return settings.codec.assemble(moved, shape, dtype, settings)


def unpack(packed: PackedWeight) -> Tensor:
    """Dequantize a whole weight."""
    return unpack_range(packed, 0, packed.shape[0])


def unpack_range(
    packed: PackedWeight, start: int, stop: int, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Dequantize the rows `[start, stop)` of the first dimension: `(stop - start, ...)`.

    The result equals, bit for bit, that slice of the whole weight, then cast to `dtype` (None: its
    own). It never waits for the device. For a weight stored transposed it is a transposed view.
    """
    assert 0 <= start <= stop <= packed.shape[0], (start, stop, packed.shape)
    require_whole(packed)
    if packed.stored_transposed and len(packed.shape) > 2:
        return unpack_range(packed.as_stored(), start, stop, dtype=dtype).transpose(-1, -2)
    shape, dtype = (stop - start, *packed.shape[1:]), dtype or packed.dtype
    row = packed.numel // packed.shape[0]
    first, last = start * row, stop * row
    codec, unit = codec_of(packed.kind), packed.blocksize or packed.shape[-1]
    decode, chunk = codec.decode, _chunk_elements(packed.device)
    # Others decode through fp32 copies, of a chunk at a time.
    limit = (MAX_ELEMENTS if codec.decodes_whole else chunk) - 2 * unit
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
        name = getattr(packed.origin, "name", "")
        raise QuantizationError(
            f"{name or f'The packed weight of shape {tuple(packed.shape)}'} is sharded and "
            "not gathered now: call the model that was given to fully_shard or DeepSpeed, which "
            "gathers each layer for its forward, not a part of it."
        )


def _chunk_elements(device: torch.device) -> int:
    return min(_CPU_CHUNK if device.type == "cpu" else _DEVICE_CHUNK, MAX_ELEMENTS)


def _flat_chunks(weight: Tensor, step: int) -> Iterator[Tensor]:
    """Cut a weight, in row-major order, into flat pieces of at most `step` weights."""
    rows = max(step * len(weight) // weight.numel(), 1) if not weight.is_contiguous() else None
    for part in (weight,) if rows is None else weight.split(rows):
        yield from part.reshape(-1).split(step)
