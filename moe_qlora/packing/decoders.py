"""The modules that own a packed weight's statistics and dequantize its codes.

A `PackedList`, torch's `ParametrizationList`, has the codes and the decoder:

    codes (`.original`)                                    decoder (`[0]`), a `Decoder`
    4-bit: bnb.nn.Params4bit; others: nn.Parameter         absmax, nested, tables

"4-bit" are codecs with `in_quant_state`; the others are int8, whose codes have the weight's shape,
and users' codecs. Statistics are bytes, since trainers cast floating-point parameters and buffers:
buffers that are not saved; for engines, which shard parameters only, sharding.py makes parameters
of all but the tables, and `(bytes, 1)` of the codes. bitsandbytes' own code finds a `QuantState` on
decoder and codes, which reads the decoder.

Where a list has a `host`, the module's own tensors are views of host memory, for all that saves,
merges or copies. A forward or backward reads by `host.fetch`, compiled code by a handle.
"""

import copy
import itertools
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Self, cast

import bitsandbytes.functional
import bitsandbytes.nn
import torch
import torch.nn.utils.parametrize as P
from bitsandbytes.nn import parametrize as bnb_parametrize
from torch import Tensor, nn

from ..errors import ConfigError, QuantizationError
from ..kernels.weights import NestedAbsmax, Origin, PackedWeight
from .codec import unpack
from .codecs import CODES, codec_of
from .settings import CodecSettings

bnb: Any = bitsandbytes.nn  # no type annotations to check against
Params4bit = bnb.Params4bit

QuantState: Any = cast(Any, bitsandbytes.functional).QuantState
_HELD = "_moe_qlora_decoder"  # of codes that are no `Params4bit`
_numbers = itertools.count()


def bits_of(packed: PackedWeight) -> dict[str, Tensor]:
    """Return a weight's statistics by name, as its decoder has them."""
    nested, bits = packed.nested, {"absmax": packed.absmax.view(torch.uint8)}
    if packed.table is None:
        return bits
    tables = [packed.table]
    if nested is not None and nested.offset is nested.absmax:  # Of a share
        bits["nested"] = nested.absmax
    elif nested is not None:
        offset = nested.offset.reshape(1)
        floats = torch.cat([offset, offset.new_zeros(3), nested.absmax])
        bits["nested"] = floats.view(torch.uint8)
        tables.append(nested.table)
    return {**bits, "tables": torch.cat(tables).view(torch.uint8)}


def cast_error(name: str, stored: torch.dtype, now: torch.dtype) -> QuantizationError:
    """Return the error for packed codes of another dtype than they were stored in."""
    return QuantizationError(
        f"The packed codes of {name} were cast from {stored} to {now}, which destroys them: load "
        "the model again and do not cast it, or set bnb_4bit_quant_storage=torch.uint8, which "
        "casts leave alone."
    )


class Decoder(bnb_parametrize.Bnb4bitParametrization):
    """Dequantizes a weight on access: its description, and its statistics as integers.

        absmax   the bits of scales, one a unit; a byte each with double quantization, and in mxfp4
        nested   with double quantization: the bits of fp32 offset, three zeros, nested absmax;
                 mxfp4, whose absmax are e8m0 bytes, has it with the one outer scale 1
        tables   of 4-bit weights: the bits of the fp32 code tables

    All are uint8. The zeros align each part to 16 bytes for the kernels. Unlike bitsandbytes' own
    it takes any number of weights and row length.
    """

    absmax: Tensor
    nested: Tensor
    tables: Tensor

    def __init__(self, packed: PackedWeight) -> None:
        nn.Module.__init__(self)
        self.weight_shape, self.weight_dtype = torch.Size(packed.shape), packed.dtype
        self.kind, self.blocksize = packed.kind, packed.blocksize
        self.compute_dtype, self.origin = packed.compute_dtype, Origin()
        self.storage_dtype, self.stored_transposed = packed.codes.dtype, packed.stored_transposed
        self.scale_dtype, self.is_4bit = packed.absmax.dtype, packed.table is not None
        self.nested_blocksize = 0 if packed.nested is None else packed.nested.blocksize
        self.put(packed)

    def put(self, packed: PackedWeight) -> None:
        for part, tensor in bits_of(packed).items():
            self.register_buffer(part, tensor, persistent=False)

    def replaced(self, statistics: Mapping[str, Tensor]) -> Any:
        """Return this decoder with other statistics, which are whole."""
        other = copy.copy(self)
        other._parameters, other._buffers = {}, {**self._buffers, **statistics}
        return other

    @torch.no_grad()
    def forward(self, codes: Tensor) -> Tensor:
        """Dequantize codes to the weight's shape and dtype; for a shard, the result is on meta."""
        if is_share(codes):
            return torch.empty(self.weight_shape, dtype=self.weight_dtype, device="meta")
        return unpack(read(codes, self))

    @property
    def quant_state(self) -> Any:
        """A 4-bit weight's statistics as a `QuantState`."""
        return _Statistics(self) if self.is_4bit else None

    def parts(self) -> tuple[Tensor, ...]:
        """Return views: absmax, its table and, if nested, offset, nested absmax and their table."""
        absmax = self.absmax.detach().view(self.scale_dtype)
        if not self.is_4bit:
            return (absmax,)
        tables = self.tables.view(torch.float32)
        if not self.nested_blocksize:
            return absmax, tables
        floats = self.nested.detach().view(torch.float32)
        return absmax, tables[:16], floats[0], floats[4:], tables[16:]

    def packed(self, codes: Tensor) -> PackedWeight:
        """Return the packed weight of these codes; of a share, valid but for its tensors."""
        plain = torch.uint8 if self.is_4bit else self.storage_dtype
        known = (plain,) if self._parameters else (plain, self.storage_dtype)
        if codes.dtype not in known:
            name = self.origin.name or f"a weight of shape {tuple(self.weight_shape)}"
            raise cast_error(name, known[-1], codes.dtype)
        raw: Tensor = codes.detach()
        tables, second = self._buffers.get("tables"), self._parameters.get("nested")
        parts: Any = self.absmax.detach(), tables, second, second, tables
        # By attribute: ZeRO-3 gathers in a forward what is read so
        if any(map(is_share, (codes, *(getattr(self, name) for name in self._parameters)))):
            raw = torch.empty((0, 1), dtype=self.storage_dtype, device=codes.device)
        else:
            parts = self.parts()
            if self._parameters or raw.dtype != self.storage_dtype:
                raw = raw.view(-1).view(self.storage_dtype)
                rows = codec_of(self.kind).codes_shape(self.weight_shape)
                raw = raw.unsqueeze(1) if self.is_4bit else raw.view(rows)
        nested = None
        if self.nested_blocksize:
            offset, outer, outer_table = parts[2:]
            nested = NestedAbsmax(outer_table, outer, offset, self.nested_blocksize)
        return PackedWeight(
            raw, parts[0], parts[1] if self.is_4bit else None, self.blocksize, nested,
            self.weight_shape, self.kind, self.weight_dtype, self.compute_dtype,
            stored_transposed=self.stored_transposed,
        )  # fmt: skip


class _Statistics(QuantState):
    """A decoder's statistics as bitsandbytes' `QuantState`, wherever they lie by now."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        packed = self._decoder.packed(torch.empty((0, 1), dtype=torch.uint8))
        return getattr(to_quant_state(packed), name)

    def to(self, device: Any) -> None:
        """Do nothing: the decoder moves."""


def is_share(tensor: Tensor) -> bool:
    """Whether FSDP2 or ZeRO-3 has sharded this parameter."""
    return hasattr(tensor, "device_mesh") or (hasattr(tensor, "ds_id") and tensor.numel() == 0)


def read(codes: Tensor, decoder: Any) -> PackedWeight:
    """Return the packed weight of these codes and their decoder; copies nothing."""
    packed: PackedWeight = decoder.packed(codes)
    packed.origin = decoder.origin
    packed.owner = codes if isinstance(codes, nn.Parameter) else None
    return packed


def params4bit(codes: Tensor, state: Any, kind: Any = Params4bit) -> nn.Parameter:
    """Return packed 4-bit codes as bitsandbytes' parameter class, with their `QuantState`."""
    settings = state.blocksize, state.nested, state.quant_type, codes.dtype
    return cast(nn.Parameter, kind(codes, False, state, *settings, bnb_quantized=True))


def parameter_of(codes: Tensor, decoder: Decoder) -> nn.Parameter:
    """Return the parameter of these codes, which are not sharded."""
    if decoder.is_4bit:
        return params4bit(codes, decoder.quant_state)
    return nn.Parameter(codes, requires_grad=False)


def hold(packed: PackedWeight) -> tuple[nn.Parameter, Decoder]:
    """Return the parameter of this weight's codes and its decoder; made on first use."""
    owner: Any = packed.owner
    state = getattr(owner, "quant_state", None)
    known = state._decoder if isinstance(state, _Statistics) else getattr(owner, _HELD, None)
    if known is None:
        known = Decoder(packed)
        owner = parameter_of(packed.codes, known) if owner is None else owner
        if known.is_4bit:
            owner.quant_state = known.quant_state
        else:
            setattr(owner, _HELD, known)
        if packed.owner is None:
            packed.owner, packed.codes = owner, owner.data
    return cast(nn.Parameter, owner), cast(Decoder, known)


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
        packed.absmax, torch.Size(packed.shape), packed.table, packed.blocksize, packed.kind,
        packed.dtype, offset, inner,
    )  # fmt: skip


class PackedList(P.ParametrizationList):
    """A ParametrizationList whose codes may lie in host memory."""

    # Where the weight lies that is not on the device that computes with it (train/offload.py)
    host: Any = None
    offload: object | None = None  # What had it in host memory first, and may again
    moves: int = 0  # How often it went to host memory, or came back
    handle: Tensor  # `()` int64 on the CPU, of `fetch_by`, while it is in host memory

    def settle(self, host: Any) -> None:
        """Note where the weight lies now: None for the module's own device."""
        self.host, self.moves = host, self.moves + 1
        if host is None:
            del self.host
            return
        number = next(_numbers)
        _by_number[number] = self
        with torch.inference_mode(False):
            self.handle = torch.tensor(number, device="cpu")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        if self.host is not None:
            self.host.move(fn(torch.empty(0, dtype=torch.uint8, device=self.host.device)).device)
            return self
        return super()._apply(fn, recurse)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a copy, of what lies in host memory one on the device that computes."""
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        own = {k: value for k, value in self.__dict__.items() if k not in ("host", "offload")}
        new.__dict__.update(copy.deepcopy(own, memo))
        if isinstance(new.original, Params4bit):
            new.original.quant_state = new[0].quant_state
        if self.host is not None and not new.original.is_meta:  # as a copy to meta has them
            new.to(self.host.device)
        return new

    def forward(self) -> Tensor:
        return super().forward() if self.host is None else _unpacked(self)

    def __repr__(self) -> str:
        decoder: Any = self[0]
        where = "" if self.host is None else ", on host"
        return f"Packed({decoder.kind}, {tuple(decoder.weight_shape)}{where})"


_by_number: weakref.WeakValueDictionary[int, PackedList] = weakref.WeakValueDictionary()


def fetch_by(handle: Tensor) -> PackedWeight:
    """Return the weight on the device that computes, by the handle that compiled code has of it."""
    return fetched(_by_number[int(handle)])


def fetched(chain: Any) -> PackedWeight:
    """Return the weight on the device that computes; no backward may save its tensors."""
    if chain.host is not None:
        return cast(PackedWeight, chain.host.fetch(chain))
    packed = read(chain.original, chain[0])
    if hasattr(chain.original, "ds_id"):
        packed.refetch = partial(fetched, chain)
    return packed


@torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
def _unpacked(chain: PackedList) -> Tensor:
    """Return what `ParametrizationList.forward` does of a weight in host memory."""
    with torch.no_grad():
        weight = unpack(fetched(chain))
    for last in [*chain][1:]:
        weight = last(weight)
    return weight


def read_linear(layer: Any) -> PackedWeight:
    """Return the packed weight of one of bitsandbytes' Linear layers; copies no codes."""
    if "statistics" in layer._modules:  # as engines shard it, perhaps sharded
        return read(layer.weight, layer.statistics)
    if isinstance(layer, bnb.Linear8bitLt):
        weight, state = layer.weight, layer.state
        codes = state.CB if weight.CB is None else weight.CB
        scales = state.SCB if weight.SCB is None else weight.SCB
        settings, shape = CodecSettings("int8"), tuple(codes.shape)
        tensors = {CODES: codes, settings.codec.scales: scales}
        packed = settings.codec.assemble(tensors, shape, torch.float16, settings)
        return replace(packed, owner=weight)
    packed = from_quant_state(layer.weight.data, layer.weight.quant_state)
    return replace(packed, owner=layer.weight)


def has_codes(layer: Any) -> bool:
    """Whether one of bitsandbytes' Linear layers is packed by now."""
    if "statistics" in layer._modules:
        return True
    if isinstance(layer, bnb.Linear4bit):
        return getattr(layer.weight, "quant_state", None) is not None
    return not getattr(layer.weight, "CB", None) is layer.state.CB is None


def check_linears(model: nn.Module, settings: CodecSettings) -> None:
    """Raise where bitsandbytes would pack a model's Linear layers by a codec it does not know."""
    layers = (name for name, one in model.named_modules() if isinstance(one, bnb.Linear4bit))
    if not settings.codec.packs_linears and (name := next(layers, None)) is not None:
        raise ConfigError(
            f"{name} would be packed by bitsandbytes, which does not know "
            f"bnb_4bit_quant_type={settings.kind!r}: name it, and all other Linear layers, in "
            "llm_int8_skip_modules."
        )


def linear_kind(layer: Any) -> str:
    """Return the packed type of a bitsandbytes Linear layer, also before it is packed."""
    if isinstance(layer, bnb.Linear8bitLt):
        return "int8"
    if "statistics" in layer._modules:
        return str(layer.statistics.kind)
    return str(layer.weight.quant_type)


def keep_layout(model: nn.Module) -> None:
    """Stop bitsandbytes' 4-bit Linear layers from converting their codes on CPUs, in place."""
    # bitsandbytes 0.50 does so in evaluation with AVX512-BF16; such a layer passes no gradient, in
    # later training too, and has its absmax rounded to bf16 and reordered.
    for name, module in model.named_modules():
        if isinstance(module, bnb.Linear4bit):
            state = getattr(module.weight, "quant_state", None)
            if getattr(state, "packing_format_for_cpu", False):
                raise QuantizationError(
                    f"bitsandbytes has converted {name} in an evaluation on this CPU, which "
                    "rounds it and stops gradients: load the model again, and pack it first."
                )
            cast(Any, module).support_avx512bf16_for_cpu = False


def write_linear(layer: Any, packed: PackedWeight) -> None:
    """Set the packed weight of a stock bitsandbytes Linear layer, as a load does."""
    if isinstance(layer, bnb.Linear8bitLt):
        codes, scales = packed.codes, packed.absmax
        layer.weight = bnb.Int8Params(codes, requires_grad=False, CB=codes, SCB=scales)
        layer.state.CB = layer.state.SCB = None
        return
    layer.weight = params4bit(packed.codes, to_quant_state(packed))
    layer.weight.module, layer.quant_state = layer, layer.weight.quant_state
