"""The modules that own a packed weight's statistics and dequantize its codes.

    codes (`.original`)                 decoder (`[0]`)    its statistics
    4-bit: bnb.nn.Params4bit            Packed4bit         absmax, nested, tables
    others: nn.Parameter                PackedScales       scale_bits

"4-bit" are codecs with `in_quant_state`; the others are int8 and users' codecs. Statistics are
integers, as bits of what they stand for: trainers and mixed precision cast floating-point
parameters, and fp32 buffers. They are buffers that are not saved, so that torch moves and copies
them; for engines of many GPUs, which shard parameters only, sharding.py makes parameters of all but
the tables, and `(bytes, 1)` of the codes. bitsandbytes' own code finds a `QuantState` on decoder
and codes, which reads the decoder; for a kind that bitsandbytes does not know it only carries them.
"""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Callable, Mapping
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
QuantState: Any = cast(Any, bitsandbytes.functional).QuantState
_HELD = "_moe_qlora_decoder"  # of codes that are no `Params4bit`


def bits_of(packed: PackedWeight) -> dict[str, Tensor]:
    """Return a weight's statistics by name, as its decoder has them."""
    if not codec_of(packed.kind).in_quant_state:
        return {"scale_bits": as_bits(packed.absmax)}
    nested, bits = packed.nested, {"absmax": packed.absmax.view(torch.uint8)}
    tables = [cast(Tensor, packed.table)]
    if nested is not None:
        offset = nested.offset.reshape(1)
        floats = torch.cat([offset, offset.new_zeros(3), nested.absmax])
        bits["nested"] = floats.view(torch.uint8)
        tables.append(nested.table)
    return {**bits, "tables": torch.cat(tables).view(torch.uint8)}


def as_bits(scales: Tensor) -> Tensor:
    """View scales as integers of their size."""
    return scales.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[scales.itemsize])


class Decoder(nn.Module):
    """Dequantizes a weight on access: its description, and its statistics as integers."""

    def __init__(self, packed: PackedWeight) -> None:
        nn.Module.__init__(self)
        self.weight_shape, self.weight_dtype = torch.Size(packed.shape), packed.dtype
        self.kind, self.blocksize = packed.kind, packed.blocksize
        self.compute_dtype, self._serial = packed.compute_dtype, next(_serials)
        self.storage_dtype, self.stored_transposed = packed.codes.dtype, packed.stored_transposed
        self.name = ""
        self.put(packed)

    def put(self, packed: PackedWeight) -> None:
        """Have the statistics of this weight, which differs in nothing else."""
        for part, tensor in bits_of(packed).items():
            self.register_buffer(part, tensor, persistent=False)

    def packed(self, codes: Tensor) -> PackedWeight:
        """Return the packed weight of these codes; of a local shard, valid but for its tensors."""
        raise NotImplementedError

    @property
    def shardable(self) -> list[str]:
        """Names of the statistics that engines shard: all but code tables."""
        return [part for part in (*self._parameters, *self._buffers) if part != "tables"]

    def replaced(self, statistics: Mapping[str, Tensor]) -> Any:
        """Return this decoder with other statistics, which are whole."""
        other = copy.copy(self)
        other._parameters, other._buffers = {}, {**self._buffers, **statistics}
        return other

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        self.forget()
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        return {k: value for k, value in self.__dict__.items() if k not in ("_views", "_state")}

    def forget(self) -> None:
        """Free what the last read has kept of statistics that are no longer these."""
        self.__dict__.pop("_views", None)

    def is_divided(self, codes: Tensor) -> bool:
        """Whether an engine has sharded the codes or a statistic, and not gathered it."""
        held = self._parameters.values()
        return is_share(codes) or any(is_share(cast(Tensor, each)) for each in held)

    @torch.no_grad()
    def forward(self, codes: Tensor) -> Tensor:
        """Dequantize codes to the weight's shape and dtype; for a shard, the result is on meta."""
        if is_share(codes):
            return torch.empty(self.weight_shape, dtype=self.weight_dtype, device="meta")
        return unpack(read(codes, self))


class PackedScales(Decoder):
    """Of codes and scales: `scale_bits` are the scales, int32 for the fp32 ones of int8."""

    scale_bits: Tensor

    def packed(self, codes: Tensor) -> PackedWeight:
        raw, scales, shape = codes.detach(), self.scale_bits.detach(), self.weight_shape
        if not self.is_divided(codes):
            codec = codec_of(self.kind)
            raw, scales = raw.view(codec.codes_shape(shape)), scales.view(codec.scale_dtype)
        return PackedWeight(
            raw, scales, None, self.blocksize, None, shape, self.kind, self.weight_dtype,
            self.compute_dtype,
        )  # fmt: skip


class Packed4bit(Decoder, bnb_parametrize.Bnb4bitParametrization):
    """Of a 4-bit weight; unlike bitsandbytes' own it takes any number of weights and row length.

        absmax   `(blocks,)` with double quantization, else `(4 blocks,)`, the bits of fp32 absmax
        nested   with double quantization: the bits of fp32 offset, three zeros, nested absmax;
                 mxfp4, whose absmax are e8m0 bytes, has it with the one outer scale 1
        tables   the bits of the fp32 code tables

    All are uint8. The zeros align each part to 16 bytes for the kernels.
    """

    absmax: Tensor
    nested: Tensor
    tables: Tensor

    def __init__(self, packed: PackedWeight) -> None:
        super().__init__(packed)
        self.nested_blocksize = 0 if packed.nested is None else packed.nested.blocksize

    @property
    def quant_state(self) -> Any:
        """The statistics as bitsandbytes' `QuantState`: the object that the codes have as well."""
        known = self.__dict__.get("_state", lambda: None)()
        if known is None:
            known = _Statistics(self)
            self.__dict__["_state"] = weakref.ref(known)
        return known

    def parts(self) -> tuple[Tensor, ...]:
        """Return views: absmax, its table and, if nested, offset, nested absmax and their table."""
        absmax = self._buffers.get("absmax")
        if absmax is None or torch.compiler.is_compiling():  # gathered anew at each read; traced
            return self._parts()
        held: Any = self.__dict__.get("_views")
        if held is None or held[0] is not absmax:  # eager calls are short of time
            held = self.__dict__["_views"] = absmax, self._parts()
        return cast("tuple[Tensor, ...]", held[1])

    def _parts(self) -> tuple[Tensor, ...]:
        absmax, tables = self.absmax.detach(), self.tables.view(torch.float32)
        if not self.nested_blocksize:
            return absmax.view(torch.float32), tables
        floats = self.nested.detach().view(torch.float32)
        return absmax, tables[:16], floats[0], floats[4:], tables[16:]

    def packed(self, codes: Tensor) -> PackedWeight:
        known = (torch.uint8,) if self._parameters else (torch.uint8, self.storage_dtype)
        if codes.dtype not in known:
            raise QuantizationError(
                f"The packed codes of {self.name or 'a weight'} of shape "
                f"{tuple(self.weight_shape)} were cast from {known[-1]} to {codes.dtype}, which "
                "destroys them: load the model again and do not cast it, or set "
                "bnb_4bit_quant_storage=torch.uint8, which casts leave alone."
            )
        raw = codes.detach()
        if self.is_divided(codes):
            raw = torch.empty((0, 1), dtype=self.storage_dtype, device=codes.device)
            second = self.nested.detach() if self.nested_blocksize else self.tables
            parts: Any = self.absmax.detach(), self.tables, second, second, self.tables
        else:
            parts = self.parts()
            if raw.dtype != self.storage_dtype:
                raw = raw.view(-1).view(self.storage_dtype).unsqueeze(1)
        absmax, table, *inner = parts
        nested = None
        if self.nested_blocksize:
            offset, outer, outer_table = inner
            nested = NestedAbsmax(outer_table, outer, offset, self.nested_blocksize)
        return PackedWeight(
            raw, absmax, table, self.blocksize, nested, self.weight_shape, self.kind,
            self.weight_dtype, self.compute_dtype, stored_transposed=self.stored_transposed,
        )  # fmt: skip


class _Statistics(QuantState):
    """A decoder's statistics as bitsandbytes' `QuantState`, wherever they lie by now."""

    def __init__(self, decoder: Packed4bit) -> None:
        self._decoder = decoder

    def _now(self) -> Any:
        return to_quant_state(self._decoder.packed(torch.empty((0, 1), dtype=torch.uint8)))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._now(), name)

    def to(self, device: Any) -> None:
        """Do nothing: the decoder moves."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._now())  # of codes that are copied alone

    def __reduce__(self) -> Any:
        return copy.copy, (self._now(),)


def is_share(tensor: Tensor) -> bool:
    """Whether an engine has sharded this parameter: FSDP2's DTensor, or ZeRO-3's."""
    return hasattr(tensor, "device_mesh") or (hasattr(tensor, "ds_id") and tensor.numel() == 0)


def is_shardable(decoder: Any) -> bool:
    """Whether this is a decoder whose statistics are parameters, which engines shard."""
    return isinstance(decoder, Decoder) and bool(decoder._parameters)


def read(codes: Tensor, decoder: Any) -> PackedWeight:
    """Return the packed weight of these codes and their decoder; nothing is dequantized or copied.

    Codes that were cast to another dtype, which destroys them, are an error.
    """
    if isinstance(decoder, Decoder):
        packed = decoder.packed(codes)
        packed.serial, packed.name = decoder._serial, decoder.name
    else:  # bitsandbytes' own
        state = decoder.quant_state
        if state.absmax.device != codes.device and not codes.is_meta:
            state.to(codes.device)
        packed = from_quant_state(codes.data, state)
    packed.owner = codes if isinstance(codes, nn.Parameter) else None
    return packed


def params4bit(codes: Tensor, state: Any, kind: Any = Params4bit) -> nn.Parameter:
    """Return packed 4-bit codes as bitsandbytes' parameter class, with their `QuantState`."""
    parameter = kind(
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


def hold(packed: PackedWeight) -> nn.Parameter:
    """Return the parameter of this weight's codes, which has its decoder; made on first use."""
    owner: Any = packed.owner
    if decoder_held(owner) is None:
        if codec_of(packed.kind).in_quant_state:
            state = Packed4bit(packed).quant_state
            owner = params4bit(packed.codes, state) if owner is None else owner
            owner.quant_state = state
        else:
            owner = nn.Parameter(packed.codes, requires_grad=False) if owner is None else owner
            setattr(owner, _HELD, PackedScales(packed))
        if packed.owner is None:
            packed.owner, packed.codes = owner, owner.data
    return cast(nn.Parameter, owner)


def decoder_held(codes: Any) -> Any:
    """Return the decoder that codes have; None where they are no weight's yet."""
    state = getattr(codes, "quant_state", None)
    return state._decoder if isinstance(state, _Statistics) else getattr(codes, _HELD, None)


def from_quant_state(codes: Tensor, state: Any) -> PackedWeight:
    """Return the packed weight of 4-bit codes and their `QuantState`; copies nothing."""
    nested = None
    if state.nested:
        inner = state.state2
        nested = NestedAbsmax(inner.code, inner.absmax, state.offset, inner.blocksize)
    return PackedWeight(
        codes, state.absmax, state.code, state.blocksize, nested, state.shape, state.quant_type,
        state.dtype,
    )  # fmt: skip


def to_quant_state(packed: PackedWeight) -> Any:
    """Return a `QuantState` of a 4-bit weight's statistics; copies nothing."""
    offset = inner = None
    if packed.nested is not None:
        table, absmax, offset, blocksize = packed.nested
        inner = QuantState(absmax=absmax, code=table, blocksize=blocksize, dtype=torch.float32)
    return QuantState(
        absmax=packed.absmax,
        shape=torch.Size(packed.shape),
        code=packed.table,
        blocksize=packed.blocksize,
        quant_type=packed.kind,
        dtype=packed.dtype,
        offset=offset,
        state2=inner,
    )


def state_tensors(state: Any) -> list[Tensor]:
    """Return every tensor of a `QuantState`, nested ones included."""
    tensors = [state.absmax, state.code]
    if state.nested:
        tensors += [state.offset, state.state2.absmax, state.state2.code]
    return [tensor for tensor in tensors if isinstance(tensor, Tensor)]
