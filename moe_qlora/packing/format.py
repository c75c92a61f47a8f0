"""The format of a packed weight: the tensors that hold it, by the end of their key.

Each codec defines its own (`codecs.py` names their files); those of nf4, fp4 and int8 are
bitsandbytes' format, as a packed Linear layer has it in a state dict.

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

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ..layout import dtype_name
from .codecs import TensorSpec
from .settings import FLOAT_DTYPES, CodecSettings


def packed_tensors(shape: Sequence[int], settings: CodecSettings) -> dict[str, TensorSpec]:
    """Return the tensors of a packed weight of this shape, by the end of their key."""
    return settings.codec.tensors(shape, settings)


def packed_nbytes(shape: Sequence[int], settings: CodecSettings) -> int:
    """Return the bytes of a packed weight in memory: codes, statistics and code tables together."""
    stored = sum(spec.nbytes for spec in packed_tensors(shape, settings).values())
    return stored + settings.codec.constant_nbytes(settings)


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
    return settings.codec.why_not(shape, settings)


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
        yield from settings.codec.value_problems(tensors, shape, settings, dtype)
