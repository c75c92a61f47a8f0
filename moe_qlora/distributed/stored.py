"""Fills a sharded model from a packed folder: each rank reads the bytes of its shares, no others.

Codes and statistics on disk are the bytes of the whole packed weight in order (FORMAT.md), so that
a share of one is a range of bytes of the other, at any number of ranks. Nothing is decoded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.reader import Checkpoint
from ..errors import CheckpointError
from ..packing.format import (
    ABSMAX,
    CODES,
    NESTED_ABSMAX,
    NESTED_TABLE,
    RECORD,
    SCALES,
    TABLE,
    read_record,
    value_problems,
)
from ..packing.share_packer import ranks_of
from .filling import PackedTarget

_HEADER = 16  # bytes before nested absmax: the offset and three zeros


def fill_stored(target: PackedTarget, keys: Mapping[str, str], checkpoint: Checkpoint) -> None:
    """Fill this rank's share of one packed weight; `keys` are its tensors' by their ends."""
    codes: Any = target.codes()
    row = torch.Size(target.codes_shape[1:]).numel()
    first, last = ranks_of(codes).span(target.codes_shape[0])
    share = checkpoint.read_bytes(keys[CODES], first * row, last * row)
    share = share.view(codes.dtype).view(-1, *target.codes_shape[1:])
    if target.settings.kind == "int8":
        bits: Any = target.statistics.scale_bits
        first, last = ranks_of(bits).span(len(bits))
        scales = checkpoint.read_bytes(keys[SCALES], 4 * first, 4 * last).view(torch.int32)
        target.put(share, {"scale_bits": scales}, None)
        return
    record = RECORD + target.settings.kind
    small = {end: checkpoint.read(keys[end]) for end in (record, TABLE)}
    if target.settings.double_quant:
        small[NESTED_TABLE] = checkpoint.read(keys[NESTED_TABLE])
    problem = next(value_problems(small, target.shape, target.settings, None), None)
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
