"""Packing: a fused expert weight goes in, bitsandbytes' 4-bit or int8 format comes out, and back.

Open codec.py first. In the order of use:

settings.py     which fields of a `BitsAndBytesConfig` decide how a weight is packed
format.py       the format: the tensors of a packed weight, their dtypes, shapes and bytes
selection.py    which weights of a model are packed, and the rule of `llm_int8_skip_modules`
supported.py    which tensors can be packed, and why another one cannot
codec.py        pack a weight, whole or in pieces, and dequantize any range of its experts
quant_state.py  between packed weights and bitsandbytes' `QuantState`
parametrize.py  how a packed weight sits on its module, moves, is copied, saved and loaded
meta.py         packed weights without values, on the meta device
"""
