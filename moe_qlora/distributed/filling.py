"""Gives a sharded model its values, each rank its own shares, without a whole weight anywhere.

A model on meta is packed with blank weights (`ShardedFill.pack`), adapted, sharded, and allocated;
`Target` has noted where each weight sits, whatever wraps its module since. Its values come from

    checkpoint/rows   rows of a 16-bit checkpoint's parameters, which are packed here (`ShareSlot`)
    a packed folder   codes and statistics on disk are the bytes of the whole packed weight in order
                      (FORMAT.md), so that a share of one is a range of bytes of the other, at any
                      number of ranks; nothing is decoded
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, distributed, nn

from ..checkpoint.conversion import DiskLayout
from ..checkpoint.manifest import canonical_name, packed_names
from ..checkpoint.rows import Slot, filled
from ..errors import CheckpointError, MoeQloraError, QuantizationError, first_line
from ..hf.fill import Fill
from ..hf.model import finish_packing
from ..kernels.limits import cdiv
from ..packing import parametrize
from ..packing.bnb4bit import RECORD, read_record
from ..packing.codec import Packer
from ..packing.codecs import CODES
from ..packing.decoders import as_bits, bits_of
from ..packing.int8 import SCALES
from ..packing.settings import CodecSettings
from .sharding import packed_places, prepare_sharding


# Packs one rank's shares of a weight's codes and statistics, from the rows alone that they need.
#
# FSDP2 cuts codes and each statistic (decoders.py) as `torch.chunk` does over the parameter's
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
        self, target: Target, name: str, device: torch.device, *, transposed: bool = False
    ) -> None:
        """`name` is the weight's on disk."""
        codes, settings = target.tensor(), target.settings
        assert settings is not None
        super().__init__(name, target.shape, target.dtype, device, settings, transposed=transposed)
        self.ranks = ranks = ranks_of(codes)
        self._codes_shape = codes.shape
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

    def finish(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Return this rank's shares of codes and, by name, statistics; and code tables.

        All ranks must call it.
        """
        codes = torch.empty(0, dtype=torch.uint8, device=self.device)
        scales = torch.empty(0, dtype=torch.float32, device=self.device)
        try:
            if self._packer is not None and self._error is None:
                packed = super().finish()
                codes, scales = packed.codes.view(-1)[slice(*self._bytes)], packed.absmax
        except MoeQloraError as error:
            self._error = error
        scales = self._gathered(scales)
        settings = self.settings
        assert settings is not None
        codec, share = settings.codec, codes.view(-1, *self._codes_shape[1:])
        if not codec.in_quant_state:
            return share, {"scale_bits": self._share(as_bits(scales.to(codec.scale_dtype)))}
        whole = bits_of(codec.finish(codes[:0], scales, self.shape, self.dtype, settings))
        return share, {
            name: value if name == "tables" else self._share(value) for name, value in whole.items()
        }

    def _gathered(self, scales: Tensor) -> Tensor:
        """Return all ranks' scales; raise on every rank where one has failed."""
        told = [last - first for first, last in itertools.pairwise(self._told)]
        mine = torch.zeros(max(told) + 1, dtype=torch.float32, device=self.device)
        if self._error is None:
            mine[: told[self.ranks.rank]] = scales[: told[self.ranks.rank]]
        else:
            mine[-1] = 1.0
        parts = [mine]
        if self.ranks.count > 1:
            parts = [torch.empty_like(mine) for _ in told]
            try:
                distributed.all_gather(parts, mine, group=self.ranks.group)
            except RuntimeError as error:
                raise QuantizationError(
                    f"Packing {self.name} failed on rank {distributed.get_rank()} while it "
                    f"gathered absmax from all ranks ({first_line(error)}): every rank must take "
                    "part to the end; load the model again."
                ) from error
        if self._error is not None:
            raise self._error
        if bool(torch.stack([part[-1] for part in parts]).any()):  # the device is waited for once
            raise QuantizationError(
                f"Another rank could not pack its share of {self.name}: see its error."
            )
        return torch.cat([part[:count] for part, count in zip(parts, told, strict=True)])

    def _share(self, whole: Tensor) -> Tensor:
        first, last = self.ranks.span(len(whole))
        return whole[first:last].clone()


@dataclass
class Target:
    """A parameter or buffer to fill, and where it sits; of a packed weight, that of the codes."""

    name: str
    shape: tuple[int, ...]  # of the weight
    dtype: torch.dtype  # in which it is read, and packed
    owner: nn.Module
    leaf: str
    settings: CodecSettings | None = None  # of a packed weight
    statistics: Any = None  # the module with a packed weight's

    def tensor(self) -> Tensor:
        """Return the parameter or buffer as it is now."""
        held = (self.owner._parameters.get(self.leaf), self.owner._buffers.get(self.leaf))
        return next(tensor for tensor in held if tensor is not None)

    def tensors(self) -> list[Tensor]:
        """Return it, and the statistics of a packed weight."""
        return [self.tensor(), *(() if self.statistics is None else self.statistics.parameters())]

    def put(self, values: Tensor, statistics: Mapping[str, Tensor] | None = None) -> None:
        """Fill this rank's share; of a packed weight, of codes and statistics."""
        put_local(self.tensor(), values)
        for name, share in (statistics or {}).items():
            put_local(getattr(self.statistics, name), share)


def _targets(
    model: nn.Module, settings: CodecSettings, dtypes: Mapping[str, torch.dtype]
) -> Iterator[Target]:
    """Yield where the weights of a model sit that has blank packed weights, and no adapters.

    A tied weight is yielded once.
    """
    seen: set[int] = set()
    for name, owner, leaf, decoder, *_ in packed_places(model):
        shape = tuple(decoder.weight_shape)
        target = Target(name, shape, dtypes[name], owner, leaf, settings, decoder)
        if id(target.tensor()) not in seen:
            seen |= {*map(id, target.tensors())}
            yield target
    stored = set(model.state_dict())
    for prefix, module in model.named_modules():
        for leaf, tensor in (*module._parameters.items(), *module._buffers.items()):
            name = f"{prefix}.{leaf}".lstrip(".")
            computed = leaf in module._buffers and name not in stored
            if tensor is None or id(tensor) in seen or computed:
                continue
            seen.add(id(tensor))
            yield Target(name, tuple(tensor.shape), dtypes.get(name, tensor.dtype), module, leaf)


class ShardedFill(Fill):
    """Fills this rank's shares of a model that is sharded between `pack` and `fill`."""

    _layout: DiskLayout
    targets: list[Target]

    @property
    def model(self) -> Any:
        """The model."""
        return self._model

    @property
    def opened(self) -> Any:
        """The files that it is filled from."""
        assert self.files is not None
        return self.files

    def pack(self, layout: DiskLayout | None = None) -> None:
        """Give the model on meta its blank packed weights, in the layout that FSDP2 shards.

        `layout` is how a 16-bit checkpoint lies on disk, where `hide` has not found it.
        """
        model, spec, dtypes = self._model, self.spec, dict(self._dtypes)
        if layout is not None:
            self._layout = layout
        owners: dict[int, list[str]] = {}
        named = (
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        )
        for name, tensor in named:
            owners.setdefault(id(tensor), []).append(name)
        self._aliases = {name: names for names in owners.values() for name in names}
        if spec.manifest is not None:
            dtypes |= self._find_stored()
        for name, tensor in named:
            wanted = dtypes.get(name, tensor.dtype)
            if tensor.is_meta and tensor.is_floating_point() and wanted.is_floating_point:
                tensor.data = tensor.data.to(wanted)
        for param in {id(param): param for param in spec.params.values()}.values():
            parametrize.pack_blank(model, param, spec.settings)
        for name in self._linears.keys() - spec.params.keys():
            module = model.get_submodule(name.rpartition(".")[0])
            parametrize.pack_blank_linear(module, dtypes[name], spec.settings)
            dtypes[name] = spec.settings.codec.linear_dtype or dtypes[name]
        model.config.quantization_config = self._config
        finish_packing(model, spec.layout, self._config, spec.settings)
        prepare_sharding(model)
        self.targets = list(_targets(model, spec.settings, dtypes))

    @torch.no_grad()
    def fill(self, device: torch.device) -> None:
        """Fill this rank's shares; what is packed, on `device`.

        All ranks must call it, and raise together where one cannot.
        """
        if self.spec.manifest is not None:
            for target in self.targets:
                target.put(*self._stored_share(target))
            return
        targets: dict[str, Target] = {}
        slots: dict[str, Slot] = {}
        for target in self.targets:
            name = self._among(target, self._layout.by_name)
            if target.settings is not None:
                turned = target.name in self._turned
                slots[name] = ShareSlot(target, name, device, transposed=turned)
            else:
                tensor = target.tensor()
                rows = ranks_of(tensor).span(len(tensor)) if tensor.dim() else None
                slots[name] = Slot(name, tensor.shape, target.dtype, device, rows=rows)
            targets[name] = target
        groups = [group for group in self._layout.groups if slots.keys() & group.shapes]
        for name, value in filled(self.opened, self._layout, groups, slots):
            targets[name].put(*(value if isinstance(value, tuple) else (value,)))
            del value  # before the next is packed

    def _among(self, target: Target, names: Mapping[str, Any]) -> str:
        for name in (target.name, *self._aliases.get(target.name, ())):
            if name in names:
                return name
        raise CheckpointError(f"The checkpoint has no tensor for {target.name}.")

    # folders that this package packed

    def _find_stored(self) -> dict[str, torch.dtype]:
        """Note the keys of each weight by their ends; return what 4-bit weights are decoded to."""
        model, files, manifest = self._model, self.opened, self.spec.manifest
        assert manifest is not None
        keys = {canonical_name(model, key, self._aliases) or key: {CODES: key} for key in files}
        dtypes: dict[str, torch.dtype] = {}
        for stored, parts in packed_names(manifest).items():
            name = canonical_name(model, stored, self._aliases) or stored
            keys[name] = ends = {
                SCALES if key.endswith(SCALES) else key.removeprefix(stored): key for key in parts
            }
            if (record := RECORD + manifest.settings.kind) in ends and not self.spec.recasts:
                dtype = getattr(torch, read_record(files.read(ends[record]))["dtype"])
                dtypes |= dict.fromkeys((name, *self._aliases.get(name, ())), dtype)
        self._keys: dict[str, dict[str, str]] = keys
        return dtypes

    def _stored_share(self, target: Target) -> tuple[Any, ...]:
        """Read this rank's share of one weight: the arguments of `Target.put`."""
        files, keys = self.opened, self._keys[self._among(target, self._keys)]
        values: Any = target.tensor()
        first, last = ranks_of(values).span(len(values)) if values.dim() else (0, None)
        settings = target.settings
        if settings is None:
            if first == last:  # fewer rows than ranks
                return (torch.empty((0, *values.shape[1:]), dtype=values.dtype),)
            return (files.read(keys[CODES], first, last),)
        row, codec = values.shape[1:].numel(), settings.codec
        share = files.read_bytes(keys[CODES], first * row, last * row)
        large = CODES, codec.scales
        small = {end: files.read(key) for end, key in keys.items() if end not in large}
        problem = next(codec.value_problems(small, target.shape, settings, None), None)
        if problem is not None:
            raise CheckpointError(f"{target.name} {problem}.")
        statistics = {}
        if codec.in_quant_state:
            blank = dict.fromkeys(large, torch.empty(0, dtype=torch.uint8))
            packed = codec.assemble({**small, **blank}, target.shape, None, settings)
            statistics = bits_of(packed)
        for name, parameter in target.statistics.named_parameters():
            first, last = ranks_of(parameter).span(len(parameter))
            if name == "nested":
                statistics[name] = statistics[name][first:last]
                continue
            size = parameter.itemsize
            scales = files.read_bytes(keys[codec.scales], first * size, last * size)
            statistics[name] = scales.view(parameter.dtype)
        return share.view(values.dtype).view(-1, *values.shape[1:]), statistics


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
