"""Packed models under DeepSpeed's ZeRO-2 and ZeRO-3, against one process.

They run where deepspeed is installed (0.19.8 was tried). One group of processes runs all cases.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.state import AcceleratorState, DistributedType, PartialState
from safetensors.torch import load_file
from torch import distributed, nn
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import Trainer

import moe_qlora
from moe_qlora.distributed.gather import whole
from moe_qlora.testing import run_distributed, tiny_model
from tests.helpers import training
from tests.helpers.ranks import are_same, assert_same_adapter, content, packed_bytes, said
from tests.helpers.training import (
    NF4,
    SETTINGS,
    adamw,
    adapted,
    four_steps,
    loaded,
    logged_losses,
    mean_of_ranks,
    token_batches,
    trainer_of,
)

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed here"
)

STEPS = 10
SIZES = {
    "hidden_size": 64, "moe_intermediate_size": 40, "num_hidden_layers": 2, "num_experts": 3,
    "vocab_size": 256,
}  # fmt: skip
# ZeRO-3 keeps parameters below this size whole, by default nearly all of a model as small as this.
ALL = {
    "stage3_param_persistence_threshold": 0,
    "stage3_gather_16bit_weights_on_model_save": True,
}
ZERO: dict[str, dict[str, Any]] = {"zero2": {"stage": 2}, "zero3": {"stage": 3, **ALL}}
CASES: dict[str, dict[str, Any]] = {
    "zero2": {"stage": 2},
    "zero3": {"stage": 3, **ALL},
    "zero3, small ones whole": {"stage": 3, "settings": "fp4", "reentrant": True, "steps": 3},
    "zero3, int8": {"stage": 3, **ALL, "settings": "int8", "steps": 3},
    "zero3, bf16": {"stage": 3, **ALL, "settings": "bf16 storage", "reentrant": False, "steps": 3},
}


def started(model: Any, **zero: Any) -> Any:
    """The model's DeepSpeed engine."""
    import deepspeed  # type: ignore[import-not-found]

    config = {"train_micro_batch_size_per_gpu": 6, "zero_optimization": zero}
    optimizer = adamw(model) if any(p.requires_grad for p in model.parameters()) else None
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def prepared(model: Any, **zero: Any) -> tuple[Any, Accelerator]:
    """The same by way of accelerate."""
    AcceleratorState._reset_state(True)
    config = {"train_micro_batch_size_per_gpu": 6, "zero_optimization": zero}
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    engine, _ = accelerator.prepare(model, adamw(model))
    return engine, accelerator


def train(engine: Any, steps: int) -> list[float]:
    """Mean losses over all ranks."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    losses = []
    engine.train()
    for ids in token_batches(0, steps, 12):
        own = ids.chunk(world)[rank]
        loss = engine(input_ids=own, labels=own).loss
        engine.backward(loss)
        engine.step()
        losses.append(mean_of_ranks(loss, world))
    return losses


def run_case(folder: Path, name: str, case: dict[str, Any]) -> dict[str, Any]:
    case = dict(case)
    settings, steps = case.pop("settings", "nf4"), case.pop("steps", STEPS)
    reentrant = case.pop("reentrant", None)
    model = adapted(loaded(folder / "plain", SETTINGS[settings]))
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    before = packed_bytes(model, whole)
    result: dict[str, Any] = {"losses": train(started(model, **case), steps)}
    result["intact"] = are_same(before, packed_bytes(model, whole))
    result["partitioned"] = [
        key for key, parameter in model.named_parameters()
        if hasattr(parameter, "ds_tensor") and parameter.numel() == 0 and key in before
    ]  # fmt: skip
    model.save_pretrained(folder / "trained" / name)
    return result


def trainer(folder: Path, name: str, world: int, zero: dict[str, Any]) -> Trainer:
    AcceleratorState._reset_state(True)
    options: dict[str, Any] = {"use_cpu": True}
    if zero:  # accelerate takes DeepSpeed without use_cpu alone
        auto = {"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto"}
        options = {"deepspeed": {**auto, "zero_optimization": zero}}
    arguments = four_steps(folder / name, world, train_sampling_strategy="sequential", **options)
    # after the arguments, which tell transformers of ZeRO-3
    return trainer_of(adapted(loaded(folder / "plain", NF4)), arguments)


def run_trainer(folder: Path, name: str, world: int, zero: dict[str, Any]) -> dict[str, Any]:
    first = trainer(folder, name, world, zero)
    first.train()
    first.save_model(str(folder / name / "saved"))
    first.model.save_pretrained(folder / name / "adapter")
    again = trainer(folder, f"{name}, again", world, zero)
    again.train(resume_from_checkpoint=str(folder / name / "checkpoint-2"))
    return {"losses": logged_losses(first), "resumed": logged_losses(again)}


def run_saves(folder: Path, name: str, zero: dict[str, Any]) -> dict[str, Any]:
    """Save what was not trained, which is bit for bit that of one process."""
    results: dict[str, Any] = {}
    for settings in SAVED:
        packed = started(loaded(folder / "plain", SETTINGS[settings]), **zero).module
        packed.save_pretrained(folder / name / settings / "packed", max_shard_size="20KB")
        full = moe_qlora.full_state_dict(packed)
        if full:
            torch.save(full, folder / name / settings / "full.pt")
    model = adapted(loaded(folder / "plain", NF4))
    engine, accelerator = prepared(model, **zero)
    model.save_pretrained(folder / name / "adapter")
    # as in the examples of accelerate and PEFT
    accelerator.unwrap_model(engine).save_pretrained(
        folder / name / "given",
        is_main_process=accelerator.is_main_process,
        state_dict=accelerator.get_state_dict(engine),
    )
    distributed.barrier()
    full = moe_qlora.full_state_dict(model)
    results["full"] = len(full)
    if full:
        torch.save(full, folder / name / "full.pt")
    if zero["stage"] != 3:
        return results
    calls = {
        "merge_adapter": (model.merge_adapter,),
        "load_adapter": (model.load_adapter, folder / name / "adapter", "second"),
        "state_dict": (partial(model.save_pretrained, state_dict=None), folder / name / "none"),
    }
    results["refusals"] = {key: said(call, *args) for key, (call, *args) in calls.items()}
    return results


SAVED = ("nf4", "int8", "bf16 storage")


def take_deepspeed_on_cpus() -> None:
    """Let accelerate count the processes; it takes DeepSpeed on GPUs, or for one on a CPU."""
    stock = PartialState.__init__

    def init(self: Any, cpu: bool = False, **kwargs: Any) -> None:
        stock(self, cpu=True, **kwargs)
        if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
            self.distributed_type = DistributedType.DEEPSPEED

    PartialState.__init__ = init  # type: ignore[method-assign]


def held_after_forward(folder: Path) -> dict[str, list[str]]:
    """Packed weights whose gathered tensors are there between forward and backward."""
    held = {}
    never = {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
    for settings in ("nf4", "int8"):
        model = adapted(loaded(folder / "plain", SETTINGS[settings]))
        engine = started(model, stage=3, stage3_prefetch_bucket_size=0, **never, **ALL)
        gathered: list[tuple[str, StorageWeakRef]] = []

        def note(module: nn.Module, args: Any, gathered: Any = gathered) -> None:
            for name, parameter in module.named_parameters():
                if not parameter.is_floating_point() and parameter.numel():
                    gathered.append((name, StorageWeakRef(parameter.data.untyped_storage())))

        for module in model.modules():
            if hasattr(module, "parametrizations") or hasattr(module, "statistics"):
                module.register_forward_pre_hook(note)
        ids = torch.randint(5, 248, (6, 8))
        engine.train()
        loss = engine(input_ids=ids, labels=ids).loss
        assert gathered
        held[settings] = [name for name, storage in gathered if not storage.expired()]
        engine.backward(loss)
        engine.step()
    return held


def all_cases(rank: int, world: int, folder: Path) -> dict[str, Any]:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    os.environ |= {"DS_ACCELERATOR": "cpu", "ACCELERATE_TORCH_DEVICE": "cpu"}
    # An extension for shared memory, which would be compiled for a minute. By its module's name,
    # since deepspeed.comm.torch is torch itself.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]
    take_deepspeed_on_cpus()
    results: dict[str, Any] = {"held": held_after_forward(folder)}
    for name, case in CASES.items():
        results[name] = run_case(folder, name, case)
    for name, zero in ZERO.items():
        results[f"{name}, saves"] = run_saves(folder, f"{name}, saves", zero)
        results[f"{name}, trainer"] = run_trainer(folder, f"{name}, trainer", world, zero)
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deepspeed")
    tiny_model("qwen3_moe", **SIZES).save_pretrained(folder / "plain")
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> list[dict[str, Any]]:
    return run_distributed(all_cases, 2, folder)


@pytest.fixture(scope="module")
def single(folder: Path) -> dict[str, list[float]]:
    """Losses of one process, whose adapters are saved."""
    losses = {}
    for settings in SETTINGS:
        model = adapted(loaded(folder / "plain", SETTINGS[settings]))
        losses[settings] = training.train(model, token_batches(0, STEPS, 12))
        model.save_pretrained(folder / "trained" / settings)
    return losses


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_as_one(results, single, folder, case):
    settings, steps = CASES[case].get("settings", "nf4"), CASES[case].get("steps", STEPS)
    expected = single[settings][:steps]
    for result in results:
        assert result[case]["losses"] == pytest.approx(expected, abs=1e-5)
        assert result[case]["intact"]
        assert bool(result[case]["partitioned"]) == (CASES[case]["stage"] == 3)
    if steps == STEPS:
        assert_close(folder / "trained" / case, folder / "trained" / settings)


def test_nothing_that_is_gathered_stays_until_the_backward(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["held"] == {"nf4": [], "int8": []}


def assert_close(folder: Path, expected: Path) -> None:
    saved = load_file(folder / "adapter_model.safetensors")
    single = load_file(expected / "adapter_model.safetensors")
    assert saved.keys() == single.keys()
    for key, tensor in single.items():
        assert torch.allclose(saved[key], tensor, atol=1e-4), key


@pytest.mark.parametrize("name", ZERO)
def test_models_and_adapters_are_saved_as_one_process_does(results, folder, name):
    saves, expected = folder / f"{name}, saves", folder / "expected" / name
    for settings in SAVED:
        model = loaded(folder / "plain", SETTINGS[settings])
        model.save_pretrained(expected / settings, max_shard_size="20KB")
        assert content(saves / settings / "packed") == content(expected / settings)
        assert are_same(torch.load(saves / settings / "full.pt"), model.state_dict())
    model = adapted(loaded(folder / "plain", NF4))
    model.save_pretrained(expected / "adapter")
    for how in ("adapter", "given"):
        assert_same_adapter(saves / how, expected / "adapter")
    assert are_same(torch.load(saves / "full.pt"), model.state_dict())
    assert [result[f"{name}, saves"]["full"] > 0 for result in results] == [True, False]


def test_what_zero3_cannot_do_is_refused(results: list[dict[str, Any]]) -> None:
    for rank, result in enumerate(results):
        refusals = result["zero3, saves"]["refusals"]
        assert "model.embed_tokens.weight is sharded over ranks" in refusals["merge_adapter"]
        assert "moe-qlora merge" in refusals["merge_adapter"]
        assert "is partitioned by DeepSpeed ZeRO-3" in refusals["load_adapter"]
        # all but the first take no part, as hosts want it that give the first one a state dict
        assert ("leave the argument out" in refusals["state_dict"]) == (rank == 0)


@pytest.fixture(scope="module")
def trained(folder: Path) -> list[float]:
    """Losses of Trainer in one process, whose adapter is saved."""
    trained = trainer(folder, "single", 1, {})
    trained.train()
    trained.save_model(str(folder / "single" / "saved"))
    return logged_losses(trained)


@pytest.mark.parametrize("name", ZERO)
def test_trainer(results, trained, folder, name):
    for result in results:
        assert result[f"{name}, trainer"]["losses"] == pytest.approx(trained, abs=1e-5)
        assert result[f"{name}, trainer"]["resumed"] == pytest.approx(trained, abs=1e-5)
    for how in ("saved", "adapter"):
        assert_close(folder / f"{name}, trainer" / how, folder / "single" / "saved")
    assert (folder / f"{name}, trainer" / "checkpoint-2" / "adapter_model.safetensors").is_file()
