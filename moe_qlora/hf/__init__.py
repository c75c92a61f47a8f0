"""Packing while transformers loads: the only place that touches its loader.

A `from_pretrained` call with a bitsandbytes config goes in, a model with packed experts comes out.
Open switch.py first, which draws the path of one load:

switch.py         which quantizer class serves bitsandbytes configs, and back
quantizer.py      that class: what transformers asks a quantizer while it loads a model
converters.py     packs the checkpoint's tensors as they are read, some experts at a time; folders
                  that their makers quantized: which config wins, names, reading
model.py          the attributes and methods that make a model look to hosts as if bitsandbytes
                  had loaded it
"""
