"""What a load in a distributed run takes from its surroundings."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import distributed
from transformers.distributed import DistributedConfig

from moe_qlora import world
from moe_qlora.distributed.load_sharded import RankLoad
from moe_qlora.errors import ConfigError


@pytest.mark.parametrize(
    ("distributed_run", "current", "local_rank", "devices", "own"),
    [
        (False, 0, 3, 4, None),
        (True, 0, 3, 4, 3),
        (True, 0, 0, 4, None),
        (True, 2, 3, 4, None),  # the program has set one
        (True, 0, 3, 1, None),  # each rank sees its own device alone
    ],
)
def test_ranks_do_not_all_load_to_the_first_device(
    monkeypatch, distributed_run, current, local_rank, devices, own
):
    monkeypatch.setattr(world, "runs_distributed", lambda: distributed_run)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(distributed, "get_node_local_rank", lambda fallback_rank: local_rank)
    assert world.world().device() == own


@pytest.mark.parametrize("field", ["tp_size", "pp_size", "ep_size"])
def test_what_packed_experts_do_not_support_is_refused(field):
    RankLoad(DistributedConfig()).begin(dict)
    asked = SimpleNamespace(**{field: 2})
    with pytest.raises(ConfigError, match=f"distributed_config has {field}=2, .*by FSDP2 with"):
        RankLoad(asked).begin(dict)


def test_a_configuration_of_an_older_transformers_is_refused():
    with pytest.raises(ConfigError, match=r"update transformers, or load with moe_qlora\.load_"):
        RankLoad(SimpleNamespace(fsdp_size=2)).begin(dict)
