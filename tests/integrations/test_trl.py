"""TRL's trainers on the CPU over packed experts: given a folder, a packed model, a PeftModel."""

from __future__ import annotations

import dataclasses
import re

import datasets
import peft
import pytest
import torch
import trl
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import BitsAndBytesConfig
from trl.trainer import utils
from upstream import TRANSFORMERS

import moe_qlora
from moe_qlora.packing import parametrize
from moe_qlora.train.flat_rows import has_flat_rows
from tests.helpers.training import NF4
from tests.helpers.training import loaded as load

pytestmark = pytest.mark.usefixtures("trainable_linears", "quiet_loading")

EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
STEPS = 8


def lora_config():
    return LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")


def trainer(kind, way, folder, out, *, evaluate=False, lora=None, **options):
    """One of TRL's trainers, given what `way` says; everything else is as a user would have it."""
    lora = lora_config() if lora is None else lora
    keywords = {
        "output_dir": str(out), "max_steps": STEPS, "per_device_train_batch_size": 2,
        "learning_rate": 5e-3, "lr_scheduler_type": "constant", "logging_steps": 1,
        "save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True, **options,
    }  # fmt: skip
    more = {}
    if kind == "grpo":
        keywords |= {"num_generations": 2, "max_completion_length": 8, "beta": 0.1}
        more["reward_funcs"] = letters
    if way == "folder":
        model, more["quantization_config"] = str(folder), BitsAndBytesConfig(**NF4)
        more["peft_config"] = dataclasses.replace(lora, target_parameters=EXPERTS)
    else:
        torch.manual_seed(1)
        model = load(folder)
        if way == "packed":
            more["peft_config"] = moe_qlora.adapt_lora_config(model, lora, experts=True)
        elif way == "plain":
            more["peft_config"] = lora
        elif way == "peft":
            model = moe_qlora.get_peft_model(model, lora, experts=True)
        elif way == "stock peft":
            config = moe_qlora.adapt_lora_config(model, lora, experts=True)
            model = peft.get_peft_model(model, config)
        else:
            model = way
    maker, config = {
        "sft": (trl.SFTTrainer, trl.SFTConfig),
        "dpo": (trl.DPOTrainer, trl.DPOConfig),
        "reward": (trl.RewardTrainer, trl.RewardConfig),
        "grpo": (trl.GRPOTrainer, trl.GRPOConfig),
    }[kind]
    with moe_qlora.enabled():
        return maker(
            model=model,
            args=config(**keywords),
            train_dataset=rows(kind),
            eval_dataset=rows(kind).select(range(4)) if evaluate else None,
            **more,
        )


def letters(completions, **kwargs):
    return [float(len(set(text))) for text in completions]


def rows(kind):
    if kind == "sft":
        return datasets.Dataset.from_list([{"text": f"one and {i} and more"} for i in range(40)])
    if kind == "grpo":
        return datasets.Dataset.from_list([{"prompt": f"say {i}"} for i in range(40)])
    pairs = [{"prompt": "say", "chosen": f" yes {i}", "rejected": f" no {i}"} for i in range(40)]
    return datasets.Dataset.from_list(pairs)


def codes(model):
    """Name -> every tensor of each packed stack, copied."""
    found = {}
    for owner, module, name in parametrize.iter_packed(model):
        plain = f"{owner}.{name}".replace("base_model.model.", "").replace(".base_layer", "")
        stack = parametrize.read_packed(module, name)
        parts = [stack.codes, stack.absmax, stack.nested.offset, stack.nested.absmax]
        found[plain] = [part.clone() for part in parts]
    return found


def adapter(model, name="default"):
    return {
        key: value.detach().clone()
        for key, value in model.named_parameters()
        if f".{name}." in key and "lora_" in key
    }


def losses(trained):
    return [entry["loss"] for entry in trained.state.log_history if "loss" in entry]


def assert_same(left, right):
    assert left.keys() == right.keys()
    for name, values in left.items():
        assert all(torch.equal(a, b) for a, b in zip(values, right[name], strict=True)), name


@pytest.mark.parametrize(
    ("kind", "way"), [("sft", "folder"), ("sft", "peft"), ("dpo", "stock peft"), ("grpo", "packed")]
)
def test_training(kind, way, model_folder, tmp_path, caplog):
    steps = 4 if kind == "grpo" else STEPS  # whose loss need not fall
    trained = trainer(kind, way, model_folder, tmp_path, max_steps=steps)
    model = trained.model
    assert len(list(parametrize.iter_packed(model))) == 4
    assert getattr(model, "hf_device_map", None) is None
    before = adapter(model)
    experts = [name for name in before if ".experts." in name]
    assert len(experts) == 2 * 2 * 2

    trained.train()

    (line,) = [r.getMessage() for r in caplog.records if r.name == "moe_qlora.lora.inject"]
    assert line.startswith("The experts of 2 layers are packed (nf4 with double quantization): ")
    assert " and 4 of 4 expert weights (down_proj, gate_up_proj): " in line
    assert f" {sum(value.numel() for value in before.values()):,} weights (" in line
    fresh = load(model_folder)
    assert_same(codes(model), codes(fresh))
    for name, value in adapter(model).items():
        assert not torch.equal(value, before[name]), f"{name} was not trained"
    measured = losses(trained)
    assert len(measured) == steps
    assert torch.isfinite(torch.tensor(measured)).all()
    if kind != "grpo":
        assert measured[-1] < measured[0] - 0.1
    assert_reference_is_base(trained, fresh)


def assert_reference_is_base(trained, fresh):
    """With the adapter off, or TRL's reference in its place, the model is the bare packed one."""
    ids = torch.tensor([[40, 60, 80, 100, 120, 7]])
    model = trained.model.eval()
    with torch.no_grad(), trained.accelerator.autocast():
        expected = fresh.eval()(input_ids=ids).logits.float()
        policy = model(input_ids=ids).logits
        with utils.use_adapter(model, "ref" if "ref" in model.peft_config else None):
            assert torch.equal(model(input_ids=ids).logits, expected)
        with model.disable_adapter():
            assert torch.equal(model(input_ids=ids).logits, expected)
    assert (policy - expected).abs().max() > 1e-2


@pytest.mark.filterwarnings("ignore::UserWarning")  # Of compilers on GPUs, which raise them
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("kind", "more", "first"),
    [
        ("sft", {"evaluate": True, "eval_strategy": "steps", "eval_steps": 2}, True),
        ("sft", {"packing": True, "max_length": 64}, False),
        ("dpo", {}, True),
        ("grpo", {}, False),
    ],
)
def test_prepared_training_logs_the_same(kind, more, first, device, model_folder, tmp_path):
    """Loss, gradients' norm, tokens, accuracy, entropy: whichever is made first."""
    more = more | {"max_steps": 2 if device == "cpu" else 6, "use_cpu": device == "cpu"}
    made = []
    for _ in range(2):
        torch.manual_seed(1)
        packed = load(model_folder, device_map={"": device})
        made.append(moe_qlora.get_peft_model(packed, lora_config(), experts=True))
    if first:
        moe_qlora.prepare_training(made[1], batch_size=4, seq_len=64)
    plain, quick = (trainer(kind, model, model_folder, tmp_path, **more) for model in made)
    if not first:
        moe_qlora.prepare_training(quick.model, batch_size=4, seq_len=64)
    for run in (plain, quick):
        if kind == "grpo":
            torch.manual_seed(2)  # of its completions
        run.train()
    logs = zip(quick.state.log_history[:-1], plain.state.log_history[:-1], strict=True)
    near = {"rel": 2e-2, "abs": 2e-3} if device == "cpu" else {"rel": 0.1, "abs": 1e-2}  # bf16
    for ours, theirs in logs:
        for name in [name for name in theirs if re.search("time|per_second", name)]:
            ours[name] = theirs[name]
        if device == "cuda" and "mean_token_accuracy" in theirs:  # Of some 40 tokens, in bf16
            assert ours.pop("mean_token_accuracy") == pytest.approx(
                theirs.pop("mean_token_accuracy"), abs=0.1
            )
        assert ours == pytest.approx(theirs, **near)
    assert len(losses(quick)) == more["max_steps"] and has_flat_rows(quick.model)


@pytest.mark.parametrize(("kind", "way"), [("sft", "folder"), ("dpo", "peft")])
def test_resume(kind, way, model_folder, tmp_path):
    """A run that is cut in the middle goes on with the very loss that it would have had."""
    if kind == "dpo" and TRANSFORMERS < (5, 23):
        pytest.skip("with a second adapter beside it, the first one is not loaded")
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    whole = trainer(kind, way, model_folder, tmp_path, **saving)
    whole.train()
    resumed = trainer(kind, way, model_folder, tmp_path, **saving)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    # PEFT loads the bfloat16 adapters that TRL trains into float32, so later steps round otherwise,
    # with dense models too; those of transformers.Trainer are held bit for bit in test_trainer.py
    assert losses(resumed)[:3] == losses(whole)[:3]
    assert len(losses(resumed)) == 4
    assert losses(resumed)[3:] == pytest.approx(losses(whole)[3:], abs=2e-2)
    assert_same(codes(resumed.model), codes(whole.model))


def test_reward_trainer(model_folder, tmp_path):
    """The model of a reward trainer has another head than the checkpoint's own class."""
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="SEQ_CLS")
    trained = trainer("reward", "folder", model_folder, tmp_path, lora=lora, max_steps=2)
    before = adapter(trained.model)
    assert len([name for name in before if ".experts." in name]) == 8
    trained.train()
    assert not any(torch.equal(x, before[name]) for name, x in adapter(trained.model).items())


def test_a_plain_lora_config_is_enough_for_a_packed_model(model_folder, tmp_path):
    """TRL hands it to stock PEFT, which on a packed model gets it adapted."""
    lora = LoraConfig(r=4, target_modules=["q_proj"], target_parameters=EXPERTS)
    packed = trainer("sft", "plain", model_folder, tmp_path, lora=lora, max_steps=2)
    packed.train()
    packed.save_model(str(out := tmp_path / "adapter"))
    tensors = load_file(out / "adapter_model.safetensors")
    assert sum(".experts." in key for key in tensors) == 2 * 2 * 2
    assert all(bool(value.any()) for key, value in tensors.items() if "lora_B" in key)
    again = peft.PeftModel.from_pretrained(load(model_folder), out)
    ours = moe_qlora.load_adapter(load(model_folder), out)
    for name, value in adapter(packed.model).items():
        assert torch.equal(value.float(), again.get_parameter(name)), name
    ids = torch.arange(2, 50).reshape(2, 24)
    with torch.no_grad():
        assert torch.equal(again(ids).logits, ours(ids).logits)
