"""Experts in each rank's host memory, under DDP: losses, gradients and files are the resident's."""

from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from transformers.distributed import DistributedConfig

import moe_qlora
from moe_qlora.packing.parametrize import iter_packed
from moe_qlora.testing import run_distributed, tiny_model
from tests.helpers import training
from tests.helpers.delayed import delayed
from tests.helpers.folders import contents
from tests.helpers.ranks import said, sharded

# Settings, and whether experts go to host memory while they are loaded
WAYS = {"moved": ("int8", False), "loaded": ("bf16 storage", True)}
REFUSED = {
    "fsdp2, after a step": "offload_experts, and the model is sharded over ranks",
    "sharded first": "is sharded over ranks, by an engine",
    "prepare_sharding": "lies in host memory, by offload_experts",
    "config": "this load shards the model over ranks",
}


def load(folder, settings="nf4", *, offload=False, sharding=None):
    with moe_qlora.enabled(offload=offload):
        values = training.SETTINGS[settings]
        return training.loaded(Path(folder) / "plain", values, distributed_config=sharding)


def steps(model, rank, world, checkpointing):
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    wrapped = DistributedDataParallel(model)
    generator = torch.Generator().manual_seed(5)
    batches = [torch.randint(5, 88, (4, 6), generator=generator) for _ in range(3)]
    return wrapped, training.record(wrapped, batches, rank, world)


def run_case(folder, rank, world, settings, in_load):
    _, expected = steps(training.adapted(load(folder, settings)), rank, world, in_load)
    model = training.adapted(load(folder, settings, offload=in_load))
    off = moe_qlora.offload_experts(model)
    wrapped, found = steps(model, rank, world, in_load)
    training.assert_same_training(found, expected)
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    hosted = {name: tensor for name, tensor in tensors.items() if "parametrizations" in name}
    assert len(hosted) >= 4 and set(hosted) <= set(wrapped.parameters_to_ignore)
    versions = {name: tensor._version for name, tensor in hosted.items()}
    wrapped(input_ids=torch.arange(6)[None])  # DDP sends no buffers of theirs
    assert versions == {name: tensor._version for name, tensor in hosted.items()}
    assert off.copies > 0
    off.remove()
    assert not [m for _, m, _ in iter_packed(model) if "on host" in repr(m)]


def refusals(folder):
    def after_a_step():
        model = training.adapted(load(folder, offload=True))
        model(input_ids=torch.arange(6)[None])
        sharded(model)(input_ids=torch.arange(6)[None])

    two = DistributedConfig(fsdp_size=2)
    calls = {
        "fsdp2, after a step": after_a_step,
        "sharded first": lambda: moe_qlora.offload_experts(sharded(load(folder))),
        "prepare_sharding": lambda: moe_qlora.prepare_sharding(load(folder, offload=True)),
        "config": lambda: load(folder, offload=True, sharding=two),
    }
    return {name: said(call) for name, call in calls.items()}


def run(rank, world, folder):
    load(folder, offload=True).save_pretrained(f"{folder}/saved")
    with pytest.MonkeyPatch.context() as patch, delayed(patch):
        for way in WAYS.values():
            run_case(folder, rank, world, *way)
    return refusals(folder)


def test_two_ranks_train_and_save_as_with_resident_experts_and_cannot_shard(tmp_path):
    sizes = {"hidden_size": 64, "moe_intermediate_size": 40, "num_experts": 3}
    tiny_model("qwen3_moe", num_hidden_layers=3, **sizes).save_pretrained(tmp_path / "plain")
    load(tmp_path).save_pretrained(tmp_path / "packed")
    for texts in run_distributed(run, 2, str(tmp_path)):
        for name, words in REFUSED.items():
            assert words in texts[name], name
    assert contents(tmp_path / "saved") == contents(tmp_path / "packed")
