"""Packing while transformers loads: the only place that touches its loader.

A `from_pretrained` call with a bitsandbytes config goes in, a model with packed experts comes out.
Open switch.py first, which draws the path of one load:

switch.py         which quantizer class serves bitsandbytes configs, and back; whose config wins
quantizer.py      that class: what transformers asks a quantizer while it loads a model
fill.py           the weights that are hidden from transformers, whole or one rank's shares; what
                  it changes on the model is undone when these are filled
model.py          what makes a model look to hosts as if bitsandbytes had loaded it
"""
