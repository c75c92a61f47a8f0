"""Gives a sharded model its values, each rank its own shares, without a whole weight anywhere.

A model on meta is packed with blank weights, sharded, and allocated; `ShardedWeights` has noted
before where each weight sits, whatever wraps its module since. What a weight's values come from is
the caller's: `Rows` reads rows of a parameter by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CheckpointError, MoeQloraError, NonFiniteWeightError
from ..packing import parametrize
from ..packing.settings import CodecSettings
from ..packing.share_packer import SharePacker, ranks_of

Rows = Callable[[str, int, int], Tensor]
"""Returns rows `[start, stop)` of the first dimension of a parameter, by the parameter's name."""

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
    """Yield name, holder of the codes and their name there, statistics and shape of each weight."""
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
        if extremes and not bool(torch.stack(extremes).isfinite().all()):
            raise NonFiniteWeightError(
                f"{target.name} holds NaN or inf in the rows {first} to {last} of its first "
                "dimension, and a block with it could not be decoded: repair the checkpoint."
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
