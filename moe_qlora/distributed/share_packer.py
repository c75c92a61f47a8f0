"""Packs one rank's shares of a weight's codes and statistics, from the rows alone that they need.

FSDP2 cuts each parameter of the shardable layout (decoders.py) as `torch.chunk` does over its first
dimension. A `SharePacker` gives the shares that cutting the whole packed weight would give, bit for
bit, and takes only the rows that this rank's share of the codes lies in:

    first level    each rank packs the blocks that its codes lie in; no block depends on another
    absmax         gathered from all ranks in fp32, one weight at a time (1/16 byte a weight)
    second level   double quantization of all absmax, on every rank; then each keeps its share
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, distributed

from ..errors import MoeQloraError, QuantizationError, first_line
from ..kernels.limits import cdiv
from ..packing.codec import Packer
from ..packing.decoders import ShardableStatistics, as_bits
from ..packing.settings import CodecSettings


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


class SharePacker:
    """Packs this rank's shares of one weight; pieces of `rows` come in order."""

    def __init__(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        settings: CodecSettings,
        codes_shape: Sequence[int],
        ranks: Ranks,
    ) -> None:
        """`codes_shape` is that of the parameter of the whole weight's codes, uint8 or int8."""
        self.name = name
        self.shape, self.dtype, self.device = torch.Size(shape), dtype, torch.device(device)
        self.settings, self.ranks, self._codes_shape = settings, ranks, torch.Size(codes_shape)
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
        self._packer: Packer | None = None
        if self._begin < self._end:
            count = self._end - self._begin
            part = (count,) if count % unit else (count // unit, unit)
            self._packer = Packer(part, dtype, self.device, self._plain)

    def add(self, start: int, piece: Tensor) -> None:
        """Pack the needed ones of these rows of the first dimension, which begin at `start`."""
        first = start * (self.shape.numel() // self.shape[0])
        flat = piece.detach().reshape(-1)
        begin, end = max(self._begin - first, 0), max(self._end - first, 0)
        if self._packer is not None and begin < end:
            self._packer.add(flat[begin:end])

    def fail(self, error: MoeQloraError) -> None:
        """Note why this rank cannot pack its share; `finish` then raises on every rank."""
        self._error = error

    @torch.no_grad()
    def finish(self) -> tuple[Tensor, dict[str, Tensor], Tensor | None]:
        """Return this rank's shares of codes and, by name, statistics, and the code tables.

        All ranks must call it.
        """
        codes, scales = self._packed()
        scales = self._gathered(scales)
        codes = codes.view(-1, *self._codes_shape[1:])
        codec = self.settings.codec
        if not codec.in_quant_state:
            bits = as_bits(scales.to(codec.scale_dtype))
            return codes, {"scale_bits": self._share(bits)}, None
        none = torch.empty(0, dtype=torch.uint8, device=self.device)
        packed = codec.finish(none, scales, self.shape, self.dtype, self.settings)
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
            packed = self._packer.finish()
        except MoeQloraError as error:
            self._error = error
            return nothing, scales
        first, last = self._bytes
        return packed.codes.view(-1)[first:last], packed.absmax

    def _gathered(self, scales: Tensor) -> Tensor:
        """Return the scales of all blocks, in order; raise where a rank could not pack."""
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
    """Gather each rank's absmax of a weight into `parts`; `QuantizationError` where one is lost."""
    try:
        distributed.all_gather(parts, absmax, group=group)
    except RuntimeError as error:
        raise QuantizationError(
            f"Packing {name} failed on rank {distributed.get_rank()} while it gathered absmax "
            f"from all ranks ({first_line(error)}): every rank must take part to the end; load "
            "the model again."
        ) from error
