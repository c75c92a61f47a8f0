"""accelerate, transformers' Trainer and TRL on two ranks train packed models as one process does.

Every group of processes runs many cases: starting them takes longer than a case.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import pytest
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from peft import LoraConfig
from safetensors.torch import load_file
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor
from transformers import BitsAndBytesConfig, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

import moe_qlora
from moe_qlora.distributed.sharding import shards_integers
from moe_qlora.testing import run_distributed, tiny_model
from tests.helpers import training
from tests.helpers.training import NF4, loaded, logged_losses, whole

STEPS, ROWS = 3, 4
FSDP2 = {
    "version": 2,
    "transformer_layer_cls_to_wrap": ["Qwen3MoeDecoderLayer"],
    "state_dict_type": "FULL_STATE_DICT",
}
LOADED_BY_ALL = {"state_dict_type": "SHARDED_STATE_DICT", "cpu_ram_efficient_loading": False}
_NEW = hasattr(TrainingArguments, "activation_checkpointing")
_NAME = "activation_checkpointing" if _NEW else "gradient_checkpointing"
REENTRANT = {_NAME: True, f"{_NAME}_kwargs": {"use_reentrant": True}}
CASES: dict[str, dict[str, Any]] = {
    "Trainer, ddp": {},
    "SFTTrainer, ddp": {"bf16": False},
    "Trainer, fsdp2, reentrant": {"fsdp": True, "fsdp_config": FSDP2, **REENTRANT},
    "Trainer, fsdp2, sharded": {"fsdp": True, "fsdp_config": {**FSDP2, **LOADED_BY_ALL}},
    "SFTTrainer, fsdp2": {"fsdp": True, "fsdp_config": FSDP2, "bf16": False},
}
RESUMED = ("Trainer, ddp", "Trainer, fsdp2, sharded")  # from a checkpoint too


def join_as_torchrun(rank: int, world: int) -> None:
    """Set what torchrun sets, for programs that ask the environment."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "OMP_NUM_THREADS": "1"}


def adapted(folder: str) -> Any:
    torch.manual_seed(1)
    return training.lora(loaded(folder), "q_proj", "v_proj")


def rows() -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return list(torch.randint(5, 88, (STEPS * ROWS, 8), generator=generator))


def trainer_of(folder: str, world: int, out: str, case: str) -> Any:
    torch.manual_seed(0)
    arguments = SFTConfig if case.startswith("SFT") else TrainingArguments
    options = {key: value for key, value in CASES[case].items() if world > 1 or "fsdp" not in key}
    settings: Any = arguments(
        output_dir=out,
        use_cpu=True,
        per_device_train_batch_size=ROWS // world,
        max_steps=STEPS,
        learning_rate=1e-2,
        max_grad_norm=0.05,
        report_to=[],
        logging_steps=1,
        save_strategy="steps" if case in RESUMED else "no",
        save_steps=2,
        disable_tqdm=True,
        **options,
    )
    if not case.startswith("SFT"):
        data = [{"input_ids": row, "labels": row} for row in rows()]
        return Trainer(adapted(folder), settings, train_dataset=data)
    from datasets import Dataset

    settings.model_init_kwargs = {"dtype": torch.float32}
    experts = ["experts.gate_up_proj", "experts.down_proj"]
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], target_parameters=experts)
    torch.manual_seed(1)
    with moe_qlora.enabled():
        return SFTTrainer(
            model=folder,
            args=settings,
            quantization_config=BitsAndBytesConfig(**NF4),
            peft_config=config,
            train_dataset=Dataset.from_dict({"input_ids": [row.tolist() for row in rows()]}),
            processing_class=tokenizer(),
        )


@shards_integers()
def run_trainer(folder: str, world: int, case: str) -> dict[str, Any]:
    out = f"{folder}, {case}, {world}"
    trainer = trainer_of(folder, world, out, case)
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    model = trainer.model
    result = {
        "losses": [entry["loss"] for entry in log],
        "norms": [float(entry["grad_norm"]) for entry in log],
        "weights": {n: whole(p).detach() for n, p in model.named_parameters() if p.requires_grad},
        "sharded": count_sharded(model),
    }
    if case in RESUMED:
        AcceleratorState._reset_state(reset_partial_state=True)
        again = trainer_of(folder, world, f"{out}, again", case)
        again.train(resume_from_checkpoint=f"{out}/checkpoint-2")
        again.model.save_pretrained(f"{out}/adapter")
        result["resumed"] = logged_losses(again)
    return result


@shards_integers()
def run_accelerate(folder: str, world: int, plugin: Any = None) -> dict[str, Any]:
    """Train in a loop of one's own, with what `accelerate launch` has."""
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = adapted(folder)
    optimizer = training.adamw(model)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses, norms = [], []
    for batch in torch.stack(rows()).chunk(STEPS):
        own = batch.chunk(world)[accelerator.process_index]
        loss = model(input_ids=own, labels=own).loss
        accelerator.backward(loss)
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.05)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    named = accelerator.unwrap_model(model).named_parameters()
    return {
        "losses": losses,
        "norms": norms,
        "weights": {name: whole(p).detach() for name, p in named if p.requires_grad},
        "sharded": count_sharded(model),
    }


def count_sharded(model: Any) -> tuple[int, int]:
    """How many tensors of packed weights are sharded, and how many there are."""
    packed = [p for p in model.parameters() if not p.is_floating_point()]
    return sum(isinstance(p, DTensor) for p in packed), len(packed)


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{index}": index for index in range(128)}
    model = Tokenizer(models.WordLevel(words, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=model, eos_token="w1", pad_token="w2")


def run_two(rank: int, world: int, folder: str) -> dict[str, Any]:
    join_as_torchrun(rank, world)
    training.take_fsdp_on_cpus()
    results = {"accelerate, ddp": run_accelerate(folder, world)}
    AcceleratorState._reset_state(reset_partial_state=True)
    for case in CASES:
        results[case] = run_trainer(folder, world, case)
        AcceleratorState._reset_state(reset_partial_state=True)
    layers: Any = FSDP2["transformer_layer_cls_to_wrap"]
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, transformer_cls_names_to_wrap=layers)
    results["accelerate, fsdp2"] = run_accelerate(folder, world, plugin)
    distributed.barrier()
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("trainers") / "model"
    # Without the loss of the routers, which is no mean of the ranks' own.
    sizes = {"hidden_size": 64, "moe_intermediate_size": 40, "num_experts": 3}
    model: Any = tiny_model("qwen3_moe", **sizes, router_aux_loss_coef=0.0)
    model.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def two(folder: str) -> Any:
    return run_distributed(run_two, 2, folder)


@cache
def reference(folder: str, case: str) -> dict[str, Any]:
    """What one process computes."""
    AcceleratorState._reset_state(reset_partial_state=True)
    if case == "accelerate":
        return run_accelerate(folder, 1)
    return run_trainer(folder, 1, case)


@pytest.mark.parametrize("case", [*CASES, "accelerate, fsdp2", "accelerate, ddp"])
def test_two_ranks_train_as_one(two: Any, folder: str, case: str) -> None:
    program = case.partition(",")[0]
    expected = reference(folder, program if program == "accelerate" else f"{program}, ddp")
    # TRL keeps the adapters of quantized models in bfloat16.
    close = 1e-3 if program == "SFTTrainer" else 1e-5
    for result in (rank[case] for rank in two):
        assert result["losses"] == pytest.approx(expected["losses"], abs=close)
        assert result["norms"] == pytest.approx(expected["norms"], rel=20 * close)
        assert result["weights"].keys() == expected["weights"].keys()
        for name, weight in expected["weights"].items():
            torch.testing.assert_close(result["weights"][name], weight, rtol=0, atol=20 * close)
        sharded, packed = result["sharded"]
        assert packed == 2 * (2 + 4) * 3
        assert sharded == (packed if "fsdp2" in case else 0)


@pytest.mark.parametrize("case", RESUMED)
def test_training_goes_on_from_a_checkpoint(two: Any, folder: str, case: str) -> None:
    expected = reference(folder, "Trainer, ddp")
    for result in (expected, *(rank[case] for rank in two)):
        assert result["resumed"] == pytest.approx(expected["losses"], abs=1e-5)
    single = load_file(f"{folder}, Trainer, ddp, 1/adapter/adapter_model.safetensors")
    saved = load_file(f"{folder}, {case}, 2/adapter/adapter_model.safetensors")
    assert saved.keys() == single.keys()
    for key, tensor in single.items():
        assert torch.allclose(saved[key], tensor, atol=1e-4), key
