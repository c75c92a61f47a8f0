"""Models and adapters that ranks share are saved, gathered and loaded as those of one process.

One group of processes runs all cases: starting it takes longer than a case.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
)

import moe_qlora
from moe_qlora.testing import run_distributed, tiny_model
from tests.helpers.ranks import are_same, assert_same_adapter, content, said, sharded
from tests.helpers.training import (
    NF4,
    adapted,
    loaded,
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
        if settings == "nf4 double":  # as Trainer does it: torch's keys, gathered on the first rank
            options = StateDictOptions(full_state_dict=True, cpu_offload=True)
            whole = get_model_state_dict(model, options=options)
            model.save_pretrained(folder / "given", state_dict=whole)
    return results | adapters(rank, folder)


def adapters(rank: int, folder: Path) -> dict[str, Any]:
    results: dict[str, Any] = {}
    model = adapted(loaded(folder / "plain", NF4))
    model.save_pretrained(folder / "adapter" / "replicated")
    single = moe_qlora.full_state_dict(sharded(model))
    results["keys"] = len(single)
    if rank == 0:
        torch.save(single, folder / "full.pt")
    model.save_pretrained(folder / "adapter" / "sharded")
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
    assert content(folder / "replicated" / settings) == content(folder / "single" / settings)
    assert content(folder / "given") == content(folder / "single" / "nf4 double")
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


def test_the_full_state_dict_is_that_of_one_process(results, folder):
    full = torch.load(folder / "full.pt")
    single = adapted(loaded(folder / "plain", NF4)).state_dict()
    assert list(full) == list(single)
    assert are_same(full, single)
    assert [result["keys"] for result in results] == [len(single)] + [0] * (WORLD - 1)
