"""Packing: fused expert weights to bitsandbytes' 4-bit or int8 formats, and back.

codecs.py       the interface of a codec, and their registry: bnb4bit.py, mxfp4.py
settings.py     the fields of a `BitsAndBytesConfig` that decide how a weight is packed, and the
                tensors that result
selection.py    which weights of a model are packed, and the rule of `llm_int8_skip_modules`
codec.py        pack a weight, whole or in pieces, and dequantize any range of its experts
decoders.py     the modules with a weight's statistics; bitsandbytes' `QuantState` and Linear layers
parametrize.py  how a packed weight sits on its module, moves, is copied, saved and loaded
"""

from .bnb4bit import FP4, INT8, NF4
from .codecs import register
from .mxfp4 import MXFP4

for _codec in (NF4, FP4, INT8, MXFP4):
    register(_codec)
