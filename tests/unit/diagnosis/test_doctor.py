"""The doctor: what it says of versions, devices and layers is what holds."""

import json
from dataclasses import asdict
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import BitsAndBytesConfig

import moe_qlora
from moe_qlora.diagnosis import doctor
from moe_qlora.diagnosis.doctor import Device, LayerKind, Package
from moe_qlora.experts.backend import choose_backend, read_call
from moe_qlora.kernels.cards import Card, of_capability
from moe_qlora.testing import tiny_model

BF16 = BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
)
FP32 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
WIDE = {"hidden_size": 64, "moe_intermediate_size": 64}


def config(model_type: str = "qwen3_moe", **sizes: int) -> Any:
    return tiny_model(model_type, dtype=torch.bfloat16, **sizes).config


CPU = Device("CPU", None, "", True, "", "")


@pytest.mark.parametrize(
    ("installed", "status", "severity"),
    [
        ("2.13.0+cpu", "tested", []),
        ("2.10.1", "too old", ["problem"]),
        ("2.16.0.dev20261122", "untested", ["warning"]),
        (None, "missing", ["problem"]),
    ],
)
def test_statuses_and_findings(monkeypatch, installed, status, severity):
    stock = doctor.installed_version
    monkeypatch.setattr(
        doctor, "installed_version", lambda name: installed if name == "torch" else stock(name)
    )
    rows = doctor.packages()
    assert next(row.status for row in rows if row.name == "torch") == status
    problems = doctor.known_problems(rows, CPU, Card("", (0, 0), 0))
    found = [one for one in problems if one.what.startswith("torch ")]
    assert [finding.severity for finding in found] == severity
    assert all(finding.cure for finding in found)


CASES: list[tuple[str, Any, dict[str, int]]] = [
    ("qwen3_moe", BF16, WIDE),
    ("qwen3_moe", FP32, WIDE),
    ("qwen3_moe", BF16, {"hidden_size": 64, "moe_intermediate_size": 36}),  # odd sizes
    ("gpt_oss", BF16, {}),
    ("qwen3_moe", BitsAndBytesConfig(load_in_8bit=True), WIDE),
]


@pytest.mark.parametrize(("model_type", "asked", "sizes"), CASES)
@pytest.mark.filterwarnings("ignore:.*is computed in float32")
def test_backends_are_those_of_a_forward(model_type, asked, sizes):
    model: Any = tiny_model(model_type, dtype=torch.bfloat16, **sizes)
    moe_qlora.quantize_experts(model, asked)
    for bias in (value for name, value in model.named_parameters() if name.endswith("_bias")):
        bias.requires_grad_(False)  # as PEFT does
    for gpu, card in ((None, None), ("4090", of_capability((8, 9)))):
        report = moe_qlora.doctor(config(model_type, **sizes), asked, gpu=gpu)
        chosen = set()
        for entry in moe_qlora.detect(model).modules:
            module = model.get_submodule(entry.name)
            x = torch.zeros(5, entry.parameters[0].in_features, dtype=torch.bfloat16)
            call = read_call(module, x)
            chosen.add(choose_backend(module, call if card is None else call._replace(card=card)))
        assert {(layer.backend, layer.reason) for layer in report.layers} == chosen
    for layer in report.layers:
        assert layer.fast == (layer.backend == "fused layer") == (not layer.cost)


SKIPPING = BitsAndBytesConfig(load_in_4bit=True, llm_int8_skip_modules=["experts"])
NOTHING = "Nothing to change: this model type has no faster path here."


@pytest.mark.parametrize(
    ("model_type", "asked", "backend", "cure"),
    [
        ("qwen3_moe", FP32, "reference loop", "Set bnb_4bit_compute_dtype to the dtype"),
        ("qwen3_moe", SKIPPING, "unpacked", "Look at llm_int8_skip_modules."),
        ("llama4_text", BF16, doctor.OWN_FORWARD, NOTHING),
    ],
)
def test_what_is_slow_has_a_cure(model_type, asked, backend, cure):
    report = moe_qlora.doctor(config(model_type), asked, gpu="4090")
    (layer,) = report.layers
    (finding,) = [finding for finding in report.findings if layer.reason in finding.what]
    assert (layer.backend, layer.fast) == (backend, False) and finding.cure.startswith(cure)


@pytest.mark.parametrize(("rank", "reason"), [(8, "suit its kernels"), (200, "over 128")])
def test_a_model_with_adapters_is_examined_as_it_is(rank, reason):
    model: Any = tiny_model("qwen3_moe", dtype=torch.bfloat16, **WIDE)
    moe_qlora.quantize_experts(model, BF16)
    config = LoraConfig(r=rank, target_modules=["q_proj"])
    peft_model = moe_qlora.get_peft_model(model, config, experts=True)
    for given in (peft_model, model):
        (layer,) = moe_qlora.doctor(given, gpu="H200").layers
        assert (layer.pattern, layer.count) == ("model.layers.*.mlp.experts", 2)
        assert reason in layer.reason
    with pytest.raises(moe_qlora.ConfigError, match="for a model without adapters"):
        moe_qlora.doctor(peft_model, BF16)


((H100, HOPPER),) = doctor.examined("H100")
((T4, TURING),) = doctor.examined("T4")


def found(device: Device, card: Card, layers=()) -> list[str]:
    result = doctor.known_problems((), device, card, layers)
    assert all(finding.what.endswith(".") and finding.cure for finding in result)
    return [f"{finding.severity}: {finding.what}" for finding in result]


def test_devices_that_fall_back(monkeypatch, tmp_path):
    assert "the kernels need 8.0" in found(T4, TURING)[0]
    why = "b is to be computed in torch.float32"
    slow = LayerKind("a", 3, "A", "reference loop", why, False, "")
    assert found(H100, HOPPER, [slow, slow])[0].startswith("warning: 6 expert layers")
    assert len(found(T4, TURING, [slow])) == 1
    monkeypatch.setattr(doctor.backends, "has_triton", lambda: False)
    assert found(H100, HOPPER)[0].startswith("problem: Triton, of the fused kernels, is not")
    monkeypatch.setattr(doctor, "_DRIVER", tmp_path / "version")
    cpu = Card("", (0, 0), 0)
    assert found(CPU, cpu) == []
    (tmp_path / "version").write_text("NVRM version")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "sees no GPU" in found(CPU, cpu)[0]


def test_the_command(cli, tmp_path, monkeypatch):
    row = Package("torch", "2.13.0", "2.11 to 2.13", "tested")
    monkeypatch.setattr(doctor, "packages", lambda: (row,))
    code, out, err = cli("doctor", "llama", "--gpu", "H100", "--json")
    report = json.loads(out)
    assert (code, err) == (0, "") and report["good"] and report["layers"] == []
    assert report["device"]["capability"] == "9.0"
    assert "The model has no experts." in report["notes"]
    assert report["packages"] == [asdict(row)]
    monkeypatch.setattr(doctor.backends, "has_triton", lambda: False)
    code, out, err = cli("doctor", "--gpu", "H100")
    assert (code, err) == (1, "")
    assert "problem: Triton" in out
    assert cli("doctor", tmp_path / "gone")[0] == 2
