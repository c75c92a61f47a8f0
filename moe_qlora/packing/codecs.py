"""Codecs: everything that differs between the ways of packing a weight, one object each.

    bnb4bit.py   nf4, fp4, int8   as bitsandbytes packs them
    mxfp4.py     mxfp4            codes and scales of the checkpoint that a weight came from

A codec of your own is a class that derives from `Codec`, added by `register(YourCodec())`.
`bnb_4bit_quant_type` of a `BitsAndBytesConfig` then selects it for expert weights. They are decoded
by its own `decode`, and computed by the backends for plain decoded weights. It does not pack
bitsandbytes' Linear layers, so that `llm_int8_skip_modules` must name them.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import UnsupportedWeightError
from ..kernels.limits import cdiv
from ..kernels.weights import TABLES, PackedWeight

Shape = Sequence[int]
Tensors = Mapping[str, Tensor]
Settings = Any  # `CodecSettings` of settings.py, which imports this file

CODES = ""  # end of the key of a packed weight's codes, which is the weight's name


class TensorSpec(NamedTuple):
    """Dtype and shape of one tensor; the shape is None for a record, whose length is open."""

    dtype: torch.dtype
    shape: tuple[int, ...] | None

    @property
    def numel(self) -> int:
        """Number of elements; 0 for the record, which no packed weight in memory has."""
        return 0 if self.shape is None else math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * self.numel


class Codec:
    """One way to pack weights: their codes and, for each unit of weights, one scale.

    The methods here serve any codec that packs a weight in row-major order, unit by unit, into
    `bits` a weight and one scale a unit. It must define `kind`, `quantize` and `decode`.
    Shapes are `(..., rows, columns)` of the whole decoded weight, `(E, rows, columns)` for experts.
    """

    kind: str  # its name in `bnb_4bit_quant_type`, manifests, reports and messages
    bits: int = 8  # of a code: 8, or fewer of which whole codes fill a byte
    blocksize: int = 64  # weights in a unit, a power of two from 32 to 4096
    scales: str = ".scales"  # end of the scales' key
    scale_dtype: torch.dtype = torch.float32
    # 16 values of 4-bit codes, two in a byte, the first in the high half, whose weights are value
    # times scale: the package's own kernels then compute with them. None: `decode` serves
    table: Sequence[float] | None = None

    is_kept = False  # the codes are a checkpoint's native ones, never packed again
    is_default = False  # of a config that asks for 4 bit and names no type
    loads_in_8bit = False  # by `load_in_8bit=True`, not `load_in_4bit` and its type
    packs_linears = False  # bitsandbytes' Linear layers support it
    has_record = False  # a stored weight has bitsandbytes' record, which names the decoded dtype
    # a module has the codes as a `Params4bit` and the statistics, with a table, in a `QuantState`;
    # else the codes as a plain parameter and scales in the decoder (decoders.py)
    in_quant_state = False
    decodes_whole = False  # `decode` needs no temporaries of the decoded weights' size
    linear_dtype: torch.dtype | None = None  # that bitsandbytes casts Linear weights to; None: none

    def settle(self, settings: Settings) -> Mapping[str, Any]:
        """Return the fields of settings that this codec fixes."""
        return {"double_quant": False, "storage_dtype": torch.uint8, "blocksize": self.blocksize}

    def unit(self, shape: Shape, settings: Settings) -> int:
        return settings.blocksize

    def codes_shape(self, shape: Shape) -> tuple[int, ...]:
        return (cdiv(math.prod(shape) * self.bits, 8), 1)

    def tensors(self, shape: Shape, settings: Settings) -> dict[str, TensorSpec]:
        """Return the tensors of a packed weight in a state dict, by the end of their key."""
        units = cdiv(math.prod(shape), self.unit(shape, settings))
        return {
            CODES: TensorSpec(settings.storage_dtype, self.codes_shape(shape)),
            self.scales: TensorSpec(self.scale_dtype, (units,)),
        }

    def constant_nbytes(self, settings: Settings) -> int:
        """Return the bytes of a weight in memory besides these tensors."""
        return 0

    def why_not(self, shape: Shape, settings: Settings) -> str | None:
        """Return why no weight of this shape can be packed, to follow its name; None if it can."""
        return None

    def value_problems(
        self, tensors: Tensors, shape: Shape, settings: Settings, dtype: torch.dtype | None
    ) -> Iterable[str]:
        """Return faults in a record among these tensors."""
        return ()

    def quantize(self, weights: Tensor, unit: int) -> tuple[Tensor, Tensor]:
        """Return codes and scales of weights `(n,)`, whole units.

        Codes are whole bytes, uint8 or int8. Only a weight's last unit may have fewer weights.
        """
        raise UnsupportedWeightError(
            f"{self.kind} keeps the codes of a checkpoint: weights are not packed to it."
        )

    def finish(
        self, codes: Tensor, scales: Tensor, shape: Shape, dtype: torch.dtype,
        settings: Settings,
    ) -> PackedWeight:  # fmt: skip
        """Return the weight of all of `quantize`'s codes, `(bytes,)`, and scales `(units,)`."""
        codes = codes.view(settings.storage_dtype).view(self.codes_shape(shape))
        return self.assemble({CODES: codes, self.scales: scales}, shape, dtype, settings)

    def assemble(
        self, tensors: Tensors, shape: Shape, dtype: torch.dtype | None, settings: Settings
    ) -> PackedWeight:
        """Return the weight of a state dict's tensors, which passed `problems`; copy nothing.

        The dtype is that of the record among them; without one, as on meta, `dtype`.
        """
        assert dtype is not None
        return PackedWeight(
            tensors[CODES], tensors[self.scales], None, settings.blocksize, None, torch.Size(shape),
            self.kind, dtype, settings.compute_dtype,
        )  # fmt: skip

    def decode(self, packed: PackedWeight, first: int, last: int) -> Tensor:
        """Return the weights `[first, last)` of the flattened stored weight, in its own dtype."""
        raise NotImplementedError

    def entries(self, packed: PackedWeight) -> dict[str, Tensor]:
        """Return a state dict's tensors except the codes, by the end of their key."""
        return {self.scales: packed.absmax}


_codecs: dict[str, Codec] = {}


def register(codec: Codec) -> None:
    """Add a codec under its kind; a ValueError where another has it."""
    if codec.kind in _codecs:
        raise ValueError(f"a codec of the kind {codec.kind!r} is registered already")
    if codec.bits not in (1, 2, 4, 8):
        raise ValueError(f"{codec.kind}.bits is {codec.bits}; expected 1, 2, 4 or 8")
    _codecs[codec.kind] = codec
    if codec.table is not None:
        TABLES[codec.kind] = tuple(codec.table)


def codecs() -> tuple[Codec, ...]:
    """Return all codecs, in the order in which they were registered."""
    return tuple(_codecs.values())


def kinds() -> tuple[str, ...]:
    """Return the kinds of all codecs, in the same order."""
    return tuple(_codecs)


def codec_of(kind: str) -> Codec:
    """Return the registered codec of a kind."""
    return _codecs[kind]
