"""One rank's share of a layer's experts: which ones it holds, and how shares are cut and joined.

Under expert parallelism a rank holds the experts `[first, last)` of each layer as a packed weight
of their own. A share's codes and statistics are the bytes that the whole packed weight has there,
wherever its ends are ends of blocks:

    first level    a block of (mostly) 64 weights must not belong to two ranks: else an error
    second level   with double quantization, 256 first-level blocks are coded together; where these
                   straddle the end of a share, the share's absmax are coded anew in blocks of
                   their own, and `is_exact` says so

The offset of double quantization is the whole weight's either way, so that shares join again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, distributed, nn

from ..errors import QuantizationError, UnsupportedWeightError, first_line
from ..kernels.limits import cdiv
from ..kernels.weights import ALL_BLOCKS, NestedAbsmax, PackedWeight
from ..layout import unwrapped
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

_SHARE = "_moe_qlora_share"


@dataclass(frozen=True, eq=False)
class ExpertShare:
    """The experts `[first, last)` that this rank holds of a layer's `experts`.

    `mesh` is a `DeviceMesh` whose last dimension divides the experts; ranks along the other one, if
    there is one, hold copies. `batches` is the number of different batches that all its ranks see
    in a step together.
    """

    experts: int
    first: int
    last: int
    mesh: Any
    batches: int

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertShare:
        return self  # process groups cannot be copied, and the copy of a model uses the same ones

    @property
    def count(self) -> int:
        """Number of experts that this rank holds."""
        return self.last - self.first

    @property
    def group(self) -> Any:
        """The process group whose ranks hold all experts together."""
        return self.mesh.get_group(self.mesh.ndim - 1)

    @property
    def copies(self) -> Any:
        """The process group whose ranks hold the same experts; None where each is held once."""
        return self.mesh.get_group(0) if self.mesh.ndim > 1 and self.mesh.size(0) > 1 else None

    def mean(self, name: str, absmax: Tensor) -> Tensor:
        """Return the mean of a weight's absmax, of which each rank of the group holds as many.

        It has the bits of the mean of all absmax in one tensor. All ranks of the group must call
        it; where one does not, it is a `QuantizationError`.
        """
        parts = [torch.empty_like(absmax) for _ in range(distributed.get_world_size(self.group))]
        gather_absmax(name, parts, absmax.contiguous(), self.group)
        return torch.cat(parts).mean()


def absmax_mean(share: ExpertShare | None, name: str) -> Callable[[Tensor], Tensor]:
    """Return what gives the mean of a weight's absmax: this rank's, or of a share all ranks'."""
    return torch.mean if share is None else partial(share.mean, name)


def gather_absmax(name: str, parts: list[Tensor], absmax: Tensor, group: Any) -> None:
    """Gather each rank's absmax of a weight into `parts`; `QuantizationError` where one is lost."""
    try:
        distributed.all_gather(parts, absmax, group=group)
    except RuntimeError as error:
        raise QuantizationError(
            f"Packing {name} failed on rank {distributed.get_rank()} while it gathered absmax "
            f"from all ranks ({first_line(error)}): every rank must take part to the end; load "
            "the model again."
        ) from error


def share_of(module: nn.Module) -> ExpertShare | None:
    """Return which experts a module holds; None where it holds all of its layer's."""
    return cast("ExpertShare | None", module.__dict__.get(_SHARE))


def set_share(module: nn.Module, share: ExpertShare) -> None:
    """Note which experts a module holds."""
    module.__dict__[_SHARE] = share


def first_share(model: nn.Module) -> ExpertShare | None:
    """Return the share of the model's first experts module that has one; None if none has."""
    shares = (share_of(module) for module in model.modules())
    return next((share for share in shares if share is not None), None)


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


class LocalNames:
    """The names of `local_tensors`, found anew whenever they are asked for: adapters come later."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __iter__(self) -> Iterator[str]:
        return iter(local_tensors(self.model))


def keep_from_ddp(model: nn.Module) -> None:
    """Let DDP, which would overwrite them with the first rank's, leave local tensors alone.

    It asks the module that it wraps for their names, by the attribute that
    `DistributedDataParallel._set_params_and_buffers_to_ignore_for_model` sets.
    """
    host: Any = model
    host._ddp_params_and_buffers_to_ignore = LocalNames(model)


def local_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return, by name, the parameters and buffers of experts that no other rank may overwrite.

    These are the packed weights and biases of modules with a share, and the LoRA factors on them.
    """
    names: dict[str, Tensor] = {}
    held = {id(module) for module in model.modules() if share_of(module) is not None}
    for prefix, module in model.named_modules():
        if id(unwrapped(module)) not in held:
            continue
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            names[f"{prefix}.{name}".lstrip(".")] = tensor
    return names
