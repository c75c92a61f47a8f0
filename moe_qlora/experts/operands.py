"""Packed expert weights as the operands of an eager call, and of custom operators in graphs.

An eager call reads a `PackedWeight`. `torch.compile` cannot trace that, and a custom operator's
arguments are tensors and plain numbers only: there a weight is a `PackedOperand`, from which the
operator rebuilds it. Also here: the record of a module, with the source of its LoRA factors.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ..kernels.weights import NestedAbsmax, PackedWeight, WeightSpec
from ..packing import decoders, parametrize
from ..packing.codecs import codec_of, kinds

_RECORD = "_moe_qlora_experts"


class PackedOperand(NamedTuple):
    """A packed weight as tensors and constants."""

    # Codes and the bits of the scales; or codes, absmax, table and, with double quantization,
    # offset, nested absmax and nested table; or the handle of a weight in host memory
    tensors: list[Tensor]
    spec: WeightSpec  # The key of kernels, without the device
    dtype: torch.dtype  # Dtype of the weight that was packed
    compute_dtype: torch.dtype | None  # The config's compute dtype, or None
    stored_transposed: bool = False  # As of `PackedWeight`
    hosted: bool = False  # Whether it lies in host memory

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight as it is stored."""
        return self.spec.shape

    @property
    def numbers(self) -> list[int]:
        """`spec` as a custom operator's argument: kind, block sizes and shape."""
        shape, kind, blocksize, nested, _ = self.spec
        return [kinds().index(kind), blocksize, nested, *shape]


def read_operand(module: Any, name: str) -> PackedWeight | PackedOperand | None:
    """Return a packed expert parameter as an operand, or None for a plain one."""
    if not parametrize.is_packed(module, name):
        return None
    if not torch.compiler.is_compiling():
        return decoders.fetched(parametrize.parametrization_list(module, name))
    # Attribute reads that Dynamo can follow.
    chain = module.parametrizations[name]
    first, codes = chain[0], chain.original
    hosted = getattr(chain, "host", None) is not None
    swapped = first.stored_transposed
    *rest, rows, columns = first.weight_shape
    shape = (*rest, columns, rows) if swapped else (*rest, rows, columns)
    spec = WeightSpec(shape, first.kind, first.blocksize, first.nested_blocksize, -1)
    tensors = [chain.handle] if hosted else [codes, *first.parts()]
    return PackedOperand(tensors, spec, first.weight_dtype, first.compute_dtype, swapped, hosted)


def packed_weight(
    tensors: Iterator[Tensor], numbers: Sequence[int], dtype: torch.dtype
) -> PackedWeight:
    """Return a `PackedOperand`'s packed weight, from its numbers and an iterator of its tensors."""
    code, blocksize, nested, *sizes = numbers
    kind, shape, codes = kinds()[code], torch.Size(sizes), next(tensors).detach()
    if not codes.dim():
        return replace(decoders.fetch_by(codes).as_stored(), dtype=dtype, compute_dtype=None)
    codec = codec_of(kind)
    if not codec.in_quant_state:
        codes, scales = codes.view(codec.codes_shape(shape)), next(tensors).view(codec.scale_dtype)
        return PackedWeight(codes, scales, None, blocksize, None, shape, kind, dtype)
    absmax, table = islice(tensors, 2)
    second = None
    if nested:
        offset, outer, outer_table = islice(tensors, 3)
        second = NestedAbsmax(outer_table, outer, offset, nested)
    return PackedWeight(codes, absmax, table, blocksize, second, shape, kind, dtype)


@dataclass(frozen=True)
class LoraFactors:
    """One adapter's factors for one expert parameter, as PEFT stores them; in, out as applied."""

    a: Tensor  # `(E r, in)`, `lora_A.weight`, expert slowest: `a.reshape(E, r, in)`
    b: Tensor  # `(out, r E)`, `lora_B.weight`, expert fastest: `b.reshape(out, r, E)`
    scaling: float  # Factor of the product
    dropout: nn.Module | None = None  # Module applied to the projection's input, or None

    @property
    def drops(self) -> bool:
        """Whether dropout changes the input now."""
        return self.dropout is not None and self.dropout.training


@dataclass
class ExpertsRecord:
    """State of one experts module, an entry of its `__dict__`: a copy of the module has its own."""

    activated: bool = False  # Whether `activate` has selected the experts forward
    previous: str | None = None  # The implementation before
    gate: tuple[Any, ...] | None = None  # Fields of `gate_kernels.Gate`, None for another gate
    gate_sought: bool = False  # Whether `gate` is known
    lora: Any = None  # Source of LoRA factors: `lora.active_lora(name)`


_NO_RECORD = ExpertsRecord()  # Of modules without one, where none can be made: never changed


def record_of(module: nn.Module) -> ExpertsRecord:
    """Return a module's record to change it; made on first use."""
    if (record := module.__dict__.get(_RECORD)) is None:
        record = module.__dict__[_RECORD] = ExpertsRecord()
    return cast(ExpertsRecord, record)


def known_record(module: nn.Module) -> ExpertsRecord:
    """Return a module's record to read it."""
    return cast(ExpertsRecord, module.__dict__.get(_RECORD, _NO_RECORD))


def set_lora_source(module: nn.Module, source: Any) -> None:
    """Let the module's forward ask `source.active_lora(name)` for factors; None for no LoRA."""
    record_of(module).lora = source
