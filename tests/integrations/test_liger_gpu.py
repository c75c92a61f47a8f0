"""`use_liger_kernel=True` on a CUDA device: Liger's own kernels around packed experts, in bf16."""

from __future__ import annotations

import importlib
from typing import Any

import datasets
import pytest
import torch
import trl
from peft import LoraConfig
from torch import nn
from training import NF4
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    Trainer,
    TrainingArguments,
)

import moe_qlora
from moe_qlora.packing import parametrize

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("quiet_loading"),
    pytest.mark.filterwarnings("ignore:Cannot locate reference"),  # dill, of pyarrow's classes
    pytest.mark.filterwarnings("ignore:Merge lora module to 4-bit"),
]

BNB = BitsAndBytesConfig(**NF4, bnb_4bit_compute_dtype=torch.bfloat16)
STEPS = 12


@pytest.fixture
def expert_calls(monkeypatch):
    """The calls of Liger's experts on weights that hold values; its classes are put back after."""
    swiglu = pytest.importorskip("liger_kernel.transformers.swiglu")
    modeling = importlib.import_module("transformers.models.qwen3_moe.modeling_qwen3_moe")
    before, calls = dict(vars(modeling)), []
    stock = swiglu.LigerFusedMoEFunction

    class Counting:
        @staticmethod
        def apply(x: Any, weight: Any, *rest: Any) -> Any:
            calls.append(weight.shape)
            return stock.apply(x, weight, *rest)

    monkeypatch.setattr(swiglu, "LigerFusedMoEFunction", Counting)
    yield calls
    vars(modeling).update(before)


def packed_model(folder: Any, *linears: str) -> Any:
    with moe_qlora.enabled():
        model = AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=BNB, dtype=torch.bfloat16, device_map={"": 0}
        )
    torch.manual_seed(1)
    config = LoraConfig(r=8, target_modules=list(linears), task_type="CAUSAL_LM")
    return moe_qlora.get_peft_model(model, config, experts=True)


def train(kind: str, model: Any, folder: Any, out: Any, **switch: Any) -> list[float]:
    common: dict[str, Any] = {
        "output_dir": str(out), "max_steps": STEPS, "per_device_train_batch_size": 4,
        "learning_rate": 2e-3, "logging_steps": 1, "save_strategy": "no", "report_to": [],
        "disable_tqdm": True, "gradient_checkpointing": True, "bf16": True, "seed": 3, **switch,
    }  # fmt: skip
    if kind == "Trainer":
        ids = (torch.arange(16) * 7 + torch.arange(64)[:, None] % 5) % 200 + 2
        rows = [{"input_ids": row, "labels": row} for row in ids]
        trainer: Any = Trainer(model, TrainingArguments(**common), train_dataset=rows)
    else:
        rows = datasets.Dataset.from_list([{"text": f"one and {i} and more"} for i in range(64)])
        trainer = trl.SFTTrainer(
            model,
            args=trl.SFTConfig(**common),
            train_dataset=rows,
            processing_class=AutoTokenizer.from_pretrained(folder),
        )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def norms_of_liger(model: nn.Module) -> int:
    forwards = [getattr(module.forward, "__func__", None) for module in model.modules()]
    names = [getattr(forward, "__module__", "") for forward in forwards]
    return names.count("liger_kernel.transformers.rms_norm")


@pytest.mark.parametrize("kind", ["Trainer", "SFTTrainer"])
def test_two_trainings_in_one_process(kind, expert_calls, model_folder, tmp_path):
    linears = "q_proj", "v_proj"
    plain = train(kind, packed_model(model_folder, *linears), model_folder, tmp_path)
    for bases in ({"Qwen3MoeExperts"}, {"LigerExperts"}):
        model = packed_model(model_folder, *linears)
        experts = {module for _, module, _ in parametrize.iter_packed(model)}
        assert {type(module).__mro__[1].__name__ for module in experts} == bases
        losses = train(kind, model, model_folder, tmp_path, use_liger_kernel=True)
        assert norms_of_liger(model) == 4 * 2 + 1  # two layers of four norms, and the last one
        assert not expert_calls
        torch.testing.assert_close(losses, plain, rtol=0.02, atol=0.02)
        assert len(losses) == STEPS
