"""ms-swift's own command line, loader and trainer with packed experts, where it is installed."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

import moe_qlora
from moe_qlora.errors import ConfigError
from moe_qlora.integrations import ms_swift

PLUGIN = """
from moe_qlora.integrations.ms_swift import register

register({"lora_experts": True})
"""


@pytest.fixture(scope="module")
def folder(python, tmp_path_factory):
    """Where runs are started: with the plugin's file and a data set."""
    path = tmp_path_factory.mktemp("swift")
    tried = python("-c", "import swift.pipelines.train.sft, swift.tuner_plugin", cwd=path)
    if tried.returncode:
        pytest.skip(f"ms-swift cannot be imported: {tried.stderr.strip().splitlines()[-1]}")
    words = ("one", "two", "three", "four", "five", "six", "seven", "eight")
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"Say {word}."},
                {"role": "assistant", "content": f"{word}, {word} and {word}!"},
            ]
        }
        for word in words
    ]
    (path / "tiny.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (path / "experts.py").write_text(PLUGIN)
    return path


@pytest.fixture(scope="module")
def sft(python):
    def run(folder, model, **more):
        """`swift sft` with what these runs have in common; returns the process."""
        options = {
            "model": model,
            "model_type": "qwen3_moe",
            "template": "dummy",
            "use_hf": "true",
            "dataset": "tiny.jsonl",
            "external_plugins": "experts.py",
            "tuner_type": "moe_qlora",
            "quant_method": "bnb",
            "quant_bits": 4,
            "target_modules": "q_proj v_proj",
            "lora_rank": 4,
            "lora_alpha": 16,
            "lora_dropout": 0,
            "add_version": "false",
            "max_steps": 8,
            "per_device_train_batch_size": 8,
            "learning_rate": 5e-3,
            "logging_steps": 1,
            "max_length": 64,
            "report_to": "none",
            "use_cpu": "true",
            "device_map": "cpu",
            "torch_dtype": "bfloat16",
            **more,
        }
        words = [
            word
            for name, value in options.items()
            if value is not None
            for word in (f"--{name}", *str(value).split())
        ]
        return python("-m", "swift.cli.sft", *words, cwd=folder)

    return run


def losses(checkpoint):
    history = json.loads((checkpoint / "trainer_state.json").read_text())["log_history"]
    return {entry["step"]: entry["loss"] for entry in history if "loss" in entry}


@pytest.fixture(scope="module")
def trained(sft, folder, model_folder):
    done = sft(folder, model_folder, output_dir="out", save_steps=4)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / "out/checkpoint-8"


def test_training_and_what_stock_peft_makes_of_it(trained, check_adapter):
    fell = losses(trained)
    assert fell[8] < fell[1] - 0.5
    check_adapter(trained)


def test_resuming_gives_the_losses_of_not_having_stopped(trained, sft, folder, model_folder):
    checkpoint = trained.parent / "checkpoint-4"
    done = sft(folder, model_folder, output_dir="again", resume_from_checkpoint=checkpoint)
    assert done.returncode == 0, done.stderr[-3000:]
    once, again = losses(trained), losses(folder / "again/checkpoint-8")
    assert [again[step] for step in range(5, 9)] == [once[step] for step in range(5, 9)]
    first, second = (
        load_file(path / "adapter_model.safetensors")
        for path in (trained, folder / "again/checkpoint-8")
    )
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_a_packed_folder_trains(trained, sft, folder, model_folder, stored):
    packed = folder / "packed"
    moe_qlora.quantize_checkpoint(model_folder, packed, stored)
    for file in model_folder.glob("tokenizer*"):
        (packed / file.name).write_bytes(file.read_bytes())
    done = sft(folder, packed, output_dir="from_packed", quant_method=None, quant_bits=None)
    assert done.returncode == 0, done.stderr[-3000:]
    # ms-swift loads the source in bfloat16, so that it packs other values than lie in the folder.
    mine, theirs = losses(folder / "from_packed/checkpoint-8"), losses(trained)
    assert mine[1] == pytest.approx(theirs[1], rel=0.02)
    assert mine[8] < mine[1] - 0.5


UNDONE = """
import sys
from swift.model import MODEL_MAPPING, get_model_processor
from swift.tuner_plugin import tuners_map
from transformers import BitsAndBytesConfig
from moe_qlora.errors import ConfigError
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from moe_qlora.integrations.ms_swift import register
from moe_qlora.packing.parametrize import iter_packed

is_enabled = lambda: AUTO_QUANTIZER_MAPPING["bitsandbytes_4bit"].__name__.startswith("Packing")
config = BitsAndBytesConfig(load_in_4bit=True)
def build(config):
    options = {"model_type": "qwen3_moe", "device_map": "cpu", "use_hf": True}
    model, _ = get_model_processor(sys.argv[1], quantization_config=config, **options)
    return len(list(iter_packed(model)))

loaders = {name: meta.loader for name, meta in MODEL_MAPPING.items()}
assert len(loaders) > 100
with register():
    assert "moe_qlora" in tuners_map and not is_enabled()
    assert build(config) == 4 and not is_enabled()
    assert build(None) == 0
    try:
        register()
    except ConfigError as error:
        assert "registered already" in str(error)
    else:
        raise AssertionError
    assert "moe_qlora" in tuners_map
assert "moe_qlora" not in tuners_map
assert {name: meta.loader for name, meta in MODEL_MAPPING.items()} == loaders
assert build(config) == 0
print("undone")
"""


def test_a_plain_model_afterwards(python, folder, model_folder):
    done = python("-c", UNDONE, model_folder, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "undone"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            {"quant_method": None, "quant_bits": None},
            "was loaded without a BitsAndBytesConfig, so nothing says how to pack its experts",
        ),
        ({"lorap_lr_ratio": 2}, "--lorap_lr_ratio 2.0 makes adapters by other code"),
    ],
)
def test_options_that_do_not_go_together(sft, folder, model_folder, more, said):
    done = sft(folder, model_folder, output_dir="refused", **more)
    assert done.returncode != 0
    assert done.stderr.strip().splitlines()[-1].startswith("moe_qlora.errors.ConfigError: ")
    assert said in done.stderr.strip().splitlines()[-1]


def test_adapters_made_elsewhere():
    ms_swift._check(SimpleNamespace(tuner_backend="peft", use_swift_lora=False))
    with pytest.raises(ConfigError, match="--tuner_backend unsloth makes adapters"):
        ms_swift._check(SimpleNamespace(tuner_backend="unsloth"))
