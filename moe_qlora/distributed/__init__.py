"""Many GPUs: each rank gets its part of a packed model.

Only code for several ranks is here, and other rooms reach it through world.py, whose other side is
ranks.py. The engines are torch.distributed's and transformers' own; this room adapts packed weights
to them. Open load_sharded.py first.

ranks.py               implements world.py's interface for several ranks
sharding.py            makes every tensor of a packed weight a parameter, which engines shard;
                       which modules FSDP2 shards
filling.py             hf/fill.py for a sharded model: packs it blank, fills each rank's shares
load_sharded.py        such a load without transformers' loader
distributed_config.py  from_pretrained with transformers' `DistributedConfig`
adapters.py            adapters on a model that has no values yet, or that is sharded already
agreement.py           checks that all ranks were given the same
gather.py              a model's whole state dict, gathered from all ranks
"""
