"""The format of a packed weight: the tensors that hold it, by the end of their key.

Those of nf4, fp4 and int8 are bitsandbytes' format, as a packed Linear layer has it in a state
dict; mxfp4 has the codes and scales of the checkpoint that the weight came from. For n weights
under the key `<name>`, where a block is 64 weights:

    nf4, fp4   <name>                 storage dtype (n / 2 / itemsize, 1)   two codes in a byte
               .absmax                float32   (n / 64,)                   one a block
               .quant_map             float32   (16,)                       what the codes stand for
               .quant_state.bitsandbytes__<kind>   uint8   any length       record: JSON of the rest
      and with double quantization, which cuts the absmax into blocks of 256:
               .absmax                uint8     (n / 64,)
               .nested_absmax         float32   (n / 64 / 256,)
               .nested_quant_map      float32   (256,)
               and in the record, the offset (float32) that was taken off the absmax
    int8       <name>                 int8      as the weight               one code a weight
               .SCB                   float32   (rows,)                     one scale a row
    mxfp4      <name>                 uint8     (n / 2, 1)                  two codes in a byte
               .exponents             uint8     (n / 32,)                   one a block of 32: e8m0

    kind       code table             blocks          order of weights      value of a weight
    nf4, fp4   bitsandbytes' (16,)    64 of all       the decoded weight's  table[code] * absmax
    mxfp4      E2M1 (16,)             32 of a row     the decoded weight's, table[code] *
                                                      or, stored            2**(exponent - 127)
                                                      transposed, that of
                                                      its transpose
    int8       none                   a row           the decoded weight's  code * scale / 127

The first of the two codes in a byte is in the byte's high half. All divisions round up. That is
0.5625 bytes a weight in 4 bit, 0.5159 with double quantization, and 0.53125 for mxfp4.
Packing, blank weights on meta, key names, checks of folders and byte counts all follow from
`packed_tensors`. Decoding trusts tensors: whatever comes from outside passes `problems` first.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels.limits import cdiv
from ..kernels.weights import MX_BLOCK, TABLES
from ..layout import dtype_name
from .settings import FLOAT_DTYPES, CodecSettings

CODES = ""
ABSMAX = ".absmax"
NESTED_ABSMAX = ".nested_absmax"
TABLE = ".quant_map"
NESTED_TABLE = ".nested_quant_map"
RECORD = ".quant_state.bitsandbytes__"  # and the kind
SCALES = ".SCB"
EXPONENTS = ".exponents"  # e8m0: byte i stands for 2**(i - 127), and 255 is NaN
NESTED_BLOCK = 256
"""Blocks whose absmax share one second-level absmax in double quantization."""


class TensorSpec(NamedTuple):
    """Dtype and shape of one tensor; the shape is None for the record, whose length is open."""

    dtype: torch.dtype
    shape: tuple[int, ...] | None

    @property
    def numel(self) -> int | None:
        """Number of elements, None where it is open."""
        return None if self.shape is None else math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes; the record, which no packed weight in memory has, counts none."""
        return self.dtype.itemsize * (self.numel or 0)


def packed_tensors(shape: Sequence[int], settings: CodecSettings) -> dict[str, TensorSpec]:
    """Return the tensors of a packed weight of this shape, by the end of their key."""
    numel = math.prod(shape)
    if settings.kind == "int8":
        rows = numel // shape[-1]
        return {
            CODES: TensorSpec(torch.int8, tuple(shape)),
            SCALES: TensorSpec(torch.float32, (rows,)),
        }
    if settings.kind == "mxfp4":
        return {
            CODES: TensorSpec(torch.uint8, (cdiv(numel, 2), 1)),
            EXPONENTS: TensorSpec(torch.uint8, (cdiv(numel, MX_BLOCK),)),
        }
    blocks = cdiv(numel, settings.blocksize)
    storage, double = settings.storage_dtype, settings.double_quant
    tensors = {
        CODES: TensorSpec(storage, (cdiv(cdiv(numel, 2), storage.itemsize), 1)),
        ABSMAX: TensorSpec(torch.uint8 if double else torch.float32, (blocks,)),
        TABLE: TensorSpec(torch.float32, (16,)),
        RECORD + settings.kind: TensorSpec(torch.uint8, None),
    }
    if double:
        tensors[NESTED_ABSMAX] = TensorSpec(torch.float32, (cdiv(blocks, NESTED_BLOCK),))
        tensors[NESTED_TABLE] = TensorSpec(torch.float32, (256,))
    return tensors


def packed_nbytes(shape: Sequence[int], settings: CodecSettings) -> int:
    """Return the bytes of a packed weight in memory: codes, statistics and code tables together."""
    constants = 1 if settings.double_quant else 0  # the offset
    if settings.kind == "mxfp4":
        constants = 16 + 256 + 2  # both tables, the second level's scale and its offset
    stored = sum(spec.nbytes for spec in packed_tensors(shape, settings).values())
    return stored + constants * torch.float32.itemsize


def key_ends(settings: CodecSettings) -> tuple[str, ...]:
    """Return what follows a packed weight's name in its keys: "" for the codes, then statistics."""
    return tuple(packed_tensors((1, 1), settings))


def why_not(weight: Tensor, settings: CodecSettings) -> str | None:
    """Return why this tensor cannot be packed, to follow its name in a sentence; None if it can."""
    plain = weight.detach()
    if hasattr(weight, "ds_id") or hasattr(weight, "ds_status"):
        return "is partitioned by DeepSpeed ZeRO-3: pack the model before DeepSpeed takes it over"
    if type(plain) is not Tensor:
        kind = type(plain).__name__
        if hasattr(plain, "device_mesh"):
            return f"is sharded ({kind}): pack the model before it is sharded"
        return f"is a {kind} and no plain tensor: it is packed already by another tool, or traced"
    if plain.is_meta:
        return "is on the meta device and has no values: load the weights first"
    return why_not_packed(plain.shape, plain.dtype, settings)


def why_not_packed(
    shape: Sequence[int], weight_dtype: torch.dtype, settings: CodecSettings
) -> str | None:
    """Return what `why_not` does for a tensor of which only shape and dtype are known."""
    if weight_dtype not in FLOAT_DTYPES:
        dtype = dtype_name(weight_dtype)
        if weight_dtype.is_floating_point and weight_dtype.itemsize > 1:
            return f"is {dtype}: bitsandbytes packs float32, float16 and bfloat16; cast it first"
        return (
            f"is {dtype}, so that it is packed already by another tool or is no weight: "
            "dequantize it to float32, float16 or bfloat16 first"
        )
    numel = math.prod(shape)
    if len(shape) < 2 or numel == 0:
        return f"has the shape {tuple(shape)}: a weight has two or more dimensions and no empty one"
    if settings.kind == "mxfp4":
        row = shape[-2] if settings.stored_transposed else shape[-1]
        if row % MX_BLOCK:
            return f"has stored rows of {row} weights, which are no whole blocks of {MX_BLOCK}"
    nbytes = cdiv(numel, 2)
    if settings.kind != "int8" and nbytes % settings.storage_dtype.itemsize:
        return (
            f"has {numel} weights, whose {nbytes} bytes of codes do not fill whole "
            f"{dtype_name(settings.storage_dtype)} numbers: set bnb_4bit_quant_storage=torch.uint8"
        )
    return None


def problems(
    tensors: Mapping[str, Tensor],
    shape: Sequence[int],
    settings: CodecSettings,
    dtype: torch.dtype | None = None,
) -> Iterator[str]:
    """Yield what of a packed weight's tensors decoding could not rely on, to follow its name.

    `tensors` are by the end of their key, the codes included; where one is on meta, or sharded,
    values are not looked at. `shape` and `dtype` are those of the decoded weight; without a dtype a
    4-bit weight may have any.
    """
    specs = packed_tensors(shape, settings)
    sound = True
    for end, spec in specs.items():
        tensor = tensors.get(end)
        form = None if tensor is None else (tensor.dtype, tuple(tensor.shape))
        if form is None or form[0] != spec.dtype or spec.shape not in (None, form[1]):
            sound = False
            seen = "nothing" if form is None else f"{dtype_name(form[0])} of shape {form[1]}"
            yield (
                f"has {seen} as its {end or 'codes'}; a weight of shape {tuple(shape)} has "
                f"{dtype_name(spec.dtype)} of shape {spec.shape or '(any,)'} there"
            )
    for end in sorted(tensors.keys() - specs.keys()):
        sound = False
        yield f"has {end}, which a weight packed with {settings.to_dict()} has not"
    if sound and not any(t.is_meta or hasattr(t, "device_mesh") for t in tensors.values()):
        yield from value_problems(tensors, shape, settings, dtype)


def value_problems(
    tensors: Mapping[str, Tensor],
    shape: Sequence[int],
    settings: CodecSettings,
    dtype: torch.dtype | None,
) -> Iterator[str]:
    """Yield which values bitsandbytes would not have written, of tensors whose form is right."""
    for end, name in ((ABSMAX, "absmax"), (NESTED_ABSMAX, "nested absmax"), (SCALES, "scale")):
        scales = tensors.get(end)
        if scales is not None and scales.is_floating_point():
            wrong = ~(scales.isfinite() & (scales >= 0))
            if bool(wrong.any()):
                first = int(wrong.nonzero()[0])
                yield f"has the {name} {float(scales[first])} at {first}, not finite and 0 or more"
    if settings.kind == "mxfp4" and EXPONENTS in tensors:
        bad = overflowing_block(tensors[CODES], tensors[EXPONENTS], dtype or torch.float32)
        if bad is not None:
            yield f"has the exponent {bad.exponent}, which decodes to {bad.value}, at {bad.block}"
    if not settings.has_record:
        return
    for end, table in ((TABLE, torch.tensor(TABLES[settings.kind])), (NESTED_TABLE, _dynamic())):
        # Computed anew by each version and machine: the last bit may differ, and does no harm.
        if end in tensors and not torch.allclose(tensors[end].cpu(), table, rtol=0, atol=1e-6):
            yield f"has values as its {end} that are not the code table of bitsandbytes"
    try:
        said = read_record(tensors[RECORD + settings.kind])
        dtypes = [dtype_name(one) for one in ((dtype,) if dtype else FLOAT_DTYPES)]
        right = {"quant_type": settings.kind, "blocksize": settings.blocksize, "shape": [*shape]}
        right["dtype"] = said["dtype"] if said["dtype"] in dtypes else " or ".join(dtypes)
        if settings.double_quant:
            offset = said["nested_offset"]
            if type(offset) is not float or not bool(torch.tensor(offset).isfinite()):
                yield f"has the nested offset {offset!r:.80}, which is no finite number"
            right |= {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32"}
            right["nested_offset"] = offset
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        yield f"has a record of its settings that cannot be read ({reason:.80})"
    else:
        # As text, in which 64, 64.0 and True differ.
        if json.dumps(said, sort_keys=True) != json.dumps(right, sort_keys=True):
            yield f"says of itself {said!r:.400}, and it must be {right!r:.400}"


class BadBlock(NamedTuple):
    """A block of MXFP4 codes that does not decode to numbers."""

    block: int  # its number
    exponent: int
    value: str  # what it decodes to


def overflowing_block(codes: Tensor, exponents: Tensor, dtype: torch.dtype) -> BadBlock | None:
    """Return the first block of MXFP4 codes that holds NaN, or inf once it is decoded to `dtype`.

    Args:
        codes: Two in a byte, 16 bytes a block, any shape.
        exponents: uint8 (blocks,), e8m0.
        dtype: Of the decoded weight.
    """
    largest = torch.finfo(dtype).max
    safe = 127 + math.floor(math.log2(largest / max(TABLES["mxfp4"])))
    suspects = (exponents > safe).nonzero().flatten()  # blocks of small codes may be finite still
    pairs = codes.detach().view(torch.uint8).view(-1, MX_BLOCK // 2)[suspects]
    table = torch.tensor(TABLES["mxfp4"], dtype=torch.float64, device=codes.device).abs()
    values = torch.stack([table[(pairs >> 4).int()], table[(pairs & 15).int()]]).amax((0, 2))
    values *= 2.0 ** (exponents[suspects].double() - 127)
    bad = (values > largest) | (exponents[suspects] == 255)
    if not bool(bad.any()):
        return None
    index = int(suspects[int(bad.nonzero()[0])])
    exponent = int(exponents[index])
    return BadBlock(index, exponent, "NaN" if exponent == 255 else f"inf in {dtype_name(dtype)}")


def read_record(record: Tensor) -> dict[str, Any]:
    """Return bitsandbytes' record of a packed weight; a ValueError or TypeError if it is none."""
    value = json.loads(bytes(record.flatten().tolist()).decode())
    if not isinstance(value, dict):
        raise TypeError("it is no JSON object")
    return value


@cache
def _dynamic() -> Tensor:
    """Return the values of the codes that absmax are held in with double quantization."""
    from bitsandbytes.functional import create_dynamic_map

    return torch.as_tensor(create_dynamic_map(), dtype=torch.float32)
