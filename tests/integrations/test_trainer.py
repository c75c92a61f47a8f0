"""transformers.Trainer on the CPU over packed experts: training, evaluation, checkpoints, files."""

import json
import warnings

import peft
import pytest
import torch
from peft import LoraConfig, prepare_model_for_kbit_training
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments

import moe_qlora
from moe_qlora.packing import parametrize
from moe_qlora.train import offload
from tests.helpers.training import NF4, assert_same_training, loaded, logged_losses, trained_weights

pytestmark = pytest.mark.usefixtures("trainable_linears", "quiet_loading")

STEPS = 6
ROWS = [(torch.arange(16) * 7 + index % 5) % 200 + 2 for index in range(64)]  # somewhat alike
SAVING = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}


def adapted(model, way="ours"):
    """The PeftModel, the same each time; `way` is who makes it."""
    torch.manual_seed(1)
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    if way == "stock":
        lora = moe_qlora.adapt_lora_config(model, lora, experts=True)
        return peft.get_peft_model(model, lora)
    return moe_qlora.get_peft_model(model, lora, experts=True)


def prepared(model):
    options = {"gradient_checkpointing_kwargs": {"use_reentrant": False}}
    return prepare_model_for_kbit_training(model, **options)


def packed_after_the_load(folder, prepare=lambda model: model):
    config = BitsAndBytesConfig(**NF4)
    model = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, dtype=torch.float32
    )
    model = prepare(model)
    moe_qlora.quantize_experts(model)
    return model


def trained(model, out, resume=None, **options):
    """The trainer, after its run."""
    keywords = {
        "output_dir": str(out), "max_steps": STEPS, "per_device_train_batch_size": 4,
        "learning_rate": 1e-2, "lr_scheduler_type": "constant", "logging_steps": 1,
        "save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True, **options,
    }  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in ROWS]
    run = Trainer(model, TrainingArguments(**keywords), train_dataset=data, eval_dataset=data[:8])
    run.train(resume_from_checkpoint=resume)
    return run


def recorded(run):
    """Losses, in evaluation too, and the adapter."""
    evaluated = [e["eval_loss"] for e in run.state.log_history if "eval_loss" in e]
    return logged_losses(run) + evaluated, trained_weights(run.model)


def codes(model):
    stacks = (parametrize.read_packed(m, name) for _, m, name in parametrize.iter_packed(model))
    return [part.clone() for one in stacks for part in (one.codes, one.absmax)]


@pytest.fixture(scope="module")
def plain(model_folder, tmp_path_factory):
    """What a run records without anything around it."""
    return recorded(trained(adapted(loaded(model_folder)), tmp_path_factory.mktemp("plain")))


@pytest.fixture(scope="module")
def evaluated(model_folder, tmp_path_factory):
    """A run with evaluations and checkpoints, and its folder."""
    out = tmp_path_factory.mktemp("evaluated")
    # so that the best is not the last one
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
    best["greater_is_better"] = True
    return trained(adapted(loaded(model_folder)), out, **SAVING, **best), out


@pytest.mark.parametrize(
    "way", ["stock PEFT", "packed later", "reentrant", "prepared", "prepared, then packed"]
)
def test_training_is_the_same_however_the_model_is_made(way, plain, model_folder, tmp_path):
    """Preparation turns checkpointing on, and upcasts 16-bit weights: nothing here, no codes."""
    options = {}
    if "packed" in way:
        steps = prepared if way.startswith("prepared") else lambda model: model
        model = packed_after_the_load(model_folder, steps)
    else:
        model = loaded(model_folder)
    if way == "prepared":
        model = prepared(model)
    if way == "reentrant":
        options = {"gradient_checkpointing": True}
        options["gradient_checkpointing_kwargs"] = {"use_reentrant": True}
    model = adapted(model, way.split()[0])
    before = trained_weights(model)
    run = trained(model, tmp_path, **options)
    losses, weights = recorded(run)
    assert_same_training((losses, weights), plain)
    assert losses[-1] < losses[0] - 0.5 and getattr(model, "hf_device_map", None) is None
    assert not any(torch.equal(value, before[name]) for name, value in weights.items())
    assert all(map(torch.equal, codes(model), codes(loaded(model_folder))))
    checkpoints = any(getattr(each, "gradient_checkpointing", False) for each in model.modules())
    assert checkpoints == (way not in ("stock PEFT", "packed later"))


def test_evaluation_changes_nothing_and_the_best_adapter_is_left(plain, evaluated):
    run, out = evaluated
    losses, weights = recorded(run)
    assert losses[:STEPS] == plain[0]
    measured = losses[STEPS:]
    assert len(measured) == STEPS // 2 and measured == sorted(measured, reverse=True)
    assert run.state.best_model_checkpoint.endswith("checkpoint-2")
    stored = load_file(out / "checkpoint-2/adapter_model.safetensors")
    named = {name.replace(".default", ""): value for name, value in weights.items()}
    assert_same_training((0, named), (0, stored))
    assert run.evaluate()["eval_loss"] == measured[0]


def test_resume_is_bit_equal(plain, evaluated, model_folder, tmp_path):
    model = adapted(loaded(model_folder), "stock")
    run = trained(model, tmp_path, str(evaluated[1] / "checkpoint-2"), **SAVING)
    assert_same_training((logged_losses(run), trained_weights(model)), plain)


def test_checkpoints_hold_the_adapter_alone(evaluated, model_folder, tmp_path):
    run, out = evaluated
    run.save_model(tmp_path)
    for folder in (out / "checkpoint-2", tmp_path):
        names = {file.name for file in folder.iterdir()}
        assert {"adapter_model.safetensors", "adapter_config.json", "README.md"} <= names
        assert not names & {"model.safetensors", "pytorch_model.bin", "config.json"}
        size = (folder / "adapter_model.safetensors").stat().st_size
        assert size < 1.1 * sum(t.nbytes for t in trained_weights(run.model).values()) + 10_000
        written = json.loads((folder / "adapter_config.json").read_text())
        assert written["base_model_name_or_path"] == str(model_folder)
    decoded = loaded(model_folder)
    decoded.dequantize()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", FutureWarning)
        stock = peft.PeftModel.from_pretrained(decoded, tmp_path)
    ids = torch.tensor([[5, 12, 19, 26, 33]])
    with torch.no_grad():
        expected = run.model.eval()(input_ids=ids).logits
        torch.testing.assert_close(stock(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-4)
        with stock.disable_adapter():
            assert not torch.allclose(stock(input_ids=ids).logits, expected, atol=1e-2)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_training_is_the_same_and_compiles_at_the_first_step_alone(
    model_folder, tmp_path, monkeypatch
):
    options = {"gradient_accumulation_steps": 2, "max_steps": 2}
    plain = trained(adapted(loaded(model_folder)), tmp_path, **options)
    torch.compiler.reset()
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "eager")  # TrainingArguments writes it
    counters = torch._dynamo.utils.counters
    counters.clear()
    options |= {"torch_compile": True, "torch_compile_backend": "eager"}
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled = trained(adapted(loaded(model_folder)), tmp_path, **options)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    assert_same_training(recorded(compiled), recorded(plain), 1e-4)
    torch.compiler.reset()


def test_experts_in_host_memory_train_save_and_resume_as_resident_ones(
    plain, evaluated, model_folder, tmp_path, monkeypatch
):
    monkeypatch.setattr(offload, "SLOTS", 1)  # The two layers share a slot

    def run(out, resume=None):
        with moe_qlora.enabled(offload=True):
            model = loaded(model_folder)
        return trained(adapted(prepared(model)), tmp_path / out, resume, **SAVING)

    hosted = run("hosted")
    assert "on host" in repr(hosted.model)
    saved = tmp_path / "hosted/checkpoint-2"
    names = {path.name for path in saved.iterdir()}
    assert names == {path.name for path in (evaluated[1] / "checkpoint-2").iterdir()}
    for each in (hosted, run("again", str(saved))):
        assert_same_training((logged_losses(each), trained_weights(each.model)), plain)
