"""Models and adapters that ranks share are saved, gathered and loaded as those of one process."""

import copy

import pytest
import torch
from torch import distributed
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
from tests.helpers import training
from tests.helpers.folders import contents
from tests.helpers.ranks import SIZES, are_same, assert_same_adapter, said, sharded
from tests.helpers.training import adamw, adapted, loaded, restore, state_of, token_batches, train

WORLD = 4
SETTINGS = {name: training.SETTINGS[name] for name in ("bf16 storage", "int8")}
CALLS = ("merge_adapter", "merge_and_unload", "unmerge_adapter", "load_adapter")


def all_cases(rank, world, folder):
    results = {}
    for settings, values in SETTINGS.items():
        model = loaded(folder / "plain", values)
        model.save_pretrained(folder / "replicated" / settings)
        distributed.barrier()
        sharded(model).save_pretrained(folder / "sharded" / settings, max_shard_size="20KB")
        # the folder is whole when any rank has returned
        results[f"{settings}: files"] = set(contents(folder / "sharded" / settings))
        # as Trainer does it: torch's keys, gathered on the first rank
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        whole = get_model_state_dict(model, options=options)
        model.save_pretrained(folder / "given" / settings, state_dict=whole)
    return results | adapters(folder / "adapter") | checkpoints(rank, folder)


def adapters(folder):
    model = adapted(loaded(folder.parent / "plain"))
    model.save_pretrained(folder / "replicated")
    sharded(model).save_pretrained(folder / "sharded")
    model.save_pretrained(folder / "sharded")  # into a folder that holds one
    zero(model)
    model.load_adapter(folder / "sharded", "default")
    model.save_pretrained(folder / "loaded")
    more = {"load_adapter": (folder / "sharded", "second")}
    refused = {name: said(getattr(model, name), *more.get(name, ())) for name in CALLS}
    return {"refused": refused, "adapters": list(model.peft_config)}


def zero(model):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.zero_()


def fresh(folder, mesh=None):
    """A sharded model whose adapters compute nothing, and its optimizer."""
    model = sharded(adapted(loaded(folder / "plain")), **({} if mesh is None else {"mesh": mesh}))
    zero(model)
    return model, adamw(model, foreach=False)


def checkpoints(rank, folder):
    """Train, save, go on; then resume in another number of ranks."""
    model = sharded(adapted(loaded(folder / "plain")))
    optimizer = adamw(model, foreach=False)
    losses = train(model, token_batches(0, 3, 12), rank, WORLD, optimizer=optimizer)
    checkpoint.save(state_of(model, optimizer), checkpoint_id=folder / "dcp")
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = get_model_state_dict(model, options=options)
    # a copy: the counts of steps are the optimizer's own tensors
    moments = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    single = moe_qlora.full_state_dict(model)
    if rank == 0:
        torch.save(single, folder / "full.pt")
    losses += train(model, token_batches(3, 6, 12), rank, WORLD, optimizer=optimizer)
    results = {"losses": losses, "keys": len(single)}

    model, optimizer = fresh(folder)  # from the first rank's whole tensors
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, full, options=options)
    set_optimizer_state_dict(model, optimizer, moments, options=options)
    results["broadcast"] = train(model, token_batches(3, 6, 12), rank, WORLD, optimizer=optimizer)

    mesh = DeviceMesh("cpu", [0, 1, 2])
    if rank < 3:
        (model, optimizer), group = fresh(folder, mesh), mesh.get_group()
        restore(model, optimizer, folder / "dcp", process_group=group)
        results["resumed by 3"] = train(
            model, token_batches(3, 6, 12), rank, 3, group=group, optimizer=optimizer
        )
    distributed.barrier()
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("state")
    tiny_model("qwen3_moe", **SIZES).save_pretrained(folder / "plain")
    for settings, values in SETTINGS.items():
        model = loaded(folder / "plain", values)
        model.save_pretrained(folder / "single" / settings)
        model.save_pretrained(folder / "single, cut" / settings, max_shard_size="20KB")
    adapted(loaded(folder / "plain")).save_pretrained(folder / "adapter" / "single")
    return folder


@pytest.fixture(scope="module")
def results(folder):
    return run_distributed(all_cases, WORLD, folder)


@pytest.mark.parametrize("settings", SETTINGS)
def test_models_are_saved_as_one_process_does(results, folder, settings):
    for how in ("replicated", "given"):
        assert contents(folder / how / settings) == contents(folder / "single" / settings)
    single = contents(folder / "single, cut" / settings)
    assert len(single) > 6  # several shards
    assert contents(folder / "sharded" / settings) == single
    for result in results:
        assert result[f"{settings}: files"] == set(single)


def test_adapters_are_saved_and_loaded_as_in_one_process(results, folder):
    for how in ("replicated", "sharded", "loaded"):
        assert_same_adapter(folder / "adapter" / how, folder / "adapter" / "single")


def test_training_goes_on_from_a_checkpoint_on_as_many_ranks_or_fewer(results, folder):
    uninterrupted = train(adapted(loaded(folder / "plain")), token_batches(0, 6, 12))
    for rank, result in enumerate(results):
        assert result["losses"] == pytest.approx(uninterrupted, abs=1e-5)
        assert result["broadcast"] == pytest.approx(uninterrupted[3:], abs=1e-5)
        if rank < 3:
            assert result["resumed by 3"] == pytest.approx(uninterrupted[3:], abs=1e-5)


def test_the_full_state_dict_is_that_of_one_process(results, folder):
    full = torch.load(folder / "full.pt")
    single = adapted(loaded(folder / "plain")).state_dict()
    assert list(full) == list(single)
    full, alone = ({k: t for k, t in d.items() if ".lora_" not in k} for d in (full, single))
    assert are_same(full, alone)  # but for what is trained there
    assert [result["keys"] for result in results] == [len(single)] + [0] * (WORLD - 1)


def test_what_needs_whole_weights_is_refused(results):
    for result in results:
        for call, text in result["refused"].items():
            assert text.startswith("AdapterError: ")
            assert "model.embed_tokens.weight is sharded over ranks" in text
            assert ("add adapters before" if call == "load_adapter" else "moe-qlora merge") in text
        assert result["adapters"] == ["default"]
