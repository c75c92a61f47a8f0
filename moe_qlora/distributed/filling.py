"""Gives a sharded model its values, each rank its own shares, without a whole weight anywhere.

A model on meta is packed with blank weights (`ShardedFill.pack`), adapted, sharded, and allocated;
`Target` has noted where each weight sits, whatever wraps its module since. Its values come from

    checkpoint/rows   rows of a 16-bit checkpoint's parameters, which are packed here (`ShareSlot`)
    a packed folder   codes and statistics on disk are the bytes of the whole packed weight in order
                      (FORMAT.md), so that a share of one is a range of bytes of the other
"""

from __future__ import annotations

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


@dataclass(frozen=True)
class Ranks:
    """The ranks that hold one parameter together, and this one's number among them."""

    rank: int = 0
    count: int = 1
    group: Any = None  # their process group

    def span(self, length: int) -> tuple[int, int]:
        """Return which rows of `length` this rank holds, as `torch.chunk` has it; maybe none."""
        step = cdiv(length, self.count)
        return min(self.rank * step, length), min((self.rank + 1) * step, length)


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
    """Packs this rank's shares of one weight, from the rows alone that they lie in.

    The shares are those of the whole packed weight, bit for bit: each rank packs the blocks that
    its codes lie in, which depend on no others. All absmax are then gathered in fp32 (1/16 byte a
    weight), quantized on every rank where that is asked for, and each keeps its share.
    """

    settings: CodecSettings

    def __init__(
        self, target: Target, name: str, device: torch.device, *, transposed: bool = False
    ) -> None:
        """`name` is the weight's on disk."""
        codes, settings = target.tensor(), target.settings
        assert settings is not None
        super().__init__(name, target.shape, target.dtype, device, settings, transposed=transposed)
        self.ranks, self._row = ranks_of(codes), codes.shape[1:]  # of codes
        weights, in_byte = self.shape.numel(), 8 // settings.codec.bits
        unit = settings.codec.unit(self.shape, settings)
        spans = [replace(self.ranks, rank=r).span(len(codes)) for r in range(self.ranks.count)]
        codes_of = [[end * self._row.numel() for end in span] for span in spans]  # bytes
        self._blocks = [
            (start * in_byte // unit, cdiv(stop * in_byte, unit)) if start < stop else (0, 0)
            for start, stop in codes_of
        ]
        first, last = self._blocks[self.ranks.rank]
        begin, end = self._weights = first * unit, min(last * unit, weights)
        start, stop = codes_of[self.ranks.rank]
        self._bytes = slice(start - begin // in_byte, stop - begin // in_byte)
        self._width = weights // self.shape[0]
        self.rows = begin // self._width, cdiv(end, self._width)
        self._part = (end - begin,) if (end - begin) % unit else ((end - begin) // unit, unit)
        self._plain = replace(settings, double_quant=False, storage_dtype=torch.uint8)
        self._error: MoeQloraError | None = None

    def _pack(self, start: int, piece: Tensor) -> None:
        begin, end = (max(weight - start * self._width, 0) for weight in self._weights)
        if self._packer is None:
            self._packer = Packer(self._part, self.dtype, self.device, self._plain)
        self._packer.add(piece.reshape(-1)[begin:end])

    def fail(self, error: MoeQloraError) -> None:
        """Note why this rank cannot pack its share; `finish` then raises on every rank."""
        self._error = self._error or error

    def finish(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Return this rank's shares of codes and, by name, statistics; and code tables.

        All ranks must call it.
        """
        codes = torch.empty(0, dtype=torch.uint8, device=self.device)
        longest = max(last - first for first, last in self._blocks)
        # The last number says whether this rank has failed.
        mine = torch.zeros(longest + 1, device=self.device)
        try:
            if self._packer is not None and self._error is None:
                packed = super().finish()
                codes = packed.codes.view(-1)[self._bytes]
                mine[: len(packed.absmax)] = packed.absmax
        except MoeQloraError as error:
            self._error = error
        mine[-1] = float(self._error is not None)
        scales = mine.new_empty(max(last for _, last in self._blocks))
        for (first, last), part in zip(self._blocks, self._gather(mine), strict=True):
            scales[first:last] = part[: last - first]
        codec, share = self.settings.codec, codes.view(-1, *self._row)
        scales = scales.to(codec.scale_dtype)
        if codec.in_quant_state:
            empty = codes[:0]
            whole = bits_of(codec.finish(empty, scales, self.shape, self.dtype, self.settings))
        else:
            whole = {"scale_bits": as_bits(scales)}
        for name, value in whole.items():
            if name != "tables":
                whole[name] = value[slice(*self.ranks.span(len(value)))].clone()
        return share, whole

    def _gather(self, mine: Tensor) -> list[Tensor]:
        """Return all ranks' tensors; raise on every rank where one has failed."""
        parts = [mine]
        if self.ranks.count > 1:
            parts = [torch.empty_like(mine) for _ in range(self.ranks.count)]
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
        return parts


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
        held: Tensor = getattr(self.owner, self.leaf)
        return held

    def tensors(self) -> list[Tensor]:
        """Return it, and the statistics of a packed weight."""
        return [self.tensor(), *(() if self.statistics is None else self.statistics.parameters())]

    def put(self, values: Tensor, statistics: Mapping[str, Tensor] | None = None) -> None:
        """Fill this rank's share; of a packed weight, of codes and statistics."""
        put_local(self.tensor(), values)
        for name, share in (statistics or {}).items():
            put_local(getattr(self.statistics, name), share)


class ShardedFill(Fill):
    """Fills this rank's shares of a model that is sharded between `pack` and `fill`."""

    files: Any
    targets: list[Target]

    def pack(self, layout: DiskLayout | None = None) -> None:
        """Give the model on meta its blank packed weights, in the layout that FSDP2 shards.

        `layout` is how a 16-bit checkpoint lies on disk, where `hide` has not found it.
        """
        model, spec, dtypes = self.model, self.spec, dict(self.dtypes)
        if layout is not None:
            self.layout = layout
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
        for name in self.linears.keys() - spec.params.keys():
            module = model.get_submodule(name.rpartition(".")[0])
            parametrize.pack_blank_linear(module, dtypes[name], spec.settings)
            dtypes[name] = spec.settings.codec.linear_dtype or dtypes[name]
        model.config.quantization_config = self.config
        finish_packing(model, spec.layout, self.config, spec.settings)
        prepare_sharding(model)
        self.targets = list(self._find_targets(dtypes))

    def _find_targets(self, dtypes: Mapping[str, torch.dtype]) -> Iterator[Target]:
        """Yield where the model's weights sit, a tied one once, before adapters come."""
        seen: set[int] = set()
        for name, owner, leaf, decoder, *_ in packed_places(self.model):
            shape = tuple(decoder.weight_shape)
            target = Target(name, shape, dtypes[name], owner, leaf, self.spec.settings, decoder)
            if id(target.tensor()) not in seen:
                seen |= {*map(id, target.tensors())}
                yield target
        stored = set(self.model.state_dict())
        for prefix, module in self.model.named_modules():
            for leaf, tensor in (*module._parameters.items(), *module._buffers.items()):
                name = f"{prefix}.{leaf}".lstrip(".")
                computed = leaf in module._buffers and name not in stored
                if tensor is not None and id(tensor) not in seen and not computed:
                    seen.add(id(tensor))
                    dtype = dtypes.get(name, tensor.dtype)
                    yield Target(name, tuple(tensor.shape), dtype, module, leaf)

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
            name, tensor = self._among(target, self.layout.by_name), target.tensor()
            targets[name] = target
            if target.settings is not None:
                turned = self.linears.get(target.name, False)
                slots[name] = ShareSlot(target, name, device, transposed=turned)
            else:
                rows = ranks_of(tensor).span(len(tensor)) if tensor.dim() else None
                slots[name] = Slot(name, tensor.shape, target.dtype, device, rows=rows)
        groups = [group for group in self.layout.groups if slots.keys() & group.shapes]
        for name, value in filled(self.files, self.layout, groups, slots):
            targets[name].put(*(value if isinstance(value, tuple) else (value,)))
            del value  # before the next is packed

    def _among(self, target: Target, names: Mapping[str, Any]) -> str:
        for name in (target.name, *self._aliases.get(target.name, ())):
            if name in names:
                return name
        raise CheckpointError(f"The checkpoint has no tensor for {target.name}.")

    def _find_stored(self) -> dict[str, torch.dtype]:
        """Note a packed folder's keys by weight and end; return what weights are decoded to."""
        files, manifest = self.files, self.spec.manifest
        assert manifest is not None

        def own(name: str) -> str:
            return canonical_name(self.model, name, self._aliases) or name

        self._keys = {own(key): {CODES: key} for key in files}
        dtypes: dict[str, torch.dtype] = {}
        for stored, parts in packed_names(manifest).items():
            name = own(stored)
            ends = {SCALES if k.endswith(SCALES) else k.removeprefix(stored): k for k in parts}
            self._keys[name] = ends
            if (record := RECORD + manifest.settings.kind) in ends and not self.spec.recasts:
                dtype = getattr(torch, read_record(files.read(ends[record]))["dtype"])
                dtypes |= dict.fromkeys((name, *self._aliases.get(name, ())), dtype)
        return dtypes

    def _stored_share(self, target: Target) -> tuple[Any, ...]:
        """Read this rank's share of one weight: the arguments of `Target.put`."""
        files, keys = self.files, self._keys[self._among(target, self._keys)]
        values, settings = target.tensor(), target.settings
        first, last = ranks_of(values).span(len(values)) if values.dim() else (0, None)
        if settings is None:
            if first == last:  # fewer rows than ranks
                return (torch.empty((0, *values.shape[1:]), dtype=values.dtype),)
            return (files.read(keys[CODES], first, last),)
        assert last is not None
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
