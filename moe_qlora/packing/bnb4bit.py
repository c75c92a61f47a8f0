"""nf4, fp4 and int8, as bitsandbytes packs them.

4 bit is two codes in a byte and one absmax a block. For n weights under the key `<name>`, where a
block is 64 weights:

    <name>              storage dtype (n / 2 / itemsize, 1)   two codes in a byte
    .absmax             float32   (n / 64,)                   one a block
    .quant_map          float32   (16,)                       the codes' values
    .quant_state.bitsandbytes__<kind>   uint8   any length    record: JSON of the rest
    and with double quantization, which cuts the absmax into blocks of 256:
    .absmax             uint8     (n / 64,)
    .nested_absmax      float32   (n / 64 / 256,)
    .nested_quant_map   float32   (256,)
    and in the record, the offset (float32) that was subtracted from the absmax

The value of a weight is table[code] * absmax. int8 is one code a weight and one scale a row:

    <name>              int8      as the weight
    .SCB                float32   (rows,)

The value of a weight is code * scale / 127.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from ..errors import UnsupportedWeightError
from ..kernels.limits import cdiv
from ..kernels.weights import TABLES, NestedAbsmax, PackedWeight
from ..layout import dtype_name
from .codecs import CODES, Codec, Shape, Tensors, TensorSpec
from .settings import CodecSettings

SCALES = ".SCB"
ABSMAX = ".absmax"
NESTED_ABSMAX = ".nested_absmax"
TABLE = ".quant_map"
NESTED_TABLE = ".nested_quant_map"
RECORD = ".quant_state.bitsandbytes__"  # and the kind
NESTED_BLOCK = 256  # blocks whose absmax share one of the second level in double quantization


class Bnb4bit(Codec):
    """A 4-bit type of bitsandbytes."""

    bits = 4
    scales = ABSMAX
    packs_linears = has_record = in_quant_state = decodes_whole = True

    def __init__(self, kind: str, *, is_default: bool = False) -> None:
        self.kind, self.table, self.is_default = kind, TABLES[kind], is_default

    def settle(self, settings: CodecSettings) -> Mapping[str, Any]:
        return {}

    def tensors(self, shape: Shape, settings: CodecSettings) -> dict[str, TensorSpec]:
        numel = math.prod(shape)
        blocks = cdiv(numel, settings.blocksize)
        storage, double = settings.storage_dtype, settings.double_quant
        tensors = {
            CODES: TensorSpec(storage, (cdiv(cdiv(numel, 2), storage.itemsize), 1)),
            ABSMAX: TensorSpec(torch.uint8 if double else torch.float32, (blocks,)),
            TABLE: TensorSpec(torch.float32, (16,)),
            RECORD + self.kind: TensorSpec(torch.uint8, None),
        }
        if double:
            tensors[NESTED_ABSMAX] = TensorSpec(torch.float32, (cdiv(blocks, NESTED_BLOCK),))
            tensors[NESTED_TABLE] = TensorSpec(torch.float32, (256,))
        return tensors

    def constant_nbytes(self, settings: CodecSettings) -> int:
        return torch.float32.itemsize if settings.double_quant else 0  # the offset

    def why_not(self, shape: Shape, settings: CodecSettings) -> str | None:
        numel, nbytes = math.prod(shape), cdiv(math.prod(shape), 2)
        if nbytes % settings.storage_dtype.itemsize:
            return (
                f"has {numel} weights, whose {nbytes} bytes of codes do not fill whole "
                f"{dtype_name(settings.storage_dtype)} numbers: set "
                "bnb_4bit_quant_storage=torch.uint8"
            )
        return None

    def value_problems(
        self, tensors: Tensors, shape: Shape, settings: CodecSettings, dtype: torch.dtype | None
    ) -> Iterator[str]:
        try:
            said = read_record(tensors[RECORD + self.kind])
            floats = (torch.float32, torch.float16, torch.bfloat16)
            dtypes = [dtype_name(one) for one in ((dtype,) if dtype else floats)]
            right = {"quant_type": self.kind, "blocksize": settings.blocksize, "shape": [*shape]}
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
            # Compared as text, in which 64, 64.0 and True differ.
            if json.dumps(said, sort_keys=True) != json.dumps(right, sort_keys=True):
                yield f"says of itself {said!r:.400}, and it must be {right!r:.400}"

    def quantize(self, weights: Tensor, unit: int) -> tuple[Tensor, Tensor]:
        import bitsandbytes  # noqa: F401 - defines torch.ops.bitsandbytes

        codes, absmax = torch.ops.bitsandbytes.quantize_4bit.default(
            weights, unit, self.kind, torch.uint8
        )
        return codes, absmax

    def finish(
        self, codes: Tensor, scales: Tensor, shape: Shape, dtype: torch.dtype,
        settings: CodecSettings,
    ) -> PackedWeight:  # fmt: skip
        import bitsandbytes.functional

        bnb: Any = bitsandbytes.functional  # no type annotations to check against
        codes = codes.view(settings.storage_dtype).unsqueeze(1)
        tensors = {CODES: codes, TABLE: bnb.get_4bit_type(self.kind, device=codes.device)}
        if settings.double_quant:
            offset = scales.mean()
            scales, state = bnb.quantize_blockwise(scales.sub_(offset), blocksize=NESTED_BLOCK)
            tensors |= {NESTED_ABSMAX: state.absmax, NESTED_TABLE: state.code}
        packed = self.assemble({**tensors, ABSMAX: scales}, shape, dtype, settings)
        if packed.nested is not None:
            packed.nested = packed.nested._replace(offset=offset)
        return packed

    def assemble(
        self, tensors: Tensors, shape: Shape, dtype: torch.dtype | None, settings: CodecSettings
    ) -> PackedWeight:
        codes, record, nested = tensors[CODES], tensors.get(RECORD + self.kind), None
        said = {} if record is None else read_record(record)
        if settings.double_quant:
            offset = torch.empty((), dtype=torch.float32, device=codes.device)
            if record is not None:
                offset.fill_(said["nested_offset"])
            nested = NestedAbsmax(
                tensors[NESTED_TABLE], tensors[NESTED_ABSMAX], offset, NESTED_BLOCK
            )
        return PackedWeight(
            codes, tensors[ABSMAX], tensors[TABLE], settings.blocksize, nested, torch.Size(shape),
            self.kind, getattr(torch, said["dtype"]) if said else cast(torch.dtype, dtype),
            settings.compute_dtype,
        )  # fmt: skip

    def decode(self, packed: PackedWeight, first: int, last: int) -> Tensor:
        block = packed.blocksize
        begin, blocks = first // block, cdiv(last, block)
        end = min(blocks * block, packed.numel)
        flat = packed.codes.detach().view(-1).view(torch.uint8)
        codes = flat[begin * block // 2 : (end + 1) // 2]
        absmax = _first_level_absmax(packed, begin, blocks)
        if packed.device.type != "cpu":
            flat = _kernel(packed, codes, absmax, (end - begin * block,))
        else:
            # One block as one row (codec.py says why). A last block that is not full is a separate
            # row of even length, since the kernel falls back to a compiled path for odd ones.
            full = (end - begin * block) // block
            rest, bytes_ = end - begin * block - full * block, full * block // 2
            flat = _kernel(packed, codes[:bytes_], absmax[:full], (full, block)).view(-1)
            if rest:
                tail = _kernel(packed, codes[bytes_:], absmax[full:], (1, rest + rest % 2))
                flat = torch.cat([flat, tail.view(-1)[:rest]]) if full else tail.view(-1)[:rest]
        return flat[first - begin * block : last - begin * block]

    def entries(self, packed: PackedWeight) -> dict[str, Tensor]:
        from .decoders import to_quant_state

        entries = to_quant_state(packed).as_dict(packed=True)
        return {f".{part}": value for part, value in entries.items()}


NF4, FP4 = Bnb4bit("nf4"), Bnb4bit("fp4", is_default=True)


def _first_level_absmax(packed: PackedWeight, begin: int, end: int) -> Tensor:
    nested = packed.nested
    if nested is None:
        return packed.absmax[begin:end].float()
    import bitsandbytes  # noqa: F401 - defines torch.ops.bitsandbytes

    block = nested.blocksize
    first, last = begin // block, cdiv(end, block)
    codes, outer = packed.absmax[first * block : last * block], nested.absmax[first:last]
    absmax = torch.ops.bitsandbytes.dequantize_blockwise.default(
        codes, outer, nested.table, block, torch.float32
    )
    absmax += nested.offset
    return cast(Tensor, absmax[begin - first * block : end - first * block])


def _kernel(packed: PackedWeight, codes: Tensor, absmax: Tensor, shape: tuple[int, ...]) -> Tensor:
    decoded = torch.ops.bitsandbytes.dequantize_4bit.default(
        codes, absmax, packed.blocksize, packed.kind, shape, packed.dtype
    )
    return cast(Tensor, decoded)


def read_record(record: Tensor) -> dict[str, Any]:
    """Return bitsandbytes' record of a packed weight; a ValueError or TypeError if it is none."""
    value = json.loads(bytes(record.flatten().tolist()).decode())
    if not isinstance(value, dict):
        raise TypeError("it is no JSON object")
    return value


class Int8(Codec):
    """bitsandbytes' int8, whose units are rows."""

    kind = "int8"
    scales = SCALES
    loads_in_8bit = packs_linears = True
    linear_dtype = torch.float16

    def settle(self, settings: CodecSettings) -> Mapping[str, Any]:
        return {"double_quant": False, "storage_dtype": torch.int8}

    def unit(self, shape: Shape, settings: CodecSettings) -> int:
        return shape[-1]

    def codes_shape(self, shape: Shape) -> tuple[int, ...]:
        return tuple(shape)

    def quantize(self, weights: Tensor, unit: int) -> tuple[Tensor, Tensor]:
        """Pack rows; cast to float16 for bitsandbytes' CUDA kernel, which supports nothing else."""
        import bitsandbytes  # noqa: F401 - defines torch.ops.bitsandbytes

        rows = weights.view(-1, unit)
        if rows.device.type == "cuda":
            rows = rows.half()
        codes, scales, _ = torch.ops.bitsandbytes.int8_vectorwise_quant.default(rows, 0.0)
        return codes, scales

    def finish(
        self, codes: Tensor, scales: Tensor, shape: Shape, dtype: torch.dtype,
        settings: CodecSettings,
    ) -> PackedWeight:  # fmt: skip
        if dtype != torch.float16 and not bool(scales.isfinite().all()):
            row = int(torch.nonzero(~scales.isfinite())[0])
            raise UnsupportedWeightError(
                f"Row {row} of the weight holds values that float16 cannot, which bitsandbytes' "
                "int8 kernel takes on this device: pack it to 4 bit, or on the CPU."
            )
        return super().finish(codes, scales, shape, dtype, settings)

    def assemble(
        self, tensors: Tensors, shape: Shape, dtype: torch.dtype | None, settings: CodecSettings
    ) -> PackedWeight:
        # Block size 0 tells kernels that each row has one scale.
        return replace(super().assemble(tensors, shape, dtype, settings), blocksize=0)

    def decode(self, packed: PackedWeight, first: int, last: int) -> Tensor:
        """Decode the weights [first, last) of the flattened weight; both are whole rows."""
        import bitsandbytes  # noqa: F401 - defines torch.ops.bitsandbytes

        columns = packed.shape[-1]
        rows = packed.codes.detach().view(-1, columns)[first // columns : last // columns]
        scales = packed.absmax[first // columns : last // columns]
        decoded = torch.ops.bitsandbytes.int8_vectorwise_dequant.default(rows, scales)
        return cast(Tensor, decoded.to(packed.dtype)).view(-1)


INT8 = Int8()
