"""Trainer and accelerate with experts in host memory: placement, training, evaluation, files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, prepare_model_for_kbit_training
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import moe_qlora
from moe_qlora.testing import tiny_model
from moe_qlora.train.offload import Offload
from tests.helpers.delayed import delayed
from tests.helpers.training import NF4, four_steps, logged_losses, trainer_of

pytestmark = pytest.mark.usefixtures("quiet_loading")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("folders")
    model: Any = tiny_model("qwen3_moe", num_hidden_layers=3, vocab_size=256)
    model.save_pretrained(root / "plain")
    load(root / "plain").save_pretrained(root / "packed")
    return root


def load(folder: Path, **block: Any) -> Any:
    config = {"quantization_config": BitsAndBytesConfig(**NF4, llm_int8_skip_modules=["self_attn"])}
    with moe_qlora.enabled(**block):
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, **(config if folder.name == "plain" else {})
        )


def adapted(model: Any) -> Any:
    torch.manual_seed(1)
    model = prepare_model_for_kbit_training(
        model, gradient_checkpointing_kwargs={"use_reentrant": False}
    )
    config = LoraConfig(r=3, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return moe_qlora.get_peft_model(model, config, experts=True)


def factors(model: Any) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}


def test_trainer(folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four steps, evaluated and saved after two, are the resident model's; so is going on."""
    options = {"use_cpu": True, "eval_steps": 2, "save_strategy": "steps"}

    def run(model: Any, out: str, resume: str | None = None) -> Any:
        trainer = trainer_of(model, four_steps(tmp_path / out, 1, **options))
        trainer.eval_dataset, trainer.args.eval_strategy = trainer.train_dataset, "steps"
        trainer.train(resume_from_checkpoint=resume)
        evaluated = [e["eval_loss"] for e in trainer.state.log_history if "eval_loss" in e]
        return logged_losses(trainer), evaluated, factors(model)

    source = folders / "plain"
    losses, evaluated, trained = run(adapted(load(source)), "resident")
    with delayed(monkeypatch):
        model = adapted(load(source, offload=True))
        off = moe_qlora.offload_experts(model)
        found = run(model, "offloaded")
        assert found[:2] == (losses, evaluated) and len(losses) == 4 and len(evaluated) == 2
        assert all(torch.equal(p, trained[name]) for name, p in found[2].items())
        assert off.copies > 4 * 2 and "on host" in repr(model)
        names = sorted(path.name for path in (tmp_path / "offloaded" / "checkpoint-2").iterdir())
        assert names == sorted(p.name for p in (tmp_path / "resident" / "checkpoint-2").iterdir())
        again = adapted(load(source, offload=True))
        resumed = run(again, "again", str(tmp_path / "offloaded" / "checkpoint-2"))
        assert resumed[0] == losses and resumed[1] == evaluated
        assert all(torch.equal(p, trained[name]) for name, p in resumed[2].items())


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Accelerator:
    """accelerate as it is on a GPU."""
    accelerator = Accelerator(cpu=True)
    device = property(lambda self: torch.device("cuda", 0))
    monkeypatch.setattr(type(accelerator), "device", device)
    return accelerator


def test_accelerate_asks_the_device_map_where_the_model_is(
    folders: Path, cuda: Accelerator
) -> None:
    """A load to a GPU notes that one, whatever is in host memory; accelerate moves nothing then."""
    model = load(folders / "plain", offload=True)
    model.hf_device_map = {"": 1}
    with pytest.raises(ValueError, match="on a different device than the one"):
        cuda.prepare_model(model)
    model.hf_device_map = {"": 0}
    before = {id(p): p.data_ptr() for p in model.parameters()}
    model = adapted(model)
    assert cuda.prepare_model(model) is model
    after = {id(p): p.data_ptr() for p in model.parameters()}
    assert before.items() <= after.items()


def test_accelerate_moves_what_was_built_on_a_cpu(
    folders: Path, cuda: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the experts goes to the device, which computes from then on."""
    model: Any = tiny_model("qwen3_moe")
    with moe_qlora.enabled(offload=True):
        moe_qlora.quantize_experts(model, BitsAndBytesConfig(**NF4))
    off = moe_qlora.offload_experts(model)
    said: list[torch.device] = []
    monkeypatch.setattr(Offload, "move", lambda self, device: said.append(device))
    monkeypatch.setattr(type(cuda), "device", property(lambda self: torch.device("meta")))
    assert cuda.prepare_model(model) is model
    assert set(said) == {torch.device("meta")} and off.copies == 0
    for name, parameter in model.named_parameters():
        assert parameter.is_meta is ("parametrizations" not in name), name
