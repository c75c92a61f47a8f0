"""Models and adapters that ranks share are saved, gathered and loaded as those of one process.

One group of processes runs all cases: starting it takes longer than a case.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh

import moe_qlora
from moe_qlora.testing import run_distributed, tiny_model
from tests.helpers.ranks import are_same, assert_same_adapter, content, said, sharded
from tests.helpers.training import (
    NF4,
    adamw,
    adapted,
    loaded,
    restore,
    state_of,
    token_batches,
    train,
)

WORLD = 4
SIZES = {
    "hidden_size": 64, "moe_intermediate_size": 48, "num_hidden_layers": 2, "num_experts": 6,
    "vocab_size": 256,
}  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    "nf4 double": NF4,
    "fp4 stored as bf16": {"load_in_4bit": True, "bnb_4bit_quant_storage": torch.bfloat16},
    "int8": {"load_in_8bit": True},
}


CALLS = (
    *("merge_adapter", "merge_and_unload", "unmerge_adapter"),
    "load_adapter",
)


def all_cases(rank: int, world: int, folder: Path) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for settings, values in SETTINGS.items():
        model = loaded(folder / "plain", values)
        model.save_pretrained(folder / "replicated" / settings)
        distributed.barrier()
        sharded(model).save_pretrained(folder / "sharded" / settings, max_shard_size="20KB")
        # the folder is whole when any rank has returned
        results[f"{settings}: files"] = names(folder / "sharded" / settings)
        if settings == "int8":
            (folder / "file").touch()
            results["no folder"] = said(model.save_pretrained, folder / "file")
        # as Trainer does it: torch's keys, gathered on the first rank
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        whole = get_model_state_dict(model, options=options)
        model.save_pretrained(folder / "given" / settings, state_dict=whole)
    results |= adapters(folder) | checkpoints(rank, folder)
    return results


def adapters(folder: Path) -> dict[str, Any]:
    results = {}
    model = adapted(loaded(folder / "plain", NF4))
    model.save_pretrained(folder / "adapter" / "replicated")
    sharded(model).save_pretrained(folder / "adapter" / "sharded")
    model.save_pretrained(folder / "adapter" / "sharded")  # into a folder that holds one
    zero(model)
    model.load_adapter(folder / "adapter" / "sharded", "default")
    model.save_pretrained(folder / "adapter" / "loaded")
    source = folder / "adapter" / "sharded"
    more = {"load_adapter": (source, "second")}
    for name in CALLS:
        results[f"{name} refused"] = said(getattr(model, name), *more.get(name, ()))
    results["adapters"] = list(model.peft_config)
    return results


def checkpoints(rank: int, folder: Path) -> dict[str, Any]:
    """Train, save, go on; then resume in another number of ranks."""
    model = sharded(adapted(loaded(folder / "plain", NF4)))
    optimizer = adamw(model, foreach=False)
    losses = train(model, token_batches(0, 3, 12), rank, WORLD, optimizer=optimizer)
    results: dict[str, Any] = {}
    checkpoint.save(state_of(model, optimizer), checkpoint_id=folder / "dcp")
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = get_model_state_dict(model, options=options)
    # a copy: the counts of steps are the optimizer's own tensors
    moments = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    single = moe_qlora.full_state_dict(model)
    results["full, keys"] = len(full), len(single)
    if rank == 0:
        torch.save(single, folder / "full.pt")
    losses += train(model, token_batches(3, 6, 12), rank, WORLD, optimizer=optimizer)
    results["losses"] = losses
    del model
    # from the first rank's whole tensors
    model = sharded(adapted(loaded(folder / "plain", NF4)))
    zero(model)
    optimizer = adamw(model, foreach=False)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, full, options=options)
    set_optimizer_state_dict(model, optimizer, moments, options=options)
    results["broadcast"] = train(model, token_batches(3, 6, 12), rank, WORLD, optimizer=optimizer)
    mesh = DeviceMesh("cpu", [0, 1, 2])
    if rank < 3:
        results["resumed by 3"] = resumed(folder, mesh)
    distributed.barrier()
    return results


def resumed(folder: Path, mesh: DeviceMesh) -> list[float]:
    model = sharded(adapted(loaded(folder / "plain", NF4)), mesh=mesh)
    zero(model)
    optimizer = adamw(model, foreach=False)
    group = mesh.get_group()
    restore(model, optimizer, folder / "dcp", process_group=group)
    place = mesh.get_local_rank(), mesh.size()
    return train(model, token_batches(3, 6, 12), *place, group=group, optimizer=optimizer)


def zero(model: nn.Module) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.zero_()


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("state")
    tiny_model("qwen3_moe", **SIZES).save_pretrained(folder / "plain")
    for settings, values in SETTINGS.items():
        model = loaded(folder / "plain", values)
        model.save_pretrained(folder / "single" / settings)
        model.save_pretrained(folder / "single, cut" / settings, max_shard_size="20KB")
    adapted(loaded(folder / "plain", NF4)).save_pretrained(folder / "adapter" / "single")
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> list[dict[str, Any]]:
    return run_distributed(all_cases, WORLD, folder)


@pytest.mark.parametrize("settings", SETTINGS)
def test_models_are_saved_as_one_process_does(results, folder, settings):
    for how in ("replicated", "given"):
        assert content(folder / how / settings) == content(folder / "single" / settings)
    single = content(folder / "single, cut" / settings)
    assert len(single) > 6  # several shards
    assert content(folder / "sharded" / settings) == single
    text = f"{folder / 'file'} exists and is no empty folder, or is a mount"
    for result in results:
        assert result[f"{settings}: files"] == sorted(single)
        assert result["no folder"].startswith(f"CheckpointError: {text}")


@pytest.mark.parametrize("how", ["replicated", "sharded", "loaded"])
@pytest.mark.usefixtures("results")
def test_adapters_are_saved_as_one_process_does(folder: Path, how: str) -> None:
    assert_same_adapter(folder / "adapter" / how, folder / "adapter" / "single")


@pytest.mark.parametrize("call", CALLS)
def test_what_needs_whole_weights_is_refused(results: list[dict[str, Any]], call: str) -> None:
    for result in results:
        text = result[f"{call} refused"]
        assert text.startswith("AdapterError: ")
        assert "model.embed_tokens.weight is sharded over ranks" in text
        assert ("add adapters before" if call == "load_adapter" else "moe-qlora merge") in text
        assert result["adapters"] == ["default"]


@pytest.fixture(scope="module")
def uninterrupted(folder: Path) -> list[float]:
    """Losses of one process."""
    model = adapted(loaded(folder / "plain", NF4))
    return train(model, token_batches(0, 6, 12))


@pytest.mark.parametrize("how", ["broadcast", "resumed by 3"])
def test_training_goes_on_from_a_checkpoint(results, uninterrupted, how):
    for result in results:
        assert result["losses"] == pytest.approx(uninterrupted, abs=1e-5)
    for result in results[: 3 if how == "resumed by 3" else WORLD]:
        assert result[how] == pytest.approx(uninterrupted[3:], abs=1e-5)


def test_the_full_state_dict_is_that_of_one_process(results, folder):
    full = torch.load(folder / "full.pt")
    single = adapted(loaded(folder / "plain", NF4)).state_dict()
    assert list(full) == list(single)
    full, alone = ({k: t for k, t in d.items() if ".lora_" not in k} for d in (full, single))
    assert are_same(full, alone)  # but for what is trained there
    assert [result["full, keys"][1] for result in results] == [len(single)] + [0] * (WORLD - 1)
