"""Cutting a packed weight into shares by experts, and joining them again.

A share's codes and statistics are the bytes that the whole packed weight has there, wherever its
ends are ends of blocks:

    first level    a block of (mostly) 64 weights must not belong to two ranks: else an error
    second level   with double quantization, 256 first-level blocks are coded together; where these
                   straddle the end of a share, the share's absmax are coded anew in blocks of
                   their own, and `is_exact` says so

The offset of double quantization is the whole weight's either way, so that shares join again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..errors import UnsupportedWeightError
from ..kernels.limits import cdiv
from ..kernels.weights import ALL_BLOCKS, NestedAbsmax, PackedWeight
from .codec import decode_absmax, first_level_absmax, nest_absmax
from .format import (
    ABSMAX,
    CODES,
    EXPONENTS,
    NESTED_ABSMAX,
    NESTED_BLOCK,
    NESTED_TABLE,
    RECORD,
    SCALES,
    TABLE,
    read_record,
)
from .settings import CodecSettings


def is_exact(shape: Sequence[int], first: int, last: int, settings: CodecSettings) -> bool:
    """Whether the experts `[first, last)` of a packed weight are whole second-level blocks."""
    if settings.kind == "int8" or not settings.double_quant:
        return True
    blocks = math.prod(shape) // shape[0] // settings.blocksize
    return first * blocks % NESTED_BLOCK == 0 and (
        last == shape[0] or last * blocks % NESTED_BLOCK == 0
    )


def why_not_cut(shape: Sequence[int], ranks: int, settings: CodecSettings) -> str | None:
    """Return why a weight cannot be divided among ranks, to follow its name; None if it can."""
    if shape[0] % ranks:
        return f"has {shape[0]} experts, which {ranks} ranks cannot hold in equal numbers"
    weights = math.prod(shape) // ranks
    if settings.kind == "int8":
        return None
    if weights % settings.blocksize or weights // 2 % settings.storage_dtype.itemsize:
        return (
            f"has {weights} weights for each of {ranks} ranks, which are no whole blocks of "
            f"{settings.blocksize}: quantization would mix experts of two ranks"
        )
    return None


def cut(packed: PackedWeight, first: int, last: int) -> PackedWeight:
    """Return the experts `[first, last)` of a packed weight as one of their own, copied."""
    settings = CodecSettings.of(packed)
    shape = torch.Size((last - first, *packed.shape[1:]))
    if packed.kind == "int8":
        rows = packed.numel // packed.shape[-1] // packed.shape[0]
        codes = packed.codes.detach()[first:last].clone()
        absmax = packed.absmax[first * rows : last * rows].clone()
        return replace(packed, codes=codes, absmax=absmax, shape=shape, owner=None)
    weights = packed.numel // packed.shape[0]
    blocks = weights // packed.blocksize
    if weights % packed.blocksize and (first, last) != (0, packed.shape[0]):
        raise UnsupportedWeightError(
            f"A weight of shape {tuple(packed.shape)} has {weights} weights an expert, which are "
            f"no whole blocks of {packed.blocksize}: its experts cannot be told apart."
        )
    flat = packed.flat_codes[first * weights // 2 : cdiv(last * weights, 2)].clone()
    codes = flat.view(settings.storage_dtype).unsqueeze(1)
    nested, (begin, end) = packed.nested, (first * blocks, last * blocks)
    if nested is None or is_exact(packed.shape, first, last, settings):
        absmax = packed.absmax[begin:end].clone()
        if nested is not None:
            size = nested.blocksize
            outer = nested.absmax[begin // size : cdiv(end, size)].clone()
            nested = nested._replace(absmax=outer)
    else:
        absmax, nested = nest_absmax(first_level_absmax(packed, begin, end), nested.offset)
    return replace(packed, codes=codes, absmax=absmax, nested=nested, shape=shape, owner=None)


def cut_tensors(
    read: Callable[[str, int, int | None], Tensor],
    shape: Sequence[int],
    first: int,
    last: int,
    settings: CodecSettings,
) -> dict[str, Tensor]:
    """Return the state-dict tensors of the experts `[first, last)` of a stored packed weight.

    `read` gives the rows `[start, stop)` of the tensor whose key ends so; only a share's own are
    read, of codes and of statistics. They are what `codec.restore` takes for the share's shape.
    """
    if settings.kind == "int8":
        rows = math.prod(shape[:-1]) // shape[0]
        return {CODES: read(CODES, first, last), SCALES: read(SCALES, first * rows, last * rows)}
    weights = math.prod(shape) // shape[0]
    blocks, size = weights // settings.blocksize, 2 * settings.storage_dtype.itemsize
    begin, end = first * blocks, last * blocks
    if settings.kind == "mxfp4":
        codes = read(CODES, first * weights // size, last * weights // size)
        return {CODES: codes, EXPONENTS: read(EXPONENTS, begin, end)}
    record = RECORD + settings.kind
    tensors = {
        CODES: read(CODES, first * weights // size, cdiv(last * weights, size)),
        TABLE: read(TABLE, 0, None),
        record: _record_of_share(read(record, 0, None), shape, last - first),
    }
    if not settings.double_quant:
        return tensors | {ABSMAX: read(ABSMAX, begin, end)}
    outer = begin // NESTED_BLOCK, cdiv(end, NESTED_BLOCK)
    nested = read(NESTED_ABSMAX, *outer)
    table = read(NESTED_TABLE, 0, None)
    if is_exact(shape, first, last, settings):
        absmax = read(ABSMAX, begin, end)
    else:
        start = outer[0] * NESTED_BLOCK
        stored = read(ABSMAX, start, min(outer[1] * NESTED_BLOCK, shape[0] * blocks))
        offset = torch.tensor(0.0, device=stored.device)
        around = NestedAbsmax(table, nested, offset, NESTED_BLOCK)
        scales = decode_absmax(stored, around, begin - start, end - start)
        absmax, again = nest_absmax(scales, offset)
        nested, table = again.absmax, again.table
    return tensors | {ABSMAX: absmax, NESTED_ABSMAX: nested, NESTED_TABLE: table}


def _record_of_share(record: Tensor, shape: Sequence[int], experts: int) -> Tensor:
    """Return a stored record with a share's shape in place of the whole weight's."""
    try:
        said = read_record(record)
    except (ValueError, TypeError):
        return record  # restore says what is wrong with it
    if said.get("shape") != [*shape]:
        return record
    text = json.dumps(said | {"shape": [experts, *shape[1:]]})
    return torch.tensor(list(text.encode()), dtype=torch.uint8, device=record.device)


def join(parts: Sequence[PackedWeight]) -> PackedWeight:
    """Return shares of one weight, in the order of their experts, as the whole: undo `cut`."""
    first = parts[0]
    shape = torch.Size((sum(part.shape[0] for part in parts), *first.shape[1:]))
    codes = torch.cat([part.codes.detach() for part in parts])
    constant = first.nested is not None and first.nested.blocksize == ALL_BLOCKS
    if constant or first.nested is None or first.absmax.numel() % NESTED_BLOCK == 0:
        absmax = torch.cat([part.absmax for part in parts])
        nested = first.nested
        if nested is not None and not constant:
            nested = nested._replace(absmax=torch.cat([p.nested.absmax for p in parts if p.nested]))
    else:
        scales = [first_level_absmax(part, 0, part.absmax.numel()) for part in parts]
        absmax, nested = nest_absmax(torch.cat(scales), first.nested.offset)
    return replace(first, codes=codes, absmax=absmax, nested=nested, shape=shape, owner=None)
