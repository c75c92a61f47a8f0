"""Gives a sharded model its values, each rank its own shares, without a whole weight anywhere.

A model on meta is packed with blank weights, sharded, and allocated; `ShardedWeights` has noted
before where each weight sits, whatever wraps its module since. Its values come from

    CheckpointRows    rows of a 16-bit checkpoint's parameters, which are packed here
    fill_stored       a packed folder: codes and statistics on disk are the bytes of the whole
                      packed weight in order (FORMAT.md), so that a share of one is a range of bytes
                      of the other, at any number of ranks; nothing is decoded
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint.base import PlainBase
from ..checkpoint.reader import Checkpoint
from ..errors import CheckpointError, MoeQloraError, NonFiniteWeightError
from ..packing import parametrize
from ..packing.bnb4bit import ABSMAX, NESTED_ABSMAX, NESTED_TABLE, RECORD, TABLE, read_record
from ..packing.codec import LARGEST, are_below
from ..packing.codecs import CODES
from ..packing.settings import CodecSettings
from .share_packer import SharePacker, ranks_of

Rows = Callable[[str, int, int], Tensor]
"""Returns rows `[start, stop)` of the first dimension of a parameter, by the parameter's name."""

_HEADER = 16  # bytes before nested absmax: the offset and three zeros
# Least bytes of rows that are read in one piece: an expert, or as many small ones as fit in this.
_PIECE = 1 << 20


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

    def put(self, codes: Tensor, statistics: Mapping[str, Tensor], tables: Tensor | None) -> None:
        """Fill codes, statistics and tables with this rank's shares."""
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


@dataclass
class ShardedWeights:
    """Where the weights of a model sit, by the names that they had before adapters came."""

    packed: dict[str, PackedTarget] = field(default_factory=dict)
    plain: dict[str, PlainTarget] = field(default_factory=dict)

    def fill(self, read: Rows, device: torch.device) -> None:
        """Fill this rank's shares of all weights; what is packed is packed on `device`.

        All ranks must call it, and raise together where one cannot.
        """
        for target in self.packed.values():
            fill_packed(target, read, device)
        for plain in self.plain.values():
            fill_plain(plain, read)


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


def fill_packed(target: PackedTarget, read: Rows, device: torch.device) -> None:
    """Pack this rank's share of one weight from the rows that it lies in; all ranks call it."""
    packer = SharePacker(
        target.name, target.shape, target.dtype, device, target.settings, target.codes_shape,
        ranks_of(target.codes()),
    )  # fmt: skip
    first, last = packer.rows
    width = torch.Size(target.shape[1:]).numel() * target.dtype.itemsize
    step = max(_PIECE // max(width, 1), 1)
    extremes = []
    try:
        for start in range(first, last, step):
            stop = min(start + step, last)
            piece = read(target.name, start, stop).to(device, target.dtype)
            if tuple(piece.shape) != (stop - start, *target.shape[1:]):
                raise CheckpointError(
                    f"{target.name}: rows {start} to {stop} have the shape {tuple(piece.shape)}, "
                    f"and the model's config asks for {target.shape}: they are not of one model."
                )
            extremes.append(torch.stack(torch.aminmax(piece)))
            packer.add(start, piece)
        if extremes and not bool(are_below(torch.stack(extremes)).all()):
            raise NonFiniteWeightError(
                f"{target.name} holds NaN or inf in the rows {first} to {last} of its first "
                f"dimension (or {LARGEST:.0e} and more), and a block with it could not be "
                "decoded: repair the checkpoint."
            )
    except MoeQloraError as error:
        packer.fail(error)
    target.put(*packer.finish())


def fill_plain(target: PlainTarget, read: Rows) -> None:
    """Fill this rank's share of a parameter or buffer that is not packed."""
    tensor = target.tensor()
    if not tensor.dim():
        put_local(tensor, read(target.name, 0, 1).reshape(()))
        return
    first, last = ranks_of(tensor).span(len(tensor))
    if first < last:
        put_local(tensor, read(target.name, first, last))


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


class CheckpointRows:
    """Reads rows of the first dimension of parameters and buffers, and no others.

    What transformers converts as a whole only is read as a whole; the last such parameter is kept
    for its next rows.
    """

    def __init__(
        self,
        base: PlainBase,
        aliases: Mapping[str, tuple[str, ...]],
        transposed: Container[str] = (),
    ) -> None:
        """`aliases` are all names of tied parameters by each of them.

        `transposed` are weights that a packed layer holds the other way round than the checkpoint.
        """
        self._base, self._transposed = base, transposed
        self._last: tuple[str, Tensor] | None = None
        on_disk = base.layout.by_name.keys()
        names = {*on_disk, *aliases}
        stored = {n: next((a for a in (n, *aliases.get(n, ())) if a in on_disk), "") for n in names}
        self._stored = {name: other for name, other in stored.items() if other}

    def __call__(self, name: str, start: int, stop: int) -> Tensor:
        """Return the rows `[start, stop)`, on the CPU, in the dtype on disk."""
        stored = self._stored.get(name)
        if stored is None:
            raise CheckpointError(f"{self._base.folder} has no tensor for {name}.")
        group = self._base.layout.by_name[stored]
        shape = group.shapes[stored]
        if group.unit and shape and name not in self._transposed:
            return self._base.parameters(group, start, stop)[stored]
        if self._last is None or self._last[0] != stored:
            whole = self._base.parameters(group, 0, None)[stored]
            if name in self._transposed:
                whole = whole.T
            self._last = stored, whole.reshape(1) if not shape else whole
        return self._last[1][start:stop]


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
        target.put(share, {"scale_bits": scales}, None)
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
            statistics[name] = _nested(small[record], checkpoint, keys, first, last)
    tables = [small[end] for end in (TABLE, NESTED_TABLE) if end in small]
    target.put(share, statistics, torch.cat(tables).view(torch.uint8))


def _nested(
    record: Tensor, checkpoint: Checkpoint, keys: Mapping[str, str], first: int, last: int
) -> Tensor:
    """Return the bytes `[first, last)` of the second level: the offset, zeros, nested absmax."""
    offset = torch.tensor([read_record(record)["nested_offset"], 0.0, 0.0, 0.0])
    header = offset.view(torch.uint8)[first:last]
    begin, end = max(first - _HEADER, 0), max(last - _HEADER, 0)
    return torch.cat([header, checkpoint.read_bytes(keys[NESTED_ABSMAX], begin, end)])
