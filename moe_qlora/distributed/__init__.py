"""Many GPUs: each rank gets its part of a packed model.

Only code for several ranks is here; other rooms reach it through world.py. The engines are
torch.distributed's and transformers' own. Open load_sharded.py first.

load_sharded.py  shards a model before it is filled (hf/fill.py); transformers' `DistributedConfig`
sharding.py      makes every tensor of a packed weight a parameter, which engines shard
gathered.py      addresses of layers that FSDP2 gathers, for CUDA graphs
gather.py        a whole state dict from all ranks; checks that these were given the same
ranks.py         what other rooms ask by `world()`; serves one process too
"""
