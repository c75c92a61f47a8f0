"""Packing while transformers loads: the only place that touches its loader.

A `from_pretrained` call with a bitsandbytes config goes in, a model with packed experts comes out.
Open switch.py first, which draws the path of one load:

switch.py              which quantizer class serves bitsandbytes configs, and back
prequantized.py        folders that their makers quantized: which config wins, names, reading
quantizer.py           that class: what transformers asks a quantizer while it loads a model
distributed_config.py  loads in a distributed run: experts divided over ranks
fsdp_loading.py        loads that transformers shards by FSDP2
load_sharded.py        loads that FSDP2 shards without transformers' loader
converters.py          packs the checkpoint's tensors as they are read, one expert at a time
graphs.py              decoder layers as CUDA graphs, for training that waits for the host
recording.py           one call of a layer as two graphs, and their replay
model.py               the attributes and methods that make a model look to hosts as if bitsandbytes
                       had loaded it
"""
