"""The doctor: what it says of versions, devices and layers is what holds."""

from __future__ import annotations

import contextlib
import csv
import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import BitsAndBytesConfig

import moe_qlora
from moe_qlora.diagnosis import doctor, report
from moe_qlora.diagnosis.report import Device, LayerKind, Package
from moe_qlora.experts.backend import choose_backend, read_call
from moe_qlora.kernels.cards import Card, of_capability
from moe_qlora.memory.devices import GPUS
from moe_qlora.testing import tiny_model
from tests.helpers.plans import plan

ROOT = Path(__file__).parents[3]
BF16 = BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
)
FP32 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
WIDE = {"hidden_size": 64, "moe_intermediate_size": 64}


def config(model_type: str = "qwen3_moe", **sizes: int) -> Any:
    return tiny_model(model_type, dtype=torch.bfloat16, **sizes).config


@pytest.fixture(autouse=True)
def stock_fit(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Spare the plan that says whether a card holds a step, seconds of a call; its function."""
    stock = doctor._fit
    monkeypatch.setattr(doctor, "_fit", lambda *_: "")
    return stock


# Versions


@pytest.mark.parametrize(
    ("installed", "status"),
    [
        ("2.13.0+cpu", "tested"),
        ("2.12", "tested"),
        ("2.10.1", "too old"),
        ("2.16.0.dev20261122", "untested"),
        (None, "missing"),
    ],
)
def test_statuses_and_findings(monkeypatch, installed, status):
    stock = report.installed_version
    monkeypatch.setattr(
        report, "installed_version", lambda name: installed if name == "torch" else stock(name)
    )
    rows = report.packages()
    assert next(row.status for row in rows if row.name == "torch") == status
    found = [finding for finding in report.findings(rows) if "torch" in finding.what]
    severity = {"tested": [], "untested": ["warning"]}.get(status, ["problem"])
    assert [finding.severity for finding in found] == severity
    assert all(finding.cure for finding in found)


# Layers


CASES = {
    "fused": ("qwen3_moe", BF16, WIDE),
    "float32": ("qwen3_moe", FP32, WIDE),
    "odd sizes": ("qwen3_moe", BF16, {"hidden_size": 64, "moe_intermediate_size": 36}),
    "transposed": ("gpt_oss", BF16, {}),
    "double": ("mixtral", {"load_in_4bit": True, "bnb_4bit_use_double_quant": True}, {}),
    "int8": ("qwen3_moe", BitsAndBytesConfig(load_in_8bit=True), WIDE),
}


def chosen(case: str, on_gpu: bool) -> set[tuple[str, str]]:
    """What a forward of the packed model itself is computed by, and why."""
    model_type, asked, sizes = CASES[case]
    model: Any = tiny_model(model_type, dtype=torch.bfloat16, **sizes)
    moe_qlora.quantize_experts(model, asked)
    for bias in (value for name, value in model.named_parameters() if name.endswith("_bias")):
        bias.requires_grad_(False)  # as PEFT does
    found = set()
    for entry in moe_qlora.detect(model).modules:
        module = model.get_submodule(entry.name)
        hidden = entry.parameters[0].in_features
        call = read_call(module, torch.zeros(5, hidden, dtype=torch.bfloat16))
        if on_gpu:
            call = call._replace(card=of_capability((8, 9)))
        backend_chosen = choose_backend(module, call)
        found.add((backend_chosen.name, backend_chosen.reason))
    return found


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:.*is computed in float32")
def test_backends_are_those_of_a_forward(monkeypatch, case):
    model_type, asked, sizes = CASES[case]
    plain = config(model_type, **sizes)
    report = moe_qlora.doctor(plain, asked)
    assert {(layer.backend, layer.reason) for layer in report.layers} == chosen(case, False)
    expected = chosen(case, True)
    monkeypatch.setattr(doctor, "_fit", lambda *_: "")
    report = moe_qlora.doctor(plain, asked, gpu="4090")
    assert {(layer.backend, layer.reason) for layer in report.layers} == expected
    for layer in report.layers:
        assert layer.fast == (layer.backend == "fused layer")
        assert bool(layer.cost) != layer.fast


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_each_compute_dtype_that_is_slow_has_a_cure(dtype):
    asked = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=dtype)
    report = moe_qlora.doctor(config(**WIDE), asked, gpu="4090")
    assert "Set bnb_4bit_compute_dtype to the dtype of the model." in [
        finding.cure for finding in report.findings
    ]


def test_classes_with_a_forward_of_their_own():
    report = moe_qlora.doctor(config("llama4_text"), gpu="H200")
    (layer,) = report.layers
    assert layer.backend == doctor.OWN_FORWARD
    assert "experts interface" in layer.reason
    (finding,) = [finding for finding in report.findings if layer.reason in finding.what]
    assert finding.cure == "Nothing to change: this model type has no faster path here."


def test_skipped_experts_and_models_without():
    skipping = BitsAndBytesConfig(load_in_4bit=True, llm_int8_skip_modules=["experts"])
    report = moe_qlora.doctor(config(), skipping, gpu="H100")
    assert [layer.backend for layer in report.layers] == ["unpacked"]
    assert "Look at llm_int8_skip_modules." in [finding.cure for finding in report.findings]
    from transformers import LlamaConfig

    dense = LlamaConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=1)
    report = moe_qlora.doctor(dense)
    assert report.layers == ()
    assert "The model has no experts." in report.notes


def test_a_model_is_left_as_it_is():
    model: Any = tiny_model("qwen3_moe", dtype=torch.bfloat16)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    moe_qlora.quantize_experts(model, BF16)
    packed = {name: value.clone() for name, value in model.state_dict().items()}
    (layer,) = moe_qlora.doctor(model).layers
    assert layer.backend == "reference loop"
    after = model.state_dict()
    assert after.keys() == packed.keys() != before.keys()
    assert all(torch.equal(after[name], value) for name, value in packed.items())


@pytest.mark.parametrize(("ranks", "reason"), [((8,), "suit its kernels"), ((8, 200), "over 128")])
def test_a_model_with_adapters_is_examined_as_it_is(ranks, reason):
    model: Any = tiny_model("qwen3_moe", dtype=torch.bfloat16, **WIDE)
    moe_qlora.quantize_experts(model, BF16)
    first = LoraConfig(r=ranks[0], target_modules=["q_proj"])
    peft_model = moe_qlora.get_peft_model(model, first, experts=True)
    for rank in ranks[1:]:
        other = LoraConfig(r=rank, target_modules=["q_proj"])
        peft_model.add_adapter("other", moe_qlora.adapt_lora_config(model, other, experts=True))
        peft_model.set_adapter("other")
    for given in (peft_model, model):
        (layer,) = moe_qlora.doctor(given, gpu="H200").layers
        assert (layer.pattern, layer.count) == ("model.layers.*.mlp.experts", 2)
        assert reason in layer.reason
    with pytest.raises(moe_qlora.ConfigError, match="for a model without adapters"):
        moe_qlora.doctor(peft_model, BF16)


def eager(diagnosis: moe_qlora.Diagnosis) -> list[str]:
    return [one.cure for one in diagnosis.findings if "computed eagerly" in one.what]


def test_eager_attention_is_a_finding_on_a_gpu():
    plain = config("gpt_oss")
    (cure,) = eager(moe_qlora.doctor(plain, BF16, gpu="H200"))
    assert 'attn_implementation="flex_attention"' in cure
    assert not eager(moe_qlora.doctor(plain, BF16, gpu="T4"))  # before Triton's kernels
    assert not eager(moe_qlora.doctor(config(), BF16, gpu="H200"))
    plain._attn_implementation = "flex_attention"
    assert not eager(moe_qlora.doctor(plain, BF16, gpu="H200"))


def test_eager_attention_of_a_loaded_model_is_a_finding():
    model: Any = tiny_model("gpt_oss", dtype=torch.bfloat16)
    moe_qlora.quantize_experts(model, BF16)
    assert eager(moe_qlora.doctor(model, gpu="H200"))
    lora = LoraConfig(r=8, target_modules=["q_proj"])
    peft_model = moe_qlora.get_peft_model(model, lora, experts=True)
    assert eager(moe_qlora.doctor(peft_model, gpu="H200"))
    model.config._attn_implementation = "flex_attention"
    assert not eager(moe_qlora.doctor(peft_model, gpu="H200"))


def test_the_cost_of_a_fallback_is_what_was_measured():
    with (ROOT / "tools/bench/results/layer.csv").open() as file:
        rows = list(csv.DictReader(file))
    cost = doctor.COSTS[doctor.OWN_FORWARD]
    commit = re.search("commit ([0-9a-f]+)", cost)[1]
    found = {
        (peer, row["metric"]): float(row["p50"])
        for row in rows
        for peer in ("ours", "bnb")
        if (row["commit"], row["name"]) == (commit, "qwen3-30b-a3b")
        and row["setting"] == f"tokens=4096 r=16 peer={peer} nf4+double bf16"
    }
    numbers = [float(text.replace(",", "")) for text in re.findall(r"([\d,]+) MiB", cost)]
    assert numbers == [round(found[peer, "kept"]) for peer in ("bnb", "ours")]
    ratio = found["bnb", "step"] / found["ours", "step"]
    assert f"{ratio:.1f} times" in cost


# Devices


@pytest.mark.parametrize("name", GPUS)
def test_every_card_that_is_known(name):
    device, card = report.named(name)
    assert device.capability == ".".join(map(str, card.capability))
    fast = card.capability >= (8, 0)
    assert ("quantized matmul" in device.few_tokens) == fast
    assert ("grouped matmul" in device.many_tokens) == fast
    assert ("Hopper" in device.few_tokens) == (name in ("H100", "H200"))
    assert ("torch grouped" in device.many_tokens) == (name in ("H100", "H200", "B200"))


@pytest.mark.parametrize(
    ("name", "message"),
    [("4091", "did you mean 4090"), ("A100", "A100-80GB"), ("24GiB", "no card")],
)
def test_no_card(name, message):
    with pytest.raises(moe_qlora.ConfigError, match=message) as caught:
        moe_qlora.doctor(gpu=name)
    assert str(caught.value).startswith("gpu: ")


def test_a_card_says_with_what_settings_it_holds_a_step(stock_fit, monkeypatch):
    """They are the best of a plan; without a GPU or a model there are none."""
    monkeypatch.setattr(doctor, "_fit", stock_fit)
    plain = config()
    diagnosis = moe_qlora.doctor(plain, BF16, gpu="H100")
    said = diagnosis.fit
    made = moe_qlora.plan(plain, BF16, gpus="H100")
    assert said.startswith("H100 holds a training step (1 x 4,096 tokens, LoRA on attention,exp")
    fit = plan(plain, BF16, gpus="H100", search=False, **made.best.values()).fit
    assert f"{made.best}. With moe_qlora.fit_memory {fit}.\n" in said
    assert f"--gpus H100 {made.best.options}\n" in said and "experts=True" in said
    assert moe_qlora.doctor(gpu="H100").fit == ""
    assert str(diagnosis).startswith(said)
    large = {"num_hidden_layers": 8, "num_experts": 512, "hidden_size": 2048}
    large |= {"moe_intermediate_size": 2048, "device": "meta"}
    said = moe_qlora.doctor(tiny_model("qwen3_moe", **large).config, BF16, gpu="T4").fit
    assert "of host memory" in said and "--offload" in said
    large["num_hidden_layers"], large["vocab_size"] = 2, 10_000_000
    said = moe_qlora.doctor(tiny_model("qwen3_moe", **large).config, BF16, gpu="T4").fit
    assert said.startswith("T4 holds no training step of it: It does not fit as asked")


def test_no_rank():
    with pytest.raises(moe_qlora.ConfigError, match="rank is 0"):
        moe_qlora.doctor(rank=0)


# Combinations

CPU = Device("CPU", None, "", True, "", "")
H100, HOPPER = report.named("H100")
T4, TURING = report.named("T4")


def found(installed: dict, device: Device, card: Card, model_type=None, kinds=()) -> list[str]:
    texts = {name: report.release_of(text) for name, text in installed.items()}
    result = doctor.known_problems(texts, device, card, model_type, kinds)
    assert all(finding.what.endswith(".") and finding.cure for finding in result)
    return [f"{finding.severity}: {finding.what}" for finding in result]


@pytest.mark.parametrize(
    ("installed", "model_type", "expected"),
    [
        ({"liger-kernel": "0.8.5", "transformers": "5.23.0"}, "qwen3_vl_moe", "problem: Liger"),
        ({"liger-kernel": "0.8.5", "transformers": "5.23.0"}, None, "warning: Liger"),
        ({"liger-kernel": "0.8.5", "transformers": "5.23.0"}, "qwen3_moe", None),
        ({"liger-kernel": "0.8.5", "transformers": "5.22.0"}, "qwen3_vl_moe", None),
        ({"liger-kernel": "0.8.5", "transformers": "5.24.0"}, "qwen3_vl_moe", None),
        ({"liger-kernel": "0.8.5", "transformers": "5.24.0"}, "glm4v_moe", "problem: Liger"),
        ({"liger-kernel": "0.9.0", "transformers": "5.23.0"}, "qwen3_vl_moe", None),
        ({"torch": "2.11.0+cu128"}, None, "warning: fully_shard of torch 2.11.0"),
        ({"torch": "2.13.0"}, None, None),
        ({}, None, None),
    ],
)
def test_known_combinations(installed, model_type, expected):
    texts = found(installed, H100, HOPPER, model_type)
    assert len(texts) == (expected is not None)
    assert expected is None or texts[0].startswith(expected)


def test_ligers_failure_is_real(monkeypatch):
    """The error that is named, in the versions that are installed."""
    pytest.importorskip("liger_kernel")
    liger, host = (report.installed_version(n) for n in ("liger-kernel", "transformers"))
    for model_type in ("qwen3_vl_moe", "qwen3_5_moe", "glm4v_moe"):
        said = found({"liger-kernel": liger, "transformers": host}, H100, HOPPER, model_type)
        module = f"liger_kernel.transformers.model.{model_type}"
        # Tests of Liger import it beside classes that they make up.
        monkeypatch.delitem(sys.modules, module, raising=False)
        with pytest.raises(ImportError) if said else contextlib.nullcontext():
            importlib.import_module(module)


def test_devices_that_fall_back(monkeypatch):
    assert "needs 8.0" in found({}, T4, TURING)[0].replace("need 8.0", "needs 8.0")
    slow = LayerKind(
        "a", 3, "A", "reference loop", "b is to be computed in torch.float32", False, ""
    )
    assert found({}, H100, HOPPER, None, [slow, slow])[0].startswith("warning: 6 expert layers")
    assert len(found({}, T4, TURING, None, [slow])) == 1
    monkeypatch.setattr(doctor, "has_triton", lambda: False)
    assert found({}, H100, HOPPER)[0].startswith("problem: Triton is not installed")


def test_a_torch_that_does_not_see_the_gpu(monkeypatch, tmp_path):
    driver = tmp_path / "version"
    monkeypatch.setattr(doctor, "_DRIVER", driver)
    cpu = Card("", (0, 0), 0)
    assert found({}, CPU, cpu) == []
    driver.write_text("NVRM version")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "is built without CUDA" in found({}, CPU, cpu)[0]
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "sees no GPU" in found({}, CPU, cpu)[0]
    assert found({}, H100, HOPPER) == []


# The command


@pytest.fixture
def steady(monkeypatch):
    """Versions and devices that are the same on every machine."""
    rows = (Package("torch", "2.13.0", "2.11 to 2.13", "tested"),)
    monkeypatch.setattr(report, "packages", lambda: rows)


def test_the_command(cli, steady, tmp_path, monkeypatch):
    config(**WIDE).save_pretrained(tmp_path)
    code, out, err = cli("doctor", tmp_path, "--gpu", "H100")
    assert (code, err) == (0, "")
    assert "fused layer" in out and "0 problems" in out
    code, out, err = cli("doctor", tmp_path, "--gpu", "H100", "--json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert report["good"] and report["device"]["capability"] == "9.0"
    assert [layer["backend"] for layer in report["layers"]] == ["fused layer"]
    monkeypatch.setattr(doctor, "has_triton", lambda: False)
    code, out, err = cli("doctor", "--gpu", "H100")
    assert (code, err) == (1, "")
    assert "problem: Triton is not installed" in " ".join(out.split())
    assert cli("doctor", "--gpu", "H101")[0] == 2
    assert cli("doctor", tmp_path / "gone")[0] == 2


def test_the_text_of_a_diagnosis(steady):
    text = str(moe_qlora.doctor(gpu="H100"))
    assert "H100: torch grouped matmul" in text
    assert "torch 2.13.0: tested" in text
