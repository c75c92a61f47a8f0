"""Packing: a fused expert weight goes in, bitsandbytes' 4-bit or int8 format comes out, and back.

Open codec.py first. In the order of use:

codecs.py       what a codec is, and the registry of them: bnb4bit.py, int8.py, mxfp4.py
settings.py     which fields of a `BitsAndBytesConfig` decide how a weight is packed
format.py       the format: dtypes, shapes and bytes of its tensors, and which weights fit it
selection.py    which weights of a model are packed, and the rule of `llm_int8_skip_modules`
codec.py        pack a weight, whole or in pieces, and dequantize any range of its experts
quant_state.py  between packed weights and bitsandbytes' `QuantState`
decoders.py     the modules that hold a weight's statistics, for one GPU and for many
state_dict.py   packed weights in state dicts, under bitsandbytes' keys and as parameters
parametrize.py  how a packed weight sits on its module, moves, is copied, saved and loaded
linear.py       bitsandbytes' stock Linear layers as packed weights
meta.py         packed weights without values, on the meta device
"""

from .bnb4bit import FP4, NF4
from .codecs import register
from .int8 import INT8
from .mxfp4 import MXFP4

for _codec in (NF4, FP4, INT8, MXFP4):
    register(_codec)
