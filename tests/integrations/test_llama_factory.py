"""LLaMA-Factory's own loader, adapters and trainer with packed experts, where it is installed."""

from __future__ import annotations

import json

import pytest
import torch
import yaml
from safetensors.torch import load_file

import moe_qlora
from moe_qlora.errors import ConfigError
from moe_qlora.integrations import llama_factory


@pytest.fixture(scope="module")
def installed(python, tmp_path_factory):
    tried = python("-c", "import llamafactory.train.tuner", cwd=tmp_path_factory.mktemp("try"))
    if tried.returncode:
        pytest.skip(f"LLaMA-Factory cannot be imported: {tried.stderr.strip().splitlines()[-1]}")


@pytest.fixture(scope="module")
def arguments(model_folder, tmp_path_factory):
    """The file of a run of 8 steps; `output_dir` is to be added."""
    data = tmp_path_factory.mktemp("data")
    words = ("one", "two", "three", "four", "five", "six", "seven", "eight")
    rows = [
        {"instruction": f"Say {word}.", "input": "", "output": f"{word}, {word} and {word}!"}
        for word in words
    ]
    (data / "tiny.json").write_text(json.dumps(rows))
    (data / "dataset_info.json").write_text(json.dumps({"tiny": {"file_name": "tiny.json"}}))
    return {
        "model_name_or_path": str(model_folder),
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "lora",
        "lora_target": "q_proj,v_proj",
        "lora_rank": 4,
        "lora_alpha": 16,
        "dataset": "tiny",
        "dataset_dir": str(data),
        "template": "default",
        "cutoff_len": 64,
        "per_device_train_batch_size": 8,
        "max_steps": 8,
        "learning_rate": 5e-3,
        "logging_steps": 1,
        "report_to": "none",
        "use_cpu": True,
        "bf16": True,
        # Its own checkpointing takes apart a function that transformers 5.23 does not pass any
        # more, with plain models too; the trainer's is as good.
        "disable_gradient_checkpointing": True,
        "gradient_checkpointing": True,
        "quantization_bit": 4,
        "moe_qlora": {"lora_experts": True},
    }


@pytest.fixture(scope="module")
def train(python):
    def run(folder, arguments, **more):
        given = {**arguments, "output_dir": str(folder / "out"), **more}
        (folder / "run.yaml").write_text(yaml.safe_dump(given))
        return python("-m", "moe_qlora.integrations.llama_factory", "run.yaml", cwd=folder)

    return run


def losses(out):
    history = json.loads((out / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


@pytest.fixture(scope="module")
def trained(installed, train, arguments, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    done = train(folder, arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / "out"


def test_training_and_what_stock_peft_makes_of_it(trained, check_adapter):
    first, *_, last = losses(trained)
    assert last < first - 0.5
    check_adapter(trained)


def test_going_on_from_an_adapter(trained, train, arguments, tmp_path):
    done = train(tmp_path, arguments, adapter_name_or_path=str(trained), max_steps=2)
    assert done.returncode == 0, done.stderr[-3000:]
    assert losses(tmp_path / "out")[0] < losses(trained)[0] - 0.5
    before, after = (
        load_file(out / "adapter_model.safetensors") for out in (trained, tmp_path / "out")
    )
    assert before.keys() == after.keys()
    assert all(not torch.equal(before[key], after[key]) for key in before)


@pytest.fixture(scope="module")
def packed_folder(model_folder, stored, tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed") / "model"
    config = {**stored.to_dict(), "bnb_4bit_compute_dtype": "bfloat16"}
    moe_qlora.quantize_checkpoint(model_folder, folder, config)
    for file in model_folder.glob("tokenizer*"):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def test_a_packed_folder_trains_as_its_source(trained, train, packed_folder, arguments, tmp_path):
    given = {key: value for key, value in arguments.items() if key != "quantization_bit"}
    done = train(tmp_path, given, model_name_or_path=str(packed_folder))
    assert done.returncode == 0, done.stderr[-3000:]
    assert losses(tmp_path / "out") == losses(trained)


UNDONE = """
import sys, yaml
from llamafactory.hparams import get_train_args
from llamafactory.model import adapter, load_model, load_tokenizer
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from moe_qlora.integrations.llama_factory import packed_experts
from moe_qlora.packing.parametrize import iter_packed

is_enabled = lambda: AUTO_QUANTIZER_MAPPING["bitsandbytes_4bit"].__name__.startswith("Packing")
args = yaml.safe_load(open(sys.argv[1]))
del args["moe_qlora"]
model_args, _, _, finetuning_args, _ = get_train_args(args)
tokenizer = load_tokenizer(model_args)["tokenizer"]
theirs = adapter.get_peft_model, adapter.PeftModel
build = lambda: load_model(tokenizer, model_args, finetuning_args, is_trainable=True)
with packed_experts():
    assert is_enabled() and adapter.get_peft_model is not theirs[0]
    first, second = build(), build()
    assert all(len(list(iter_packed(model))) == 4 for model in (first, second))
    assert not any("experts" in name for name, one in first.named_parameters() if one.requires_grad)
try:
    with packed_experts():
        raise KeyError
except KeyError:
    pass
assert (adapter.get_peft_model, adapter.PeftModel) == theirs and not is_enabled()
assert not list(iter_packed(build()))
print("undone")
"""


@pytest.mark.usefixtures("installed")
def test_a_plain_model_afterwards(python, arguments, tmp_path):
    given = {**arguments, "output_dir": str(tmp_path / "out"), "lora_target": "all"}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(given))
    done = python("-c", UNDONE, "run.yaml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith("undone\n")


@pytest.mark.usefixtures("installed")
def test_a_wrong_file(python, train, arguments, tmp_path):
    done = train(tmp_path, arguments, moe_qlora={"lora_expert": True})
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(
        "error: moe_qlora.lora_expert is no setting (did you mean lora_experts?)"
    )
    assert "Loading" not in done.stderr

    done = python("-m", "moe_qlora.integrations.llama_factory", cwd=tmp_path)
    assert done.returncode == 2
    assert "error: Name a YAML or JSON file" in done.stderr


def test_without_it(monkeypatch, capsys):
    monkeypatch.setattr(llama_factory, "find_spec", lambda name: None)
    assert llama_factory.main() == 2
    assert capsys.readouterr().err.startswith("error: LLaMA-Factory is not installed")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"quantization_bit": None}, "quantization_bit None and quantization_method bnb"),
        ({"quantization_bit": 3}, "set quantization_bit to 4 or 8"),
        ({"quantization_method": "hqq"}, "quantization_method hqq"),
        ({"use_unsloth": True}, "use_unsloth builds the model by other code"),
        ({"finetuning_type": "oft"}, "finetuning_type is oft, and packed experts take LoRA only"),
        ({"moe_qlora": {"lora_experts": ["middle"]}}, "moe_qlora.lora_experts is"),
        ({"moe_qlora": True}, "moe_qlora is True"),
    ],
)
def test_arguments_that_do_not_go_together(arguments, change, said):
    with pytest.raises(ConfigError) as caught:
        llama_factory.check({**arguments, **change})
    assert said in str(caught.value)
    assert str(caught.value).endswith(".")


def test_arguments_that_do(arguments, packed_folder):
    packed = {**arguments, "quantization_bit": None, "model_name_or_path": str(packed_folder)}
    assert llama_factory.check(packed).pack_experts
    assert llama_factory.check(arguments).lora_experts is True
    assert llama_factory.check({**arguments, "quantization_bit": 8, "moe_qlora": None})
    off = {**arguments, "quantization_bit": None, "moe_qlora": {"pack_experts": False}}
    assert not llama_factory.check(off).pack_experts
