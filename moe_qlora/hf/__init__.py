"""Packing while transformers loads: the only place that touches its loader.

A `from_pretrained` call with a bitsandbytes config goes in, a model with packed experts comes out.
Open switch.py first, which draws the path of one load:

switch.py         which quantizer class serves bitsandbytes configs, and back; whose config wins
quantizer.py      that class: what transformers asks a quantizer while it loads a model
fill.py           the weights that are hidden from transformers, and the loop that fills them:
                  whole, or the shares of one rank
model.py          the attributes and methods that make a model look to hosts as if bitsandbytes
                  had loaded it

Changes of transformers and of a model, and when each is undone:

AUTO_QUANTIZER_MAPPING (two classes),               switch.py  when no block is open and `disable`
    AutoHfQuantizer.merge_quantization_configs                 was called: exactly what was there
a hook of the model's state dict, its `tie_weights` fill.py    when the load has filled its weights;
    and `_keys_to_ignore_on_load_unexpected`                   a load that fails drops the model
torch before 2.13 shards integers                   distributed/sharding.py
                                                               when the load has filled its weights
methods in its `__dict__` (`_METHODS`)              model.py   by `dequantize`, which gives it back
"""
