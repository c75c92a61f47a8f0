"""Trainer and accelerate with experts in host memory: placement, training, evaluation, files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, prepare_model_for_kbit_training

import moe_qlora
from moe_qlora.testing import tiny_model
from tests.helpers.training import NF4, four_steps, loaded, logged_losses, trainer_of

pytestmark = pytest.mark.usefixtures("quiet_loading")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain")
    model: Any = tiny_model("qwen3_moe", num_hidden_layers=3, vocab_size=256)
    model.save_pretrained(path)
    return path


def load(folder: Path, **block: Any) -> Any:
    with moe_qlora.enabled(**block):
        return loaded(folder, {**NF4, "llm_int8_skip_modules": ["self_attn"]})


def adapted(model: Any) -> Any:
    torch.manual_seed(1)
    model = prepare_model_for_kbit_training(
        model, gradient_checkpointing_kwargs={"use_reentrant": False}
    )
    config = LoraConfig(r=3, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return moe_qlora.get_peft_model(model, config, experts=True)


def test_trainer(folder: Path, tmp_path: Path) -> None:
    """Four steps, evaluated and saved after two, are the resident model's; so is going on."""
    options = {"use_cpu": True, "eval_steps": 2, "save_strategy": "steps"}

    def run(model: Any, out: str, resume: str | None = None) -> Any:
        trainer = trainer_of(model, four_steps(tmp_path / out, 1, **options))
        trainer.eval_dataset, trainer.args.eval_strategy = trainer.train_dataset, "steps"
        trainer.train(resume_from_checkpoint=resume)
        evaluated = [e["eval_loss"] for e in trainer.state.log_history if "eval_loss" in e]
        trained = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
        return logged_losses(trainer), evaluated, trained

    losses, evaluated, trained = run(adapted(load(folder)), "resident")
    model = adapted(load(folder, offload=True))
    off = moe_qlora.offload_experts(model)
    found = run(model, "offloaded")
    assert found[:2] == (losses, evaluated) and len(losses) == 4 and len(evaluated) == 2
    assert all(torch.equal(p, trained[name]) for name, p in found[2].items())
    assert off.copies > 4 * 2 and "on host" in repr(model)
    names = sorted(path.name for path in (tmp_path / "offloaded" / "checkpoint-2").iterdir())
    assert names == sorted(p.name for p in (tmp_path / "resident" / "checkpoint-2").iterdir())
    again = adapted(load(folder, offload=True))
    resumed = run(again, "again", str(tmp_path / "offloaded" / "checkpoint-2"))
    assert resumed[0] == losses and resumed[1] == evaluated
    assert all(torch.equal(p, trained[name]) for name, p in resumed[2].items())
