"""The modules that own a packed weight's statistics and dequantize its codes.

    layout       codes (`.original`)             decoder (`[0]`)     statistics
    compact      4-bit: bnb.nn.Params4bit        Packed4bit          a QuantState on the codes
                 others: nn.Parameter            PackedScales        buffer: the scales' bits
    shardable    4-bit: PackedCodes, uint8       Shardable4bit       uint8 parameters
                 others: nn.Parameter, flat      PackedScales        parameter: the scales' bits

"4-bit" are codecs with `in_quant_state`; the others are int8 and users' codecs. A single process
uses the compact layout, a distributed run the shardable one (sharding.py). No statistic is a
floating-point parameter, or an fp32 buffer: trainers and mixed precision cast these. bitsandbytes'
own code uses its `QuantState`, which shares a `PackedWeight`'s tensors; for a kind that
bitsandbytes does not know it only carries them.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any, cast

import bitsandbytes.functional
import bitsandbytes.nn
import torch
from bitsandbytes.nn import parametrize as bnb_parametrize
from torch import Tensor, nn

from ..errors import QuantizationError
from ..kernels.weights import NestedAbsmax, PackedWeight
from .codec import unpack
from .codecs import codec_of

bnb: Any = bitsandbytes.nn  # no type annotations to check against
Params4bit = bnb.Params4bit

_serials = itertools.count(1)
_QuantState: Any = cast(Any, bitsandbytes.functional).QuantState
_TRANSPOSED = "stored_transposed"


class Packed4bit(bnb_parametrize.Bnb4bitParametrization):
    """Dequantizes a 4-bit weight on access.

    Unlike the class it extends it supports more than 2**31 - 1 weights and any row length. Its
    statistics are those of the codes' own `Params4bit`.
    """

    quant_state: Any

    def __init__(self, codes: nn.Parameter, compute_dtype: torch.dtype | None = None) -> None:
        super().__init__(cast(Any, codes).quant_state)
        self.compute_dtype, self._serial = compute_dtype, next(_serials)
        self.storage_dtype: torch.dtype = codes.dtype
        self.stored_transposed = bool(self.quant_state.__dict__.get(_TRANSPOSED))

    @torch.no_grad()
    def forward(self, quantized_param: Tensor) -> Tensor:
        """Dequantize `(bytes / itemsize, 1)` codes to the weight's shape and dtype."""
        return unpack(read(quantized_param, self))


class ShardableDecoder(nn.Module):
    """Dequantizes a weight on access, whose statistics may be parameters; its description."""

    def __init__(self, packed: PackedWeight) -> None:
        nn.Module.__init__(self)
        self.weight_shape, self.weight_dtype = torch.Size(packed.shape), packed.dtype
        self.kind, self.blocksize = packed.kind, packed.blocksize
        self.compute_dtype, self._serial = packed.compute_dtype, next(_serials)

    def packed(self, codes: Tensor) -> PackedWeight:
        """Return the packed weight of these codes; of a local shard, valid but for its tensors."""
        raise NotImplementedError

    @torch.no_grad()
    def forward(self, codes: Tensor) -> Tensor:
        """Dequantize codes to the weight's shape and dtype; for a shard, the result is on meta."""
        if is_share(codes):
            return torch.empty(self.weight_shape, dtype=self.weight_dtype, device="meta")
        return unpack(read(codes, self))


class PackedScales(ShardableDecoder):
    """Codes and scales: `scale_bits` are the scales as integers, int32 for the fp32 ones of int8.

    They are a buffer in the compact layout and a parameter in the shardable one.
    """

    scale_bits: Tensor

    def __init__(self, packed: PackedWeight) -> None:
        super().__init__(packed)
        self.register_buffer("scale_bits", as_bits(packed.absmax), persistent=False)

    def packed(self, codes: Tensor) -> PackedWeight:
        owner = codes if isinstance(codes, nn.Parameter) else None
        raw, scales, shape = codes.detach(), self.scale_bits.detach(), self.weight_shape
        if not is_share(codes) and not is_share(self.scale_bits):
            codec = codec_of(self.kind)
            raw, scales = raw.view(codec.codes_shape(shape)), scales.view(codec.scale_dtype)
        return PackedWeight(
            raw, scales, None, self.blocksize, None, shape, self.kind, self.weight_dtype,
            self.compute_dtype, owner,
        )  # fmt: skip


def as_bits(scales: Tensor) -> Tensor:
    """View scales as integers of their size, which no engine casts."""
    return scales.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[scales.itemsize])


class ShardableStatistics(ShardableDecoder):
    """The statistics of a 4-bit weight, as uint8 parameters that an engine shards and none casts.

        absmax   `(blocks,)` with double quantization, else `(4 blocks,)`, the bits of fp32 absmax
        nested   with double quantization: the bits of fp32 offset, three zeros, nested absmax;
                 mxfp4, whose absmax are e8m0 bytes, has it with the one outer scale 1
        tables   buffer that is not saved: the bits of the fp32 code tables

    The zeros align each part to 16 bytes for the kernels. Codes are uint8 `(bytes, 1)`.
    """

    absmax: Tensor
    nested: Tensor
    tables: Tensor

    def __init__(self, packed: PackedWeight) -> None:
        super().__init__(packed)
        self.storage_dtype, self.stored_transposed = packed.codes.dtype, packed.stored_transposed
        self.double_quant = packed.nested is not None
        self.nested_blocksize = 0 if packed.nested is None else packed.nested.blocksize
        tables = [cast(Tensor, packed.table)]
        absmax = packed.absmax
        if packed.nested is not None:
            tables.append(packed.nested.table)
            offset = packed.nested.offset.reshape(1)
            parts = [offset, offset.new_zeros(3), packed.nested.absmax]
            nested = torch.cat(parts).view(torch.uint8)
            self.nested = nn.Parameter(nested, requires_grad=False)
        else:
            absmax = absmax.view(torch.uint8)
        self.absmax = nn.Parameter(absmax, requires_grad=False)
        self.register_buffer("tables", torch.cat(tables).view(torch.uint8), persistent=False)

    def parts(self) -> tuple[Tensor | None, ...]:
        """Return views: absmax, its table and, else None, offset, nested absmax and their table."""
        tables = self.tables.view(torch.float32)
        absmax = self.absmax.detach()
        if not self.double_quant:
            return absmax.view(torch.float32), tables, None, None, None
        floats = self.nested.detach().view(torch.float32)
        return absmax, tables[:16], floats[0], floats[4:], tables[16:]

    def packed(self, codes: Tensor) -> PackedWeight:
        if codes.dtype != torch.uint8:
            raise QuantizationError(
                f"The packed codes of a weight of shape {tuple(self.weight_shape)} were cast from "
                f"torch.uint8 to {codes.dtype}, which destroys them: load the model again."
            )
        owner = codes if isinstance(codes, nn.Parameter) else None
        raw, nested = codes.detach(), None
        if is_share(self.absmax) or is_share(codes):
            absmax, table = self.absmax.detach(), self.tables
            raw = torch.empty((0, 1), dtype=self.storage_dtype, device=codes.device)
            if self.double_quant:
                bits = self.nested.detach()
                nested = NestedAbsmax(self.tables, bits, bits, self.nested_blocksize)
        else:
            absmax, table, offset, inner, inner_table = cast(Any, self.parts())
            if self.double_quant:
                nested = NestedAbsmax(inner_table, inner, offset, self.nested_blocksize)
            if self.storage_dtype != torch.uint8:
                raw = raw.view(-1).view(self.storage_dtype).unsqueeze(1)
        return PackedWeight(
            raw, absmax, table, self.blocksize, nested, self.weight_shape, self.kind,
            self.weight_dtype, self.compute_dtype, owner,
            stored_transposed=self.stored_transposed,
        )  # fmt: skip

    @property
    def quant_state(self) -> Any:
        """A bitsandbytes `QuantState` of views of the statistics, for its own code."""
        return to_quant_state(self.packed(torch.empty((0, 1), dtype=torch.uint8)))


class Shardable4bit(ShardableStatistics, bnb_parametrize.Bnb4bitParametrization):
    """The same as a parametrization of bitsandbytes'."""


class PackedCodes(Params4bit):  # type: ignore[misc, valid-type]
    """Codes whose statistics are parameters too: uint8, for any storage dtype.

    Counted as `Params4bit` by isinstance. Not of that name: accelerate (1.15, fsdp2_prepare_model)
    leaves uint8 parameters of a class called "Params4bit" out of the sharding.
    """

    # Chunks and copies are plain tensors, as those of any nn.Parameter.
    __torch_function__ = torch._C._disabled_torch_function_impl

    @property
    def quant_state(self) -> Any:
        """The statistics as bitsandbytes' `QuantState`; None before the first read."""
        reference = self.__dict__.get("_statistics")
        statistics = None if reference is None else reference()
        return None if statistics is None else statistics.quant_state

    @quant_state.setter
    def quant_state(self, value: Any) -> None:
        self.__dict__["quant_state"] = None  # which Params4bit's copies look up

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Move to another device; ignore a dtype, since codes are no numbers."""
        device, _, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        return self.detach().to(device=device, non_blocking=non_blocking)


def is_share(tensor: Tensor) -> bool:
    """Whether an engine has sharded this parameter: FSDP2's DTensor, or ZeRO-3's."""
    return hasattr(tensor, "device_mesh") or (hasattr(tensor, "ds_id") and tensor.numel() == 0)


def is_shardable(decoder: Any) -> bool:
    """Whether a packed weight is in the shardable layout."""
    if isinstance(decoder, PackedScales):
        return "scale_bits" in decoder._parameters
    return isinstance(decoder, ShardableStatistics)


OWN_DECODERS = (Packed4bit, ShardableDecoder)


def read(codes: Tensor, decoder: Any) -> PackedWeight:
    """Return the packed weight of these codes and their decoder; nothing is dequantized or copied.

    Codes that were cast to another dtype, which destroys them, are an error.
    """
    if isinstance(decoder, ShardableDecoder):
        if isinstance(codes, PackedCodes):
            codes.__dict__["_statistics"] = weakref.ref(decoder)
        packed = decoder.packed(codes)
    else:
        state = codes.__dict__.get("quant_state") if isinstance(codes, Params4bit) else None
        if state is None:
            state = decoder.quant_state
        elif state is not decoder.quant_state:
            decoder.quant_state = state
        if state.absmax.device != codes.device and not codes.is_meta:
            state.to(codes.device)
        # Codes gathered by FSDP2 are no Params4bit: the decoder has their dtype.
        storage = decoder.__dict__.get("storage_dtype")
        if storage is not None and codes.dtype != storage:
            raise QuantizationError(
                f"The packed codes of a weight of shape {tuple(state.shape)} were cast from "
                f"{storage} to {codes.dtype}, which destroys them: do not cast a packed model, or "
                "set bnb_4bit_quant_storage=torch.uint8, which casts leave alone."
            )
        compute = getattr(decoder, "compute_dtype", None)
        owner = codes if isinstance(codes, nn.Parameter) else None
        packed = from_quant_state(codes.data, state, compute, owner)
    packed.serial, packed.name = getattr(decoder, "_serial", None), getattr(decoder, "name", "")
    return packed


def params4bit(codes: Tensor, state: Any) -> nn.Parameter:
    """Return packed 4-bit codes as bitsandbytes' parameter class, with their `QuantState`."""
    parameter = Params4bit(
        codes,
        requires_grad=False,
        quant_state=state,
        blocksize=state.blocksize,
        compress_statistics=state.nested,
        quant_type=state.quant_type,
        quant_storage=codes.dtype,
        bnb_quantized=True,
    )
    return cast(nn.Parameter, parameter)


def packed_codes(packed: PackedWeight, statistics: ShardableStatistics) -> nn.Parameter:
    """Return the parameter of a 4-bit weight's codes, `(bytes, 1)` uint8."""
    parameter = PackedCodes(
        packed.codes.detach().view(-1).view(torch.uint8).unsqueeze(1),
        requires_grad=False,
        blocksize=packed.blocksize,
        compress_statistics=packed.nested is not None,
        quant_type=packed.kind,
        quant_storage=torch.uint8,
        bnb_quantized=True,
    )
    parameter.__dict__["_statistics"] = weakref.ref(statistics)
    return cast(nn.Parameter, parameter)


def hold(packed: PackedWeight) -> nn.Parameter:
    """Return the parameter of this weight's codes, created on first use."""
    if packed.owner is None:
        if codec_of(packed.kind).in_quant_state:
            packed.owner = params4bit(packed.codes, to_quant_state(packed))
        else:
            packed.owner = nn.Parameter(packed.codes, requires_grad=False)
        packed.codes = packed.owner.data
    return packed.owner


def from_quant_state(
    codes: Tensor,
    state: Any,
    compute_dtype: torch.dtype | None = None,
    owner: nn.Parameter | None = None,
) -> PackedWeight:
    """Return the packed weight of 4-bit codes and their `QuantState`; copies nothing."""
    nested = None
    if state.nested:
        inner = state.state2
        nested = NestedAbsmax(inner.code, inner.absmax, state.offset, inner.blocksize)
    return PackedWeight(
        codes, state.absmax, state.code, state.blocksize, nested, state.shape, state.quant_type,
        state.dtype, compute_dtype, owner, stored_transposed=bool(state.__dict__.get(_TRANSPOSED)),
    )  # fmt: skip


def to_quant_state(packed: PackedWeight) -> Any:
    """Return a `QuantState` of a 4-bit weight's statistics; copies nothing."""
    offset = inner = None
    if packed.nested is not None:
        table, absmax, offset, blocksize = packed.nested
        inner = _QuantState(absmax=absmax, code=table, blocksize=blocksize, dtype=torch.float32)
    state = _QuantState(
        absmax=packed.absmax,
        shape=torch.Size(packed.shape),
        code=packed.table,
        blocksize=packed.blocksize,
        quant_type=packed.kind,
        dtype=packed.dtype,
        offset=offset,
        state2=inner,
    )
    if packed.stored_transposed:
        setattr(state, _TRANSPOSED, True)
    return state


def state_tensors(state: Any) -> list[Tensor]:
    """Return every tensor of a `QuantState`, nested ones included."""
    tensors = [state.absmax, state.code]
    if state.nested:
        tensors += [state.offset, state.state2.absmax, state.state2.code]
    return [tensor for tensor in tensors if isinstance(tensor, Tensor)]
