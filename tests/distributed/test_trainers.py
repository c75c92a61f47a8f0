"""accelerate, transformers' Trainer and TRL on two ranks train as one process does."""

import os
from functools import cache

import pytest
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from peft import LoraConfig
from safetensors.torch import load_file
from torch import distributed
from torch.distributed.tensor import DTensor
from transformers import BitsAndBytesConfig, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

import moe_qlora
from moe_qlora.distributed.sharding import shards_integers
from moe_qlora.testing import run_distributed, tiny_model
from tests.helpers import training
from tests.helpers.training import NF4, assert_same_training, loaded, logged_losses

STEPS, ROWS = 3, 4
LAYERS = ["Qwen3MoeDecoderLayer"]
FSDP2 = {"version": 2, "transformer_layer_cls_to_wrap": LAYERS}
FULL = FSDP2 | {"state_dict_type": "FULL_STATE_DICT"}
SHARDED = FSDP2 | {"state_dict_type": "SHARDED_STATE_DICT", "cpu_ram_efficient_loading": False}
_NEW = hasattr(TrainingArguments, "activation_checkpointing")
_NAME = "activation_checkpointing" if _NEW else "gradient_checkpointing"
REENTRANT = {_NAME: True, f"{_NAME}_kwargs": {"use_reentrant": True}}
CASES = {
    "Trainer, ddp, prepared": {"ddp_find_unused_parameters": False},
    "SFTTrainer, ddp": {"bf16": False},
    "Trainer, fsdp2": {"fsdp": True, "fsdp_config": SHARDED, **REENTRANT},
    "Trainer, fsdp2, prepared": {"fsdp": True, "fsdp_config": FULL},
    "SFTTrainer, fsdp2": {"fsdp": True, "fsdp_config": FULL, "bf16": False},
}
RESUMED = ("Trainer, ddp, prepared", "Trainer, fsdp2")  # from a checkpoint too


def adapted(folder):
    torch.manual_seed(1)
    return training.lora(loaded(folder), "q_proj", "v_proj")


def rows():
    generator = torch.Generator().manual_seed(5)
    return list(torch.randint(5, 88, (STEPS * ROWS, 8), generator=generator))


def trainer_of(folder, world, out, case):
    torch.manual_seed(0)
    is_sft, model = case.startswith("SFT"), adapted(folder)
    if case.endswith("prepared"):  # before anything says that FSDP will shard it
        moe_qlora.prepare_training(model, batch_size=ROWS // world, seq_len=8)
    options = {key: value for key, value in CASES[case].items() if world > 1 or "fsdp" not in key}
    settings = (SFTConfig if is_sft else TrainingArguments)(
        output_dir=out, use_cpu=True, per_device_train_batch_size=ROWS // world, max_steps=STEPS,
        learning_rate=1e-2, max_grad_norm=0.05, report_to=[], logging_steps=1, save_steps=2,
        save_strategy="steps" if case in RESUMED else "no", disable_tqdm=True, **options,
    )  # fmt: skip
    if not is_sft:
        data = [{"input_ids": row, "labels": row} for row in rows()]
        return Trainer(model, settings, train_dataset=data)
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


def tokenizer():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{index}": index for index in range(128)}
    model = Tokenizer(models.WordLevel(words, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=model, eos_token="w1", pad_token="w2")


def recorded(model, losses, norms):
    """Losses and trained weights, norms, and how many of how many packed tensors are sharded."""
    packed = [p for p in model.parameters() if not p.is_floating_point()]
    sharded = sum(isinstance(p, DTensor) for p in packed)
    return {
        "run": (losses, training.trained_weights(model)),
        "norms": norms,
        "sharded": (sharded, len(packed)),
    }


@shards_integers()
def run_trainer(folder, world, case):
    AcceleratorState._reset_state(reset_partial_state=True)
    out = f"{folder}, {case}, {world}"
    trainer = trainer_of(folder, world, out, case)
    trainer.train()
    norms = [float(e["grad_norm"]) for e in trainer.state.log_history if "loss" in e]
    result = recorded(trainer.model, logged_losses(trainer), norms)
    if case in RESUMED:
        AcceleratorState._reset_state(reset_partial_state=True)
        again = trainer_of(folder, world, f"{out}, again", case)
        again.train(resume_from_checkpoint=f"{out}/checkpoint-2")
        again.model.save_pretrained(f"{out}/adapter")
        result["resumed"] = logged_losses(again)
    return result


@shards_integers()
def run_accelerate(folder, world, plugin=None):
    """Train in a loop of one's own, with what `accelerate launch` has."""
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = adapted(folder)
    model, optimizer = accelerator.prepare(model, training.adamw(model))
    losses, norms = [], []
    for batch in torch.stack(rows()).chunk(STEPS):
        own = batch.chunk(world)[accelerator.process_index]
        loss = model(input_ids=own, labels=own).loss
        accelerator.backward(loss)
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.05)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    return recorded(accelerator.unwrap_model(model), losses, norms)


def run_two(rank, world, folder):
    # as torchrun does, for programs that ask the environment
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "OMP_NUM_THREADS": "1"}
    training.take_fsdp_on_cpus()
    results = {"accelerate, ddp": run_accelerate(folder, world)}
    results |= {case: run_trainer(folder, world, case) for case in CASES}
    AcceleratorState._reset_state(reset_partial_state=True)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, transformer_cls_names_to_wrap=LAYERS)
    results["accelerate, fsdp2"] = run_accelerate(folder, world, plugin)
    distributed.barrier()
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("trainers") / "model"
    # Without the loss of the routers, which is no mean of the ranks' own.
    sizes = {"hidden_size": 64, "moe_intermediate_size": 40, "num_experts": 3}
    tiny_model("qwen3_moe", **sizes, router_aux_loss_coef=0.0).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def two(folder):
    return run_distributed(run_two, 2, folder)


@cache
def reference(folder, program):
    """What one process computes."""
    if program == "accelerate":
        return run_accelerate(folder, 1)
    return run_trainer(folder, 1, next(case for case in CASES if case.startswith(program)))


@pytest.mark.parametrize("case", [*CASES, "accelerate, fsdp2", "accelerate, ddp"])
def test_two_ranks_train_as_one(two, folder, case):
    program = case.partition(",")[0]
    expected = reference(folder, program)
    # TRL keeps the adapters of quantized models in bfloat16.
    within = 0.05 if program == "SFTTrainer" else 1e-3
    for result in (rank[case] for rank in two):
        assert_same_training(result["run"], expected["run"], within)
        assert result["norms"] == pytest.approx(expected["norms"], rel=within)
        packed = 2 * (2 + 4) * 3
        assert result["sharded"] == (packed if "fsdp2" in case else 0, packed)


@pytest.mark.parametrize("case", RESUMED)
def test_training_goes_on_from_a_checkpoint(two, folder, case):
    expected = reference(folder, "Trainer")
    saved = [
        load_file(f"{folder}, {each}/adapter/adapter_model.safetensors")
        for each in (f"{RESUMED[0]}, 1", f"{case}, 2")
    ]
    for result in (expected, *(rank[case] for rank in two)):
        assert result["resumed"] == pytest.approx(expected["run"][0], abs=1e-5)
    assert_same_training((0, saved[1]), (0, saved[0]), 1e-2)
