"""TRL's trainers on the CPU over packed experts: given a folder, a packed model, a PeftModel."""

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
from moe_qlora.train.trainer_loop import copy_losses_early
from tests.helpers.training import NF4, assert_same, loaded, logged_losses, trained_weights

pytestmark = pytest.mark.usefixtures("trainable_linears", "quiet_loading")

EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
LORA = LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
STEPS = 6
KINDS = {
    "sft": (trl.SFTTrainer, trl.SFTConfig),
    "dpo": (trl.DPOTrainer, trl.DPOConfig),
    "reward": (trl.RewardTrainer, trl.RewardConfig),
    "grpo": (trl.GRPOTrainer, trl.GRPOConfig),
}


def trainer(kind, way, folder, out, *, evaluate=False, lora=LORA, **options):
    """One of TRL's trainers, given what `way` says; everything else is as a user would have it."""
    keywords = {
        "output_dir": str(out), "max_steps": STEPS, "per_device_train_batch_size": 2,
        "learning_rate": 1e-2, "lr_scheduler_type": "constant", "logging_steps": 1,
        "save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True, **options,
    }  # fmt: skip
    more = {"eval_dataset": rows(kind).select(range(4))} if evaluate else {}
    if kind == "grpo":
        keywords |= {"num_generations": 2, "max_completion_length": 8, "beta": 0.1}
        more["reward_funcs"] = lambda completions, **_: [float(len(set(x))) for x in completions]
    torch.manual_seed(1)
    model = way
    if way == "folder":
        model, more["quantization_config"] = str(folder), BitsAndBytesConfig(**NF4)
    elif isinstance(way, str):
        model = loaded(folder)
    if way in ("folder", "packed"):  # TRL hands a plain config to stock PEFT
        more["peft_config"] = dataclasses.replace(lora, target_parameters=EXPERTS)
    elif way == "peft":
        model = moe_qlora.get_peft_model(model, lora, experts=True)
    elif way == "stock peft":
        model = peft.get_peft_model(model, moe_qlora.adapt_lora_config(model, lora, experts=True))
    maker, config = KINDS[kind]
    with moe_qlora.enabled():
        return maker(model=model, args=config(**keywords), train_dataset=rows(kind), **more)


def rows(kind):
    if kind == "sft":
        return datasets.Dataset.from_list([{"text": f"one and {i} and more"} for i in range(40)])
    if kind == "grpo":
        return datasets.Dataset.from_list([{"prompt": f"say {i}"} for i in range(40)])
    pairs = [{"prompt": "say", "chosen": f" yes {i}", "rejected": f" no {i}"} for i in range(40)]
    return datasets.Dataset.from_list(pairs)


def codes(model):
    """Every tensor of each packed stack, copied, by the stack's name and its place."""
    found = {}
    for owner, module, name in parametrize.iter_packed(model):
        plain = f"{owner}.{name}".replace("base_model.model.", "").replace(".base_layer", "")
        stack = parametrize.read_packed(module, name)
        parts = [stack.codes, stack.absmax, stack.nested.offset, stack.nested.absmax]
        found |= {f"{plain} {place}": part.clone() for place, part in enumerate(parts)}
    return found


@pytest.mark.parametrize(
    ("kind", "way"), [("sft", "folder"), ("dpo", "stock peft"), ("grpo", "packed")]
)
def test_training(kind, way, model_folder, tmp_path, caplog):
    steps = 3 if kind == "grpo" else STEPS  # whose loss need not fall
    run = trainer(kind, way, model_folder, tmp_path, max_steps=steps)
    model = run.model
    assert len(list(parametrize.iter_packed(model))) == 4
    assert getattr(model, "hf_device_map", None) is None
    before = trained_weights(model)
    assert sum(".experts." in name for name in before) == 2 * 2 * 2

    run.train()

    (line,) = [r.getMessage() for r in caplog.records if r.name == "moe_qlora.lora.inject"]
    assert line.startswith("The experts of 2 layers are packed (nf4 with double quantization): ")
    assert " and 4 of 4 expert weights (down_proj, gate_up_proj): " in line
    assert f" {sum(value.numel() for value in before.values()):,} weights (" in line
    fresh = loaded(model_folder)
    assert_same(codes(model), codes(fresh))
    for name, value in trained_weights(model).items():
        assert not torch.equal(value, before[name]), f"{name} was not trained"
    measured = logged_losses(run)
    assert len(measured) == steps and torch.isfinite(torch.tensor(measured)).all()
    if kind != "grpo":
        assert measured[-1] < measured[0] - 0.1

    # With the adapter off, or TRL's reference in its place, the model is the bare packed one.
    ids = torch.tensor([[40, 60, 80, 100, 120, 7]])
    model.eval()
    with torch.no_grad(), run.accelerator.autocast():
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
        ("grpo", {"max_steps": 4}, False),  # In bf16 a later step samples another token
    ],
)
def test_prepared_training_logs_the_same(kind, more, first, device, model_folder, tmp_path):
    """Loss, gradients' norm, tokens, accuracy, entropy: whichever is made first."""
    steps = 2 if device == "cpu" else more.get("max_steps", 6)
    more = more | {"max_steps": steps, "use_cpu": device == "cpu"}
    made = []
    for _ in range(2):
        torch.manual_seed(1)
        packed = loaded(model_folder, device_map={"": device})
        made.append(moe_qlora.get_peft_model(packed, LORA, experts=True))
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
    assert len(logged_losses(quick)) == more["max_steps"] and has_flat_rows(quick.model)


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
    losses, expected = logged_losses(resumed), logged_losses(whole)
    assert losses[:3] == expected[:3]
    assert losses[3:] == pytest.approx(expected[3:], abs=2e-2)
    assert_same(codes(resumed.model), codes(whole.model))


def test_reward_trainer(model_folder, tmp_path):
    """The model of a reward trainer has another head than the checkpoint's own class."""
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="SEQ_CLS")
    run = trainer("reward", "folder", model_folder, tmp_path, lora=lora, max_steps=2)
    before = trained_weights(run.model)
    assert sum(".experts." in name for name in before) == 8
    run.train()
    assert not any(torch.equal(x, before[name]) for name, x in trained_weights(run.model).items())
    run.save_model(str(out := tmp_path / "adapter"))
    tensors = load_file(out / "adapter_model.safetensors")
    trained = {n: w for n, w in trained_weights(run.model).items() if ".lora_" in n}
    for name, value in trained.items():
        assert torch.equal(value.float(), tensors[name.replace(".default", "")].float()), name


def test_sft_looks_for_nan_in_the_copy_of_its_loss(model_folder, tmp_path, monkeypatch):
    """It computes the loss itself, of the model's log probabilities."""
    looks, isnan = [], torch.isnan
    monkeypatch.setattr(torch, "isnan", lambda x: looks.append(x) or isnan(x))
    made = trainer("sft", "peft", model_folder, tmp_path, gradient_accumulation_steps=2)
    copy_losses_early(made.model)
    made.train()
    assert [len(x._copies) for x in looks] == [1] * 2 * STEPS
