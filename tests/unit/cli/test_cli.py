"""The command line: what it prints, what it takes, how it ends."""

import json
import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import typer
import yaml
from transformers import AutoModelForCausalLM

import moe_qlora
from moe_qlora.cli import app, render
from moe_qlora.packing.settings import CodecSettings, packed_nbytes
from moe_qlora.testing import tiny_config, tiny_model

EXPERTS, HIDDEN, WIDTH = 4, 64, 32
GATE_UP = (EXPERTS, 2 * WIDTH, HIDDEN)
DOWN = (EXPERTS, HIDDEN, WIDTH)


def tiny(**changes):
    sizes = {"hidden_size": HIDDEN, "moe_intermediate_size": WIDTH, "num_hidden_layers": 3}
    sizes |= {"num_experts": EXPERTS, "mlp_only_layers": [0], "dtype": "bfloat16"}
    sizes |= {"architectures": ["Qwen3MoeForCausalLM"], "layer_types": None}
    return tiny_config("qwen3_moe", **(sizes | changes))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint folder without weights: `dump` must not ask for them."""
    tiny().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


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
    nbytes = 2 * 2 * EXPERTS * 3 * WIDTH * HIDDEN
    assert found["totals"] == {"parameters": 4, "nbytes": nbytes, "packed_nbytes": sum(sizes)}


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
    commands = typer.main.get_command(app.app).commands.values()
    flags = {(option.name, option.default) for command in commands for option in command.params}
    asked = {flag for flag in flags if flag[0] in ("trust_remote_code", "any_base")}
    assert asked == {("trust_remote_code", False), ("any_base", False)}


def test_skip_modules(cli, folder):
    own = {"load_in_4bit": True, "llm_int8_skip_modules": ["model.layers.2.mlp.experts"]}
    tiny(quantization_config={**own, "quant_method": "bitsandbytes"}).save_pretrained(folder)
    found = dumped(cli, folder)
    skipped = [entry for entry in found["experts"] if entry["skipped"]]
    names = {f"model.layers.2.mlp.experts.{leaf}_proj" for leaf in ("gate_up", "down")}
    assert {name for entry in skipped for name in entry["names"]} == names
    assert all(entry["packed_nbytes"] == entry["nbytes"] for entry in skipped)
    lists = [*found["target_parameters"], *found["exclude_modules"]]
    assert not any("layers.2" in name for name in lists)
    _, out, _ = cli("dump", folder, "--yaml")  # a suffix would reach what is skipped
    assert yaml.safe_load(out)["lora_target_parameters"] == found["target_parameters"]


def test_sources(cli, folder, monkeypatch):
    reference = dumped(cli, folder)
    monkeypatch.chdir(folder)
    for source in (folder / "config.json", "config.json"):
        assert dumped(cli, source)["experts"] == reference["experts"]


def check_refused(result: tuple[int, str, str], message: str) -> None:
    code, out, err = result
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: ") and message in err


PACKED = '{"model_type": "qwen3_moe", "quantization_config": {"load_in_4bit": true, '
TYPE = '{"model_type": "qwen3_moe", '
NO_SETTINGS = '"quantization_config": {"quant_method": "bitsandbytes"}}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "no model_type"),
        ('{"model_type": "nope"}', "does not recognize this architecture"),
        (TYPE + '"num_experts": "x"}', "num_experts"),
        (TYPE + '"hidden_size": -4}', "cannot build a model of type 'qwen3_moe'"),
        (TYPE + NO_SETTINGS, "neither 4 nor 8 bit"),
        (PACKED + '"llm_int8_skip_modules": {"a": 1}}}', "modules is {'a': 1}"),
    ],
)
def test_a_configuration_of_no_model_is_refused_in_one_line(cli, tmp_path, text, message):
    """More errors: golden/errors.txt."""
    (tmp_path / "config.json").write_text(text)
    check_refused(cli("dump", tmp_path / "config.json"), message)
    check_refused(cli("dump", " "), "MODEL is empty")


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


PROGRAM = [sys.executable, "-m", "moe_qlora.cli"]


def test_our_warnings_are_a_line_and_others_none(capsys, monkeypatch):
    monkeypatch.setattr(sys, "warnoptions", [])
    with render.streams():
        for module in ("moe_qlora.lora.somewhere", "torch.somewhere"):
            warnings.warn_explicit(f"of {module}\nin two lines", UserWarning, "file", 1, module)
        logging.getLogger("bitsandbytes.backends").warning("Failed to load CPU gemm_4bit_forward")
        logging.getLogger("peft.x").error("broken")
        logging.getLogger("moe_qlora.hf").warning("slow")
        logging.getLogger("moe_qlora.hf").info("quick")
    assert capsys.readouterr().err.splitlines() == [
        "warning: of moe_qlora.lora.somewhere in two lines",
        "error (peft.x): broken",
        "warning: slow",
    ]
    assert not [h for h in logging.getLogger().handlers if type(h).__module__ == render.__name__]


def test_a_full_disk_is_one_line():
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([*PROGRAM, "--help"], stdout=full, stderr=-1, text=True, check=False)
    message = "error: what is printed cannot be read or written: No space left on device.\n"
    assert (done.returncode, done.stderr) == (2, message)


@pytest.mark.parametrize("arguments", ["doctor", "dump qwen3_moe --json"])
def test_what_nobody_reads_is_no_problem_that_was_found(monkeypatch, arguments):
    """However it is printed; `doctor` and `verify` end with 1 where they found something."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        monkeypatch.setattr(sys, "argv", ["moe-qlora", *arguments.split()])
        with pytest.raises(SystemExit) as stop:
            app.run()
        stdout.flush()  # into nothing by now, as at Python's end
    assert stop.value.code == 141


def test_an_interrupted_command_leaves_nothing(cli, tmp_path, monkeypatch):
    from moe_qlora.checkpoint.folder import ShardWriter

    tiny_model("qwen3_moe", dtype=torch.bfloat16).save_pretrained(tmp_path / "model")
    before, stock, calls = sorted(tmp_path.rglob("*")), ShardWriter.write, []

    def write(self, *arguments):
        calls.append(arguments)
        if len(calls) == 20:
            raise KeyboardInterrupt
        return stock(self, *arguments)

    monkeypatch.setattr(ShardWriter, "write", write)
    said = "interrupted: nothing new stays on disk, and what was there is unchanged.\n"
    assert cli("quantize", tmp_path / "model", tmp_path / "out") == (130, "", said)
    assert sorted(tmp_path.rglob("*")) == before


def test_completion_of_model_types():
    """What bash asks for, and what it gets."""
    asked = {"COMP_WORDS": "moe-qlora dump qwen3_m", "COMP_CWORD": "2"}
    asked |= {"_MOE_QLORA_COMPLETE": "complete_bash"}
    done = subprocess.run(PROGRAM, env=os.environ | asked, stdout=-1, text=True, check=False)
    assert "qwen3_moe" in done.stdout.split()
