"""A real axolotl, from a YAML file to an adapter and a merged model, on a tiny model on the CPU.

Runs where axolotl is installed; `bash tools/test_axolotl` makes such an environment.
"""

import copy
import json
import warnings
from pathlib import Path

import pytest
import torch
import yaml

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip(
        "axolotl.cli.train",
        reason="axolotl is not installed here: bash tools/test_axolotl runs these tests",
        exc_type=ImportError,
    )
    import axolotl.train
    from axolotl.cli.config import load_cfg
    from axolotl.common.datasets import load_datasets, load_preference_datasets
    from axolotl.integrations.base import PluginManager
    from axolotl.loaders import ModelLoader, load_tokenizer

import peft
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import moe_qlora
from moe_qlora.errors import AdapterError
from moe_qlora.integrations.settings import PLUGIN as NAME
from moe_qlora.packing import parametrize

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # axolotl's own, and of what it imports
    pytest.mark.usefixtures("trainable_linears", "left_off"),
]

STEPS = 6
IDS = torch.arange(2, 50).reshape(2, 24)


@pytest.fixture(scope="module")
def data(model_folder, tmp_path_factory):
    """Rows of token ids, which need no prompt strategy."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model_folder)
    rows = [tokenizer(f"after {i} comes {i + 1}, and so on")["input_ids"] for i in range(40)]
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    fields = ({"input_ids": row, "attention_mask": [1] * len(row), "labels": row} for row in rows)
    path.write_text("\n".join(map(json.dumps, fields)), encoding="utf-8")
    return path


@pytest.fixture
def config(model_folder, data, tmp_path):
    """A plain QLoRA file, without the plugin."""
    return {
        "base_model": str(model_folder), "adapter": "qlora", "load_in_4bit": True,
        "datasets": [{"path": str(data), "ds_type": "json", "type": None}],
        "skip_prepare_dataset": True, "dataset_prepared_path": str(tmp_path / "prepared"),
        "output_dir": str(tmp_path / "out"), "sequence_len": 64, "micro_batch_size": 4,
        "gradient_accumulation_steps": 1, "max_steps": STEPS, "num_epochs": 1,
        "learning_rate": 0.01, "optimizer": "adamw_torch", "lr_scheduler": "constant",
        "lora_r": 4, "lora_alpha": 8, "lora_target_modules": ["q_proj", "v_proj"], "seed": 7,
        "bf16": False, "fp16": False, "float32": True, "logging_steps": 1, "save_strategy": "no",
        # these are for GPUs
        "lora_mlp_kernel": False, "lora_qkv_kernel": False, "lora_o_kernel": False,
        "attn_implementation": "eager", "gradient_checkpointing": True,
        "bnb_config_kwargs": {"bnb_4bit_use_double_quant": False},
    }  # fmt: skip


def ours(config, **settings):
    return {**config, "plugins": [NAME], "moe_qlora": settings}


def write(config):
    out = Path(config["output_dir"])
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    return str(out / "config.yml")


def read(config):
    """The configuration, by way of a file and axolotl's own validation."""
    return load_cfg(write(config))


@torch.no_grad()
def logits(model):
    model.eval()
    return model(input_ids=IDS).logits.float()


def test_from_yaml_to_merged_model_and_back_to_plain(config, model_folder, tmp_path):
    run = ours(config, lora_experts=True)
    written = copy.deepcopy(run)
    cfg = read(run)
    model, _, trainer = axolotl.train.train(cfg=cfg, dataset_meta=load_datasets(cfg=cfg))
    PluginManager.get_instance().post_train_unload(cfg)
    assert run == written
    losses = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] - 0.3
    stacks = [parametrize.read_packed(*at[1:]) for at in parametrize.iter_packed(model)]
    assert len(stacks) == 4
    for stack in stacks:  # bnb_config_kwargs and axolotl's own defaults, to the letter
        assert (stack.kind, stack.nested, stack.codes.dtype) == ("nf4", None, torch.bfloat16)
    out = Path(run["output_dir"])
    saved = load_file(out / "adapter_model.safetensors")
    factors = {key: value for key, value in saved.items() if ".experts." in key and "lora_B" in key}
    assert len(factors) == 4
    assert all(value.abs().max() > 1e-3 for value in factors.values())
    asked = json.loads((out / "adapter_config.json").read_text(encoding="utf-8"))
    assert sorted(asked["target_modules"]) == ["q_proj", "v_proj"] and not asked["exclude_modules"]
    trained = logits(model)

    # stock PEFT on the decoded model
    with moe_qlora.enabled():
        decoded = AutoModelForCausalLM.from_pretrained(
            model_folder, quantization_config=model.config.quantization_config, dtype=torch.float32
        ).dequantize()
    stock = logits(peft.PeftModel.from_pretrained(decoded, out))
    torch.testing.assert_close(stock, trained, atol=1e-4, rtol=1e-4)

    # axolotl merge-lora
    from axolotl.cli.merge_lora import do_cli

    do_cli(str(out / "config.yml"))
    merged = AutoModelForCausalLM.from_pretrained(out / "merged", dtype=torch.float32)
    torch.testing.assert_close(logits(merged), trained, atol=1e-4, rtol=1e-4)


def test_the_users_lists_are_kept(config):
    config["lora_target_parameters"] = ["mlp.experts.down_proj"]
    config["lora_exclude_modules"] = ["model.layers.1.self_attn.v_proj"]
    cfg = read(ours(config))
    model = ModelLoader(cfg, load_tokenizer(cfg)).load()[0]
    assert cfg.lora_target_parameters == ["mlp.experts.down_proj"]
    assert cfg.lora_exclude_modules == ["model.layers.1.self_attn.v_proj"]
    adapted = {name for name, _ in model.named_parameters() if "lora_A" in name}
    assert len(adapted) == 2 + 1 + 2  # q of both layers, v of the first, down of both
    written = model.peft_config["default"].to_dict()  # what a save writes
    assert written["target_parameters"] == ["mlp.experts.down_proj"]


def test_dpo(config, tmp_path, monkeypatch, model_folder):
    rows = tmp_path / "pairs.jsonl"
    pairs = (
        json.dumps({"prompt": f"after {i} ", "chosen": f"comes {i + 1}", "rejected": "nothing"})
        for i in range(16)
    )
    rows.write_text("\n".join(pairs), encoding="utf-8")
    fields = {"field_prompt": "prompt", "field_chosen": "chosen", "field_rejected": "rejected"}
    config |= {"rl": "dpo", "remove_unused_columns": False, "learning_rate": 0.001}
    config["datasets"] = [{"path": str(rows), "ds_type": "json", "type": fields}]
    # writes them with processes of its own
    monkeypatch.setattr("axolotl.utils.data.rl.save_preprocessed_dataset", lambda *a, **k: None)
    cfg = read(ours(config, lora_experts=True))
    model, _, trainer = axolotl.train.train(cfg=cfg, dataset_meta=load_preference_datasets(cfg=cfg))
    margins = [float(e["rewards/margins"]) for e in trainer.state.log_history if "loss" in e]
    assert margins[0] == 0.0 < margins[-1]  # the reference is the policy at first
    trained = logits(trainer.model)
    PluginManager.get_instance().post_train_unload(cfg)
    out = Path(cfg.output_dir)
    assert not (out / "model.safetensors").exists()
    with pytest.raises(AdapterError, match="holds adapters"):  # as before
        model.save_pretrained(tmp_path / "base")
    with moe_qlora.enabled():
        base = AutoModelForCausalLM.from_pretrained(
            model_folder, quantization_config=model.config.quantization_config, dtype=torch.float32
        )
    moved = (logits(base) - trained).abs().max()
    reloaded = moe_qlora.load_adapter(base, str(out))
    assert moved > 0.01
    assert (logits(reloaded) - trained).abs().max() < moved / 20  # TRL trains bfloat16 adapters


def test_a_file_that_does_not_name_the_plugin_is_read_as_ever(config):
    config["lora_exclude_modules"] = ["v_proj"]
    assert read(ours(config)).lora_exclude_modules == ["v_proj"]
    cfg = read({**config, "moe_qlora": "nonsense", "relora": None})
    assert cfg.lora_exclude_modules is None  # which axolotl's schema does not have
    assert cfg.moe_qlora is None
    plugin = PluginManager.get_instance().plugins[NAME]
    plugin.pre_model_load(cfg)
    assert plugin.host is None


def test_the_subcommand(config, capsys):
    from axolotl.cli.main import cli

    file = write(ours(config))
    with pytest.raises(SystemExit) as end:
        cli(["moe-experts", file, "--json"], standalone_mode=False)
    assert end.value.code in (0, None)
    printed = capsys.readouterr().out
    found = json.loads(printed[printed.index("{") :])  # below axolotl's own banner
    assert [group["role"] for group in found["experts"]] == ["gate_up", "down"]
