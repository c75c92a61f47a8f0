"""Experts in host memory beside other tools, after failures, and moved in the middle of a step."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import moe_qlora
from moe_qlora import ConfigError
from moe_qlora.packing import parametrize
from moe_qlora.speed.offload import _Hosted
from moe_qlora.testing import tiny_model
from tests.helpers.delayed import Delayed, delayed
from tests.helpers.fitting import equal, fitted, hosted_tensors, least_memory, token_ids, train
from tests.helpers.fitting import with_lora as lora_on
from tests.helpers.plans import plan

CODECS: dict[str, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nf4 twice": {
        "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True,
    },
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "int8": {"load_in_8bit": True},
}  # fmt: skip


@pytest.fixture(autouse=True)
def devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Delayed]]:
    with delayed(monkeypatch) as made:
        yield made


def packed(codec: str = "nf4 twice", kind: str = "qwen3_moe", **sizes: Any) -> Any:
    model = tiny_model(kind, **({"num_hidden_layers": 4} | sizes))
    moe_qlora.quantize_experts(model, BitsAndBytesConfig(**CODECS[codec]))
    return model


def lists_of(model: Any) -> list[Any]:
    return [parametrize.parametrization_list(m, n) for _, m, n in parametrize.iter_packed(model)]


@pytest.mark.parametrize(
    ("kind", "codec"),
    [
        ("qwen3_moe", "nf4 twice"),
        pytest.param("gpt_oss", "int8", marks=pytest.mark.nightly),
    ],
)
def test_a_plan_and_the_doctor_are_those_of_the_resident_model(kind: str, codec: str) -> None:
    model = packed(codec, kind)
    plans = [plan(model, gpus="1TiB", search=False).as_dict()]
    findings = [moe_qlora.doctor(model).as_dict()]
    with moe_qlora.offload_experts(model):
        plans.append(plan(model, gpus="1TiB", search=False).as_dict())
        findings.append(moe_qlora.doctor(model).as_dict())
    assert plans[0] == plans[1] and findings[0] == findings[1]


@pytest.mark.parametrize("again", [None, 2, "hold", "gone", "late"])
def test_a_backward_after_another_move_computes_on_the_device(again: Any) -> None:
    """Also where all moved back meanwhile, or where they moved after the forward alone."""
    model = lora_on(packed())
    ids = token_ids(model)
    _, grads = train(copy.deepcopy(model), ids, 1)
    loss = model(input_ids=ids, labels=ids).loss
    off = moe_qlora.offload_experts(model)
    if again != "late":
        loss = model(input_ids=ids, labels=ids).loss
    if again == "hold":  # as fit_memory and its remove() do
        off.hold(0)
        off.hold(4)
    elif again != "late":
        off.remove()
        off = off if again == "gone" else moe_qlora.offload_experts(model, layers=again)
    before = off.copies
    loss.backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert found and all(torch.equal(grad, grads[name]) for name, grad in found.items())
    assert (off.copies > before) is (again not in ("gone", "late"))


def test_a_layer_that_does_not_fit_on_the_device_stays_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = lora_on(packed())
    ids = token_ids(model)
    resident = train(copy.deepcopy(model), ids, 1)
    off = moe_qlora.offload_experts(model)
    copied, calls = _Hosted.on_device, 0

    def on_device(self: _Hosted, device: torch.device) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:  # the second weight of the second layer that leaves
            raise torch.OutOfMemoryError("no room")
        return copied(self, device)

    with monkeypatch.context() as patch:
        patch.setattr(_Hosted, "on_device", on_device)
        with pytest.raises(torch.OutOfMemoryError):
            off.remove()
    assert [each.host is None for each in lists_of(model)] == [False] * 6 + [True] * 2
    assert len(off.layers) == 3
    assert equal(train(copy.deepcopy(model), ids, 1), resident)
    off.remove()
    assert not hosted_tensors(model) and off.host_nbytes == 0
    assert equal(train(model, ids, 1), resident)


@pytest.mark.parametrize("fails_at", [1, 3])
def test_an_interrupted_move_leaves_all_on_the_device(
    fails_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = lora_on(packed())
    ids = token_ids(model)
    resident = train(copy.deepcopy(model), ids, 1)
    write, calls, stores = _Hosted.write, 0, []

    def interrupted(self: _Hosted, store: Any) -> None:
        nonlocal calls
        calls += 1
        stores.append(store)
        if calls == fails_at:
            raise KeyboardInterrupt
        write(self, store)

    with monkeypatch.context() as patch:
        patch.setattr(_Hosted, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            moe_qlora.offload_experts(model)
    spans = [(s.tensor(0, 1).data_ptr(), s.nbytes) for s in stores]
    for each in lists_of(model):
        at = each.original.data_ptr()
        assert each.host is None and not any(a <= at < a + n for a, n in spans)
    with moe_qlora.offload_experts(model) as off:
        assert len(off.layers) == 4
        assert equal(train(model, ids, 1), resident)


@pytest.mark.parametrize("room", ["least", "all"])
def test_what_fit_memory_has_brought_is_still_the_same_offload(room: str) -> None:
    model = tiny_model("qwen3_moe", num_hidden_layers=5)
    with moe_qlora.enabled(offload=True):
        moe_qlora.quantize_experts(model, BitsAndBytesConfig(**CODECS["nf4"]))
    model = lora_on(model)
    memory = least_memory(model) if room == "least" else 1 << 40
    with fitted(model, memory) as fit:
        host = [layer.experts for layer in fit.layers].count("host")
        off = moe_qlora.offload_experts(model)
        assert len(off.layers) == host and (host == 5) == (room == "least")
        with pytest.raises(ConfigError, match=r"offload_experts\(model\) returns"):
            moe_qlora.offload_experts(model, layers=2)
    assert moe_qlora.offload_experts(model) is off and len(off.layers) == 5
    off.remove()
    assert not hosted_tensors(model)
    assert moe_qlora.offload_experts(model) is not off


def test_layers_that_a_step_does_not_reach_cost_no_copies(devices: list[Delayed]) -> None:
    sizes = {"thinker_config": {"text_config": {"num_hidden_layers": 6}}}
    model = packed(kind="qwen3_omni_moe", **sizes, num_hidden_layers=2)
    config = LoraConfig(r=2, target_modules=r".*thinker.*\.(q_proj|v_proj)")
    moe_qlora.get_peft_model(model, config, experts=False).train()
    thinker, ids = model.thinker, torch.randint(5, 60, (2, 9))
    with moe_qlora.offload_experts(model) as off:
        assert len(off.layers) == 8  # of the talker two
        for _ in range(3):
            before, missed = off.copies, devices[0].missed if devices else 0
            thinker(input_ids=ids, labels=ids).loss.backward()
        assert off.copies - before == 2 * 4 and devices[0].missed == missed
        with torch.no_grad():
            for _ in range(2):
                before, missed = off.copies, devices[0].missed
                thinker.eval()(input_ids=ids)
        assert off.copies - before == 6 and devices[0].missed == missed


def test_experts_on_disk_are_loaded_into_host_memory(tmp_path: Path) -> None:
    tiny_model("qwen3_moe").save_pretrained(tmp_path)
    settings = BitsAndBytesConfig(**CODECS["nf4"])
    with (
        pytest.warns(DeprecationWarning, match="'disk'.* is gone .*host memory"),
        moe_qlora.enabled(offload="disk"),
    ):
        model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=settings)
    assert "on host" in repr(model)
    with pytest.raises(ConfigError, match="give True or False"), moe_qlora.enabled(offload="ssd"):
        pass
    with pytest.raises(ConfigError, match="give True or False"):
        plan(model, gpus="1TiB", offload=1)


def test_a_load_under_zero3_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from moe_qlora.hf import quantizer

    tiny_model("qwen3_moe").save_pretrained(tmp_path)
    monkeypatch.setattr(quantizer, "is_deepspeed_zero3_enabled", lambda: True)
    settings = BitsAndBytesConfig(**CODECS["nf4"])
    with (
        moe_qlora.enabled(offload=True),
        pytest.raises(ConfigError, match=r"ZeRO-3.*offload_param"),
    ):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=settings)
