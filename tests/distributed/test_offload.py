"""Experts in each rank's host memory, under DDP: losses, gradients and files are the resident's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from transformers.distributed import DistributedConfig

import moe_qlora
from moe_qlora.packing.parametrize import iter_packed
from moe_qlora.testing import run_distributed, tiny_model
from tests.helpers import training
from tests.helpers.delayed import delayed
from tests.helpers.ranks import content, said, sharded

WAYS: dict[str, dict[str, Any]] = {
    "moved": {"settings": "int8"},
    "loaded": {"settings": "bf16 storage", "block": {"offload": True}, "reentrant": False},
}


def load(folder: str, case: dict[str, Any], sharding: Any = None, **block: Any) -> Any:
    settings = training.SETTINGS[case.get("settings", "nf4")]
    with moe_qlora.enabled(**block):
        return training.loaded(Path(folder) / "plain", settings, distributed_config=sharding)


def steps(model: Any, rank: int, world: int, case: dict[str, Any]) -> dict[str, Any]:
    if "reentrant" in case:
        model.gradient_checkpointing_enable({"use_reentrant": case["reentrant"]})
        model.enable_input_require_grads()
    wrapped = DistributedDataParallel(model)
    gradients: dict[str, Tensor] = {}

    def keep(step: int) -> None:
        named = model.named_parameters()
        gradients.update({f"{step} {n}": p.grad.clone() for n, p in named if p.grad is not None})

    generator = torch.Generator().manual_seed(5)
    batches = [torch.randint(5, 88, (4, 6), generator=generator) for _ in range(3)]
    losses = training.train(wrapped, batches, rank, world, after_backward=keep)
    return {
        "losses": losses, "gradients": gradients, "wrapped": wrapped,
        "kept": set(wrapped.parameters_to_ignore),
    }  # fmt: skip


def run_case(folder: str, rank: int, world: int, case: dict[str, Any]) -> dict[str, Any]:
    expected = steps(training.adapted(load(folder, case)), rank, world, case)
    model = training.adapted(load(folder, case, **case.get("block", {})))
    off = moe_qlora.offload_experts(model)
    found = steps(model, rank, world, case)
    hosted = {n for n, p in model.named_parameters() if "parametrizations" in n}
    hosted |= {n for n, b in model.named_buffers() if "parametrizations" in n}
    versions = [p._version for n, p in model.named_parameters() if n in hosted]
    found["wrapped"](input_ids=torch.arange(6)[None])
    result = {
        "losses": found["losses"] == expected["losses"],
        "gradients": found["gradients"].keys() == expected["gradients"].keys()
        and all(torch.equal(g, expected["gradients"][n]) for n, g in found["gradients"].items()),
        "count": len(found["gradients"]),
        "ignored": hosted <= found["kept"] and len(hosted) >= 4,
        "untouched": versions == [p._version for n, p in model.named_parameters() if n in hosted],
        "copies": off.copies > 0,
    }
    off.remove()
    result["removed"] = not [m for _, m, _ in iter_packed(model) if "on host" in repr(m)]
    return result


REFUSED = {
    "fsdp2, after a step": "offload_experts, and the model is sharded over ranks",
    "sharded first": "is sharded over ranks, by an engine",
    "prepare_sharding": "lies in host memory, by offload_experts",
    "config": "this load shards the model over ranks",
}


def run_refusals(folder: str) -> dict[str, str]:
    def hosted() -> Any:
        return load(folder, {}, offload=True)

    def shard() -> Any:
        model = training.adapted(hosted())
        model(input_ids=torch.arange(6)[None])
        return sharded(model)(input_ids=torch.arange(6)[None])

    two = DistributedConfig(fsdp_size=2)
    calls: dict[str, Any] = {
        "fsdp2, after a step": shard,
        "sharded first": lambda: moe_qlora.offload_experts(sharded(load(folder, {}))),
        "prepare_sharding": lambda: moe_qlora.prepare_sharding(hosted()),
        "config": lambda: load(folder, {}, two, offload=True),
    }
    return {name: said(call) for name, call in calls.items()}


def run(rank: int, world: int, folder: str) -> dict[str, Any]:
    load(folder, {}, offload=True).save_pretrained(f"{folder}/saved")
    with pytest.MonkeyPatch.context() as patch, delayed(patch):
        results = {name: run_case(folder, rank, world, case) for name, case in WAYS.items()}
    return {**results, "refusals": run_refusals(folder)}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("offload")
    sizes = {"hidden_size": 64, "moe_intermediate_size": 40, "num_experts": 3}
    tiny_model("qwen3_moe", num_hidden_layers=3, **sizes).save_pretrained(path / "plain")
    load(str(path), {}).save_pretrained(path / "packed")
    results = run_distributed(run, 2, str(path))
    assert content(path / "saved") == content(path / "packed")
    return results


@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_train_as_with_resident_experts(two: Any, way: str) -> None:
    for result in two:
        case = dict(result[way])
        assert case.pop("count") > 0
        assert all(case.values()), case


def test_what_cannot_be_had_is_one_sentence(two: Any) -> None:
    for result in two:
        for name, words in REFUSED.items():
            assert words in result["refusals"][name], name
