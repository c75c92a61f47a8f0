"""transformers.Trainer on the CPU over packed experts: training, evaluation, checkpoints, files."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import peft
import pytest
import torch
from peft import LoraConfig, prepare_model_for_kbit_training
from safetensors.torch import load_file
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments

import moe_qlora
from moe_qlora.packing import parametrize
from tests.helpers.training import NF4, assert_same, loaded

pytestmark = pytest.mark.usefixtures("trainable_linears", "quiet_loading")

STEPS = 10


class Lines(Dataset):
    """Rows of 16 tokens, all somewhat alike."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        ids = (torch.arange(16) * 7 + index % 5) % 200 + 2
        return {"input_ids": ids, "labels": ids}


def lora_config():
    return LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")


def adapted_model(folder, way="ours", prepare=()):
    """A PeftModel over packed experts, the same each time.

    Args:
        folder: Of the plain model.
        way: Who makes the PeftModel, "ours" or "stock"; "post-build" packs after loading.
        prepare: Where `prepare_model_for_kbit_training` is called.
    """
    options = {"gradient_checkpointing_kwargs": {"use_reentrant": False}}
    if way == "post-build":
        model = AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=BitsAndBytesConfig(**NF4), dtype=torch.float32
        )
        if "before packing" in prepare:
            model = prepare_model_for_kbit_training(model, **options)
        moe_qlora.quantize_experts(model)
    else:
        model = loaded(folder)
    if "after packing" in prepare:
        model = prepare_model_for_kbit_training(model, **options)
    torch.manual_seed(1)
    if way == "stock":
        config = moe_qlora.adapt_lora_config(model, lora_config(), experts=True)
        return peft.get_peft_model(model, config)
    return moe_qlora.get_peft_model(model, lora_config(), experts=True)


def trainer(model, out, **options):
    keywords = {
        "output_dir": str(out), "max_steps": STEPS, "per_device_train_batch_size": 4,
        "learning_rate": 5e-3, "lr_scheduler_type": "constant", "logging_steps": 1,
        "save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True, **options,
    }  # fmt: skip
    return Trainer(
        model=model,
        args=TrainingArguments(**keywords),
        train_dataset=Lines(),
        eval_dataset=torch.utils.data.Subset(Lines(), range(8)),
    )


def losses(trained):
    return [entry["loss"] for entry in trained.state.log_history if "loss" in entry]


def adapter(model):
    return {name: p.detach().clone() for name, p in model.named_parameters() if "lora_" in name}


def codes(model):
    stacks = (
        parametrize.read_packed(module, name) for _, module, name in parametrize.iter_packed(model)
    )
    return [part.clone() for one in stacks for part in (one.codes, one.absmax)]


@pytest.fixture(scope="module")
def reference(model_folder, tmp_path_factory):
    """Losses and adapter of a run without anything around it."""
    with pytest.MonkeyPatch.context() as patch:
        import bitsandbytes.nn.modules

        patch.setattr(bitsandbytes.nn.modules, "has_avx512bf16", lambda: False)
        run = trainer(adapted_model(model_folder), tmp_path_factory.mktemp("reference"))
        run.train()
    return losses(run), adapter(run.model)


@pytest.mark.parametrize("way", ["ours", "stock", "post-build"])
def test_ten_steps(way, reference, model_folder, tmp_path):
    model = adapted_model(model_folder, way)
    before = adapter(model)
    run = trainer(model, tmp_path)
    assert getattr(model, "hf_device_map", None) is None
    run.train()
    assert losses(run) == reference[0]
    assert losses(run)[-1] < losses(run)[0] - 0.5
    assert_same(adapter(model), reference[1])
    assert not any(torch.equal(value, before[name]) for name, value in adapter(model).items())
    for left, right in zip(codes(model), codes(loaded(model_folder)), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize(
    ("way", "prepare", "reentrant"),
    [
        ("ours", (), True),
        ("ours", (), False),
        ("ours", ["after packing"], None),
        ("post-build", ["before packing"], None),
    ],
)
def test_checkpointing_and_preparation_do_no_harm(
    way, prepare, reentrant, reference, model_folder, tmp_path
):
    """Preparation turns checkpointing on, and upcasts 16-bit weights: nothing here, no codes."""
    how = {"gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    options = {} if reentrant is None else {"gradient_checkpointing": True, **how}
    run = trainer(adapted_model(model_folder, way, prepare), tmp_path, **options)
    run.train()
    assert any(getattr(each, "gradient_checkpointing", False) for each in run.model.modules())
    assert losses(run) == reference[0]
    assert_same(adapter(run.model), reference[1])


def test_evaluation_and_the_best_model(reference, model_folder, tmp_path):
    """Evaluation changes nothing; the best checkpoint's adapter is left at the end."""
    run = trainer(
        adapted_model(model_folder),
        tmp_path,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=True,  # so that the best is not the last one
    )
    run.train()
    assert losses(run) == reference[0]
    measured = [e["eval_loss"] for e in run.state.log_history if "eval_loss" in e]
    assert len(measured) == STEPS // 2
    assert measured == sorted(measured, reverse=True)
    assert Path(run.state.best_model_checkpoint).name == "checkpoint-2"
    stored = load_file(tmp_path / "checkpoint-2/adapter_model.safetensors")
    for name, value in adapter(run.model).items():
        assert torch.equal(stored[name.replace(".default", "")], value), name
    assert run.evaluate()["eval_loss"] == measured[0]


@pytest.mark.parametrize("way", ["ours", "stock"])
def test_resume_is_bit_equal(way, reference, model_folder, tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 4}
    first = trainer(adapted_model(model_folder, way), tmp_path, **saving)
    first.train()
    assert losses(first) == reference[0]
    resumed = trainer(adapted_model(model_folder, way), tmp_path, **saving)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert losses(resumed) == reference[0]
    assert_same(adapter(resumed.model), reference[1])


def test_checkpoints_hold_the_adapter_alone(model_folder, tmp_path):
    run = trainer(
        adapted_model(model_folder), tmp_path, max_steps=2, save_strategy="steps", save_steps=2
    )
    run.train()
    run.save_model(tmp_path / "last")
    for folder in (tmp_path / "checkpoint-2", tmp_path / "last"):
        names = {file.name for file in folder.iterdir()}
        assert {"adapter_model.safetensors", "adapter_config.json", "README.md"} <= names
        assert not names & {"model.safetensors", "pytorch_model.bin", "config.json"}
        size = (folder / "adapter_model.safetensors").stat().st_size
        assert size < 1.1 * sum(value.nbytes for value in adapter(run.model).values()) + 10_000
        written = json.loads((folder / "adapter_config.json").read_text())
        assert written["base_model_name_or_path"] == str(model_folder)
    decoded = loaded(model_folder)
    decoded.dequantize()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", FutureWarning)
        stock = peft.PeftModel.from_pretrained(decoded, tmp_path / "last")
    ids = torch.tensor([[5, 12, 19, 26, 33]])
    with torch.no_grad():
        expected = run.model.eval()(input_ids=ids).logits
        torch.testing.assert_close(stock(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-4)
        with stock.disable_adapter():
            assert not torch.allclose(stock(input_ids=ids).logits, expected, atol=1e-2)
