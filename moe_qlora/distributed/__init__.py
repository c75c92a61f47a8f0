"""Many GPUs: a packed model goes in, and each rank keeps its part of it.

Open expert_parallel.py or fsdp.py first. Engines are torch.distributed's and transformers' own;
what is here tells them what a packed weight is.

expert_parallel.py  each rank holds some experts of every layer, and tokens travel to them
state.py            a model's whole state dict, gathered from all ranks
gathered_dispatch.py  how tokens travel between few ranks
watch.py            checks that no engine takes a rank's experts for copies of all ranks'
fsdp.py             which modules FSDP2 shards, and integers on every torch
filling.py          gives a sharded model its values, each rank its own shares
stored.py           the same from a packed folder, by ranges of bytes
adapters.py         adapters on a model that has no values yet
"""
