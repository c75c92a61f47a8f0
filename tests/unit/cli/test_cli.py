"""The command line: what it prints, what it takes, how it ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
import yaml
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import moe_qlora
from moe_qlora.cli.app import app
from moe_qlora.packing.settings import CodecSettings, packed_nbytes

LAYERS, EXPERTS, HIDDEN, WIDTH = 3, 4, 64, 32
GATE_UP = (EXPERTS, 2 * WIDTH, HIDDEN)
DOWN = (EXPERTS, HIDDEN, WIDTH)


def tiny(**changes) -> Qwen3MoeConfig:
    sizes = {
        "vocab_size": 64, "hidden_size": HIDDEN, "intermediate_size": 64, "moe_intermediate_size":
        WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 32, "num_experts": EXPERTS, "num_experts_per_tok": 2, "mlp_only_layers": [0],
        "architectures": ["Qwen3MoeForCausalLM"], "dtype": "bfloat16",
    }  # fmt: skip
    return Qwen3MoeConfig(**(sizes | changes))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint folder without weights: `dump` must not ask for them."""
    path = tmp_path / "model"
    tiny().save_pretrained(path)
    return path


def dumped(cli, *arguments: object) -> dict:
    code, out, err = cli("dump", *arguments, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def test_version(cli):
    assert cli("--version") == (0, f"moe-qlora {moe_qlora.__version__}\n", "")


def test_json(cli, folder):
    found = dumped(cli, folder)
    assert found["quantization"] == {"kind": "nf4", "double_quant": True}
    shapes = {entry["pattern"]: tuple(entry["shape"]) for entry in found["experts"]}
    root = "model.layers.*.mlp.experts."
    assert shapes == {f"{root}gate_up_proj": GATE_UP, f"{root}down_proj": DOWN}
    assert found["experts"][0]["names"] == [
        f"model.layers.{layer}.mlp.experts.gate_up_proj" for layer in (1, 2)
    ]
    assert found["experts"][0]["evidence"]
    sizes = [2 * packed_nbytes(shape, CodecSettings("nf4", True)) for shape in (GATE_UP, DOWN)]
    assert found["totals"] == {
        "parameters": 4,
        "nbytes": 2 * 2 * EXPERTS * 3 * WIDTH * HIDDEN,
        "packed_nbytes": sum(sizes),
    }


def test_python_has_full_names_and_yaml_suffixes(cli, folder):
    """PEFT takes a suffix for each name that ends with it: here for those of the other list."""
    found = dumped(cli, folder)
    pasted = eval(f"dict({cli('dump', folder, '--peft')[1]})")
    loaded = yaml.safe_load(cli("dump", folder, "--yaml")[1])
    names = [name for name, _ in AutoModelForCausalLM.from_config(tiny()).named_parameters()]
    names += [name for entry in found["exclude_modules"] for name in (entry, f"other.{entry}s")]
    for name in ("target_parameters", "exclude_modules"):
        assert sorted(pasted[name]) == sorted(found[name])
        short = tuple(f".{suffix}" for suffix in loaded[f"lora_{name}"])
        ends = [each for each in dict.fromkeys(names) if each.endswith(short)]
        assert sorted(each for each in ends if each in found[name]) == sorted(found[name])
        assert name == "exclude_modules" or len(ends) == len(found[name])
        assert 2 * len(short) == len(found[name])


def test_no_command_trusts_remote_code_or_takes_another_base_unless_told():
    commands = typer.main.get_command(app).commands.values()
    flags = {(option.name, option.default) for command in commands for option in command.params}
    asked = {flag for flag in flags if flag[0] in ("trust_remote_code", "any_base")}
    assert asked == {("trust_remote_code", False), ("any_base", False)}


def test_skip_modules(cli, folder):
    own = {"load_in_4bit": True, "llm_int8_skip_modules": ["model.layers.2.mlp.experts"]}
    tiny(quantization_config={**own, "quant_method": "bitsandbytes"}).save_pretrained(folder)
    found = dumped(cli, folder)
    skipped = [entry for entry in found["experts"] if entry["skipped"]]
    assert {name for entry in skipped for name in entry["names"]} == {
        "model.layers.2.mlp.experts.gate_up_proj",
        "model.layers.2.mlp.experts.down_proj",
    }
    assert all(entry["packed_nbytes"] == entry["nbytes"] for entry in skipped)
    assert not any("layers.2" in name for name in found["target_parameters"])
    assert not any("layers.2" in name for name in found["exclude_modules"])
    _, out, _ = cli("dump", folder, "--yaml")  # a suffix would reach what is skipped
    assert yaml.safe_load(out)["lora_target_parameters"] == found["target_parameters"]


def test_sources(cli, folder, tmp_path, monkeypatch):
    reference = dumped(cli, folder)
    trainer = tmp_path / "train.yaml"
    trainer.write_text("base_model: ./model\nadapter: qlora\nload_in_4bit: true\n")
    monkeypatch.chdir(folder)
    for source in (folder / "config.json", "config.json", trainer):
        found = dumped(cli, source)
        assert found["experts"] == reference["experts"]


def check_refused(result: tuple[int, str, str], message: str) -> None:
    code, out, err = result
    assert (code, out) == (2, "")
    assert message in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1


PACKED = '{"model_type": "qwen3_moe", "quantization_config": {"load_in_4bit": true, '
TYPE = '{"model_type": "qwen3_moe", '
NO_SETTINGS = '"quantization_config": {"quant_method": "bitsandbytes"}}'


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("config.json", "{bad", "no valid JSON"),
        ("config.json", "{}", "no model_type"),
        ("config.json", '{"model_type": "nope"}', "does not recognize this architecture"),
        ("config.json", TYPE + '"num_experts": "x"}', "num_experts"),
        ("config.json", TYPE + '"hidden_size": -4}', "cannot build a model of type 'qwen3_moe'"),
        ("config.json", TYPE + NO_SETTINGS, "neither 4 nor 8 bit"),
        ("config.json", PACKED + '"llm_int8_skip_modules": {"a": 1}}}', "modules is {'a': 1}"),
        ("train.yaml", "adapter: qlora", "base_model"),
        ("train.yaml", "base_model: train.yaml", "its base_model is 'train.yaml'"),
        ("train.yaml", "base_model: ./gone", "./gone does not exist"),
        ("train.yaml", "base_model: 2024-13-01", "no readable YAML"),
        ("train.yaml", "base_model: !!python/object/apply:os.getcwd []", "no readable YAML"),
        ("./gone", None, "does not exist"),
        ("gone.json", None, "does not exist"),
        ("a/b/c", None, "a/b/c does not exist"),
        (" ", None, "MODEL is empty"),
        ("somebody/something-not-there", None, "this process is offline (HF_HUB_OFFLINE"),
        ("nosuchtype", None, "no local path, model type or known checkpoint"),
    ],
)
def test_what_is_no_model(cli, tmp_path, monkeypatch, file, text, message):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path(file).write_text(text)
    check_refused(cli("dump", "config.json" if file == "config.json" else file), message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan", "x", "--optimiser", "a"), "No such option: --optimiser"),
        (("dump", "x", "--quant", "nf5"), "'nf5' is not one of 'nf4', 'fp4', 'int8'"),
        (("plan", "x", "--seq", "long"), "Invalid value for '--seq'"),
        (("plan", "qwen3_moe", "--rank", 300000), "rank is 300000; plans go up to 65536"),
        (("plan", "qwen3_moe", "--ddp", "--fsdp", 2), "are two engines for one run"),
    ],
)
def test_bad_arguments_are_one_line(cli, arguments, message):
    check_refused(cli(*arguments), message)


@pytest.mark.parametrize("command", ["plan", "doctor"])
def test_a_yaml_file_is_no_model_of_plan_and_doctor(cli, command):
    check_refused(cli(command, "a.YML"), "run axolotl moe-experts a.YML, or name the model")
    with pytest.raises(moe_qlora.ConfigError, match=r"is a YAML file, which moe-qlora"):
        getattr(moe_qlora, command)("a.YML")


def test_trusted_remote_code(cli, tmp_path):
    code = """
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

class FarConfig(PretrainedConfig):
    model_type = "far_moe"

class FarModel(PreTrainedModel):
    config_class = FarConfig
    def __init__(self, config):
        super().__init__(config)
        self.choose = nn.Linear(8, 3, bias=False)
        self.first = nn.Parameter(torch.empty(3, 16, 8))
        self.second = nn.Parameter(torch.empty(3, 8, 16))
        self.post_init()
"""
    (tmp_path / "far.py").write_text(code)
    auto = {"AutoConfig": "far.FarConfig", "AutoModel": "far.FarModel"}
    config = {"model_type": "far_moe", "auto_map": auto, "dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    check_refused(cli("dump", tmp_path), "--trust-remote-code")
    found = dumped(cli, tmp_path, "--trust-remote-code")
    assert [entry["pattern"] for entry in found["experts"]] == ["first", "second"]
