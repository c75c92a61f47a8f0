"""Gives a sharded model its values, each rank its own shares, without a whole weight anywhere.

A model on meta is packed with blank weights, sharded, and allocated; `ShardedWeights` has noted
before where each weight sits, whatever wraps its module since. Its values come from

    checkpoint/rows   rows of a 16-bit checkpoint's parameters, which are packed here (`ShareSlot`)
    fill_stored       a packed folder: codes and statistics on disk are the bytes of the whole
                      packed weight in order (FORMAT.md), so that a share of one is a range of bytes
                      of the other, at any number of ranks; nothing is decoded
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, distributed, nn

from ..checkpoint.reader import Checkpoint
from ..checkpoint.rows import Slot, filled
from ..errors import (
    CheckpointError,
    MoeQloraError,
    QuantizationError,
    first_line,
)
from ..kernels.limits import cdiv
from ..packing import parametrize
from ..packing.bnb4bit import ABSMAX, NESTED_ABSMAX, NESTED_TABLE, RECORD, TABLE, read_record
from ..packing.codec import Packer
from ..packing.codecs import CODES
from ..packing.decoders import ShardableStatistics, as_bits
from ..packing.settings import CodecSettings


# Packs one rank's shares of a weight's codes and statistics, from the rows alone that they need.
#
# FSDP2 cuts each parameter of the shardable layout (decoders.py) as `torch.chunk` does over its
# first dimension. A `ShareSlot` gives the shares that cutting the whole packed weight would give,
# bit for bit, and takes only the rows that this rank's share of the codes lies in:
#
#     first level    each rank packs the blocks that its codes lie in; no block depends on another
#     absmax         gathered from all ranks in fp32, one weight at a time (1/16 byte a weight)
#     second level   double quantization of all absmax, on every rank; then each keeps its share
@dataclass(frozen=True)
class Ranks:
    """The ranks that hold one parameter together, and this one's number among them."""

    rank: int = 0
    count: int = 1
    group: Any = None  # their process group

    def span(self, length: int, rank: int | None = None) -> tuple[int, int]:
        """Return which rows of `length` a rank holds, this one by default, as `torch.chunk` has it.

        Where there are fewer rows than ranks, the last ones hold none.
        """
        rank, step = self.rank if rank is None else rank, cdiv(length, self.count)
        return min(rank * step, length), min((rank + 1) * step, length)


def ranks_of(parameter: Any) -> Ranks:
    """Return the ranks that hold a parameter together; one where it is not sharded."""
    for dimension, placement in enumerate(getattr(parameter, "placements", ())):
        if not placement.is_shard():
            continue
        if placement.dim != 0:
            raise QuantizationError(
                f"A parameter of shape {tuple(parameter.shape)} is sharded over dimension "
                f"{placement.dim}: packed weights are sharded over dimension 0 only."
            )
        mesh = parameter.device_mesh
        group = mesh.get_group(dimension)
        return Ranks(mesh.get_local_rank(dimension), mesh.size(dimension), group)
    return Ranks()


class ShareSlot(Slot):
    """Packs this rank's shares of one weight, from the rows alone that they lie in."""

    def __init__(
        self, target: PackedTarget, name: str, device: torch.device, *, transposed: bool = False
    ) -> None:
        """`name` is the weight's on disk."""
        self.target, self.ranks, settings = target, ranks_of(target.codes()), target.settings
        super().__init__(name, target.shape, target.dtype, device, settings, transposed=transposed)
        self._codes_shape, ranks = torch.Size(target.codes_shape), self.ranks
        self._plain = replace(settings, double_quant=False, storage_dtype=torch.uint8)
        codec = settings.codec
        in_byte, unit = 8 // codec.bits, codec.unit(self.shape, settings)
        weights, blocks = self.shape.numel(), cdiv(self.shape.numel(), unit)
        row = self._codes_shape.numel() // self._codes_shape[0]  # bytes
        spans = [ranks.span(self._codes_shape[0], rank) for rank in range(ranks.count)]
        # Each block's absmax is told by the rank that has its first code.
        starts = [
            first * row * in_byte // unit if first < last else blocks for first, last in spans
        ]
        self._told = [*starts, blocks]
        first, last = spans[ranks.rank]
        self._begin = min(starts[ranks.rank] * unit, weights)
        self._end = self._begin
        if first < last:
            self._end = min(cdiv(last * row * in_byte, unit) * unit, weights)
        begin = self._begin // in_byte
        self._bytes = first * row - begin, last * row - begin
        width = weights // self.shape[0]
        self.rows = self._begin // width, cdiv(self._end, width)
        self._error: MoeQloraError | None = None
        count = self._end - self._begin
        self._part = (count,) if count % unit else (count // unit, unit)

    def _pack(self, start: int, piece: Tensor) -> None:
        first = start * (self.shape.numel() // self.shape[0])
        flat = piece.reshape(-1)
        begin, end = max(self._begin - first, 0), max(self._end - first, 0)
        if self._packer is None:
            self._packer = Packer(self._part, self.dtype, self.device, self._plain)
        self._packer.add(flat[begin:end])

    def fail(self, error: MoeQloraError) -> None:
        """Note why this rank cannot pack its share; `finish` then raises on every rank."""
        self._error = self._error or error

    def finish(self) -> tuple[Tensor, dict[str, Tensor], Tensor | None]:
        """Return this rank's shares of codes and, by name, statistics, and the code tables.

        All ranks must call it.
        """
        codes, scales = self._packed()
        scales = self._gathered(scales)
        codes = codes.view(-1, *self._codes_shape[1:])
        settings = self.target.settings
        codec = settings.codec
        if not codec.in_quant_state:
            bits = as_bits(scales.to(codec.scale_dtype))
            return codes, {"scale_bits": self._share(bits)}, None
        none = torch.empty(0, dtype=torch.uint8, device=self.device)
        packed = codec.finish(none, scales, self.shape, self.dtype, settings)
        whole = ShardableStatistics(packed)
        shares = {name: self._share(value.data) for name, value in whole.named_parameters()}
        return codes, shares, whole.tables

    def _packed(self) -> tuple[Tensor, Tensor]:
        """Return this rank's codes, flat, and the scales of its blocks; none where it failed."""
        nothing = torch.empty(0, dtype=self._plain.storage_dtype, device=self.device)
        scales = torch.empty(0, dtype=torch.float32, device=self.device)
        if self._packer is None or self._error is not None:
            return nothing, scales
        try:
            packed = super().finish()
        except MoeQloraError as error:
            self._error = error
            return nothing, scales
        first, last = self._bytes
        return packed.codes.view(-1)[first:last], packed.absmax

    def _gathered(self, scales: Tensor) -> Tensor:
        told = [last - first for first, last in zip(self._told, self._told[1:], strict=False)]
        failed = self._error is not None
        if self.ranks.count > 1:
            mine = torch.zeros(max(told) + 1, dtype=torch.float32, device=self.device)
            mine[-1] = float(failed)
            if not failed:
                mine[: told[self.ranks.rank]] = scales[: told[self.ranks.rank]]
            parts = [torch.empty_like(mine) for _ in told]
            _gather(self.name, parts, mine, self.ranks.group)
            scales = torch.cat([part[:count] for part, count in zip(parts, told, strict=True)])
            failed = bool(torch.stack([part[-1] for part in parts]).any())
        if self._error is not None:
            raise self._error
        if failed:
            raise QuantizationError(
                f"Another rank could not pack its share of {self.name}: see its error."
            )
        return scales

    def _share(self, whole: Tensor) -> Tensor:
        first, last = self.ranks.span(len(whole))
        return whole[first:last].clone()


def _gather(name: str, parts: list[Tensor], absmax: Tensor, group: Any) -> None:
    try:
        distributed.all_gather(parts, absmax, group=group)
    except RuntimeError as error:
        raise QuantizationError(
            f"Packing {name} failed on rank {distributed.get_rank()} while it gathered absmax "
            f"from all ranks ({first_line(error)}): every rank must take part to the end; load "
            "the model again."
        ) from error


_HEADER = 16  # bytes before nested absmax: the offset and three zeros


@dataclass
class PackedTarget:
    """A packed weight to fill, and the modules that hold its parts."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype  # of the weight that is packed
    settings: CodecSettings
    codes_shape: tuple[int, ...]  # of the parameter of the whole weight's codes
    owner: nn.Module  # with the codes as its parameter `leaf`
    leaf: str
    statistics: nn.Module

    def codes(self) -> nn.Parameter:
        """Return the parameter of the codes as it is now."""
        parameter = self.owner._parameters[self.leaf]
        assert parameter is not None
        return parameter

    def put(self, shares: tuple[Tensor, Mapping[str, Tensor], Tensor | None]) -> None:
        """Fill codes, statistics and tables with this rank's shares."""
        codes, statistics, tables = shares
        put_local(self.codes(), codes)
        for name, share in statistics.items():
            put_local(self.statistics._parameters[name], share)
        if tables is not None:
            buffer: Any = self.statistics.tables
            buffer.copy_(tables)


@dataclass
class PlainTarget:
    """A parameter or buffer to fill that is not packed."""

    name: str
    dtype: torch.dtype
    owner: nn.Module
    leaf: str

    def tensor(self) -> Tensor:
        """Return the parameter or buffer as it is now."""
        held = (self.owner._parameters.get(self.leaf), self.owner._buffers.get(self.leaf))
        return next(tensor for tensor in held if tensor is not None)

    def put(self, values: Tensor) -> None:
        """Fill this rank's share."""
        put_local(self.tensor(), values)


@dataclass
class ShardedWeights:
    """Where the weights of a model sit, by the names that they had before adapters came."""

    packed: dict[str, PackedTarget] = field(default_factory=dict)
    plain: dict[str, PlainTarget] = field(default_factory=dict)

    @torch.no_grad()
    def fill(
        self,
        files: Any,
        layout: Any,
        device: torch.device,
        aliases: Mapping[str, Sequence[str]],
        transposed: Container[str] = (),
    ) -> None:
        """Fill this rank's shares from rows of a 16-bit checkpoint; what is packed, on `device`.

        All ranks must call it, and raise together where one cannot. `aliases` are all names of tied
        parameters by each of them; `transposed` are weights that a packed layer holds the other way
        round than the checkpoint.
        """
        targets: dict[str, PackedTarget | PlainTarget] = {}
        slots: dict[str, Slot] = {}
        every: dict[str, PackedTarget | PlainTarget] = {**self.packed, **self.plain}
        for name, target in every.items():
            names = (name, *aliases.get(name, ()))
            stored = next((other for other in names if other in layout.by_name), None)
            if stored is None:
                raise CheckpointError(f"The checkpoint has no tensor for {name}.")
            targets[stored] = target
            if isinstance(target, PackedTarget):
                turned = name in transposed
                slots[stored] = ShareSlot(target, stored, device, transposed=turned)
            else:
                tensor = target.tensor()
                rows = ranks_of(tensor).span(len(tensor)) if tensor.dim() else None
                slots[stored] = Slot(stored, tensor.shape, target.dtype, device, rows=rows)
        groups = [group for group in layout.groups if slots.keys() & group.shapes]
        for name, value in filled(files, layout, groups, slots):
            targets[name].put(value)
            del value  # before the next is packed


def targets_of(
    model: nn.Module, settings: CodecSettings, dtypes: Mapping[str, torch.dtype]
) -> ShardedWeights:
    """Note where the weights of a model sit that has its blank packed weights and no adapters.

    `dtypes` has, by name, those in which weights are read and packed. A tied weight is noted once.
    """
    weights = ShardedWeights()
    seen: set[int] = set()
    for name, owner, leaf, statistics, shape in _packed_parts(model):
        codes: Any = owner._parameters[leaf]
        if id(codes) in seen:
            continue
        seen |= {id(codes), *map(id, statistics.parameters())}
        weights.packed[name] = PackedTarget(
            name, shape, dtypes[name], settings, tuple(codes.shape), owner, leaf, statistics
        )
    buffers = set(model.state_dict())
    for prefix, module in model.named_modules():
        for leaf, tensor in (*module._parameters.items(), *module._buffers.items()):
            name = f"{prefix}.{leaf}".lstrip(".")
            if tensor is None or id(tensor) in seen:
                continue
            if leaf in module._buffers and name not in buffers:
                continue  # computed, not stored
            seen.add(id(tensor))
            weights.plain[name] = PlainTarget(name, dtypes.get(name, tensor.dtype), module, leaf)
    return weights


def _packed_parts(
    model: nn.Module,
) -> Iterator[tuple[str, nn.Module, str, nn.Module, tuple[int, ...]]]:
    for prefix, module, name in parametrize.iter_packed(model):
        chain = parametrize.parametrization_list(module, name)
        decoder: Any = chain._modules["0"]
        shape = tuple(decoder.weight_shape)
        yield f"{prefix}.{name}".lstrip("."), chain, "original", decoder, shape
    for prefix, module in model.named_modules():
        statistics = module._modules.get("statistics")
        if parametrize.is_packed_linear(module) and statistics is not None:
            linear: Any = module
            shape = (linear.out_features, linear.in_features)
            yield f"{prefix}.weight".lstrip("."), module, "weight", statistics, shape


@torch.no_grad()
def put_local(parameter: Any, values: Tensor) -> None:
    """Copy values into a parameter: into this rank's share where it is sharded."""
    local = parameter._local_tensor if hasattr(parameter, "placements") else parameter
    if local.shape != values.shape:
        raise CheckpointError(
            f"Values of shape {tuple(values.shape)} were read for a share of shape "
            f"{tuple(local.shape)}: the checkpoint is not of this model."
        )
    local.copy_(values)


def fill_stored(target: PackedTarget, keys: Mapping[str, str], checkpoint: Checkpoint) -> None:
    """Fill this rank's share of one packed weight; `keys` are its tensors' by their ends."""
    codes: Any = target.codes()
    row = torch.Size(target.codes_shape[1:]).numel()
    first, last = ranks_of(codes).span(target.codes_shape[0])
    share = checkpoint.read_bytes(keys[CODES], first * row, last * row)
    share = share.view(codes.dtype).view(-1, *target.codes_shape[1:])
    codec = target.settings.codec
    if not codec.in_quant_state:
        bits: Any = target.statistics.scale_bits
        first, last = (bits.itemsize * row for row in ranks_of(bits).span(len(bits)))
        scales = checkpoint.read_bytes(keys[codec.scales], first, last).view(bits.dtype)
        target.put((share, {"scale_bits": scales}, None))
        return
    record = RECORD + target.settings.kind
    small = {end: checkpoint.read(keys[end]) for end in (record, TABLE)}
    if target.settings.double_quant:
        small[NESTED_TABLE] = checkpoint.read(keys[NESTED_TABLE])
    problem = next(codec.value_problems(small, target.shape, target.settings, None), None)
    if problem is not None:
        raise CheckpointError(f"{target.name} {problem}.")
    statistics = {}
    for name, parameter in target.statistics.named_parameters():
        first, last = ranks_of(parameter).span(len(parameter))
        if name == "absmax":
            statistics[name] = checkpoint.read_bytes(keys[ABSMAX], first, last)
        else:
            # The bytes of the second level: the offset, zeros, nested absmax.
            said = read_record(small[record])
            header = torch.tensor([said["nested_offset"], 0.0, 0.0, 0.0]).view(torch.uint8)
            begin, end = max(first - _HEADER, 0), max(last - _HEADER, 0)
            nested = checkpoint.read_bytes(keys[NESTED_ABSMAX], begin, end)
            statistics[name] = torch.cat([header[first:last], nested])
    tables = [small[end] for end in (TABLE, NESTED_TABLE) if end in small]
    target.put((share, statistics, torch.cat(tables).view(torch.uint8)))
