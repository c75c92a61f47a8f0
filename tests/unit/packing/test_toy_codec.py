"""A codec from outside the package: two bits a weight, registered by one call, in every use."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig
from safetensors.torch import load_file
from small_models import fill
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import moe_qlora
from moe_qlora import get_peft_model, quantize_experts
from moe_qlora.checkpoint.verify import verify
from moe_qlora.errors import ConfigError, MoeQloraError
from moe_qlora.kernels.weights import PackedWeight
from moe_qlora.packing import codecs, parametrize
from moe_qlora.packing.codecs import Codec, register
from moe_qlora.packing.settings import CodecSettings
from moe_qlora.testing import tiny_model

BLOCK, KIND = 32, "two_bits"


class TwoBits(Codec):
    """Codes 0 to 3 stand for -1, -1/3, 1/3 and 1 times the absmax of a block of 32."""

    kind, bits, blocksize, scales = KIND, 2, BLOCK, ".block_absmax"

    def quantize(self, weights: Tensor, unit: int) -> tuple[Tensor, Tensor]:
        blocks = F.pad(weights.float(), (0, -len(weights) % unit)).view(-1, unit)
        absmax = blocks.abs().amax(1)
        levels = blocks / absmax.clamp_min(1e-30)[:, None] * 1.5 + 1.5
        codes = levels.round().clamp(0, 3).to(torch.uint8).view(-1, 4)
        packed = codes[:, 0] | codes[:, 1] << 2 | codes[:, 2] << 4 | codes[:, 3] << 6
        return packed[: -(-len(weights) // 4)], absmax

    def decode(self, packed: PackedWeight, first: int, last: int) -> Tensor:
        begin, end = first // BLOCK, -(-last // BLOCK)
        raw = packed.codes.detach().view(-1)[begin * BLOCK // 4 : end * BLOCK // 4]
        codes = torch.stack([(raw >> shift) & 3 for shift in (0, 2, 4, 6)], 1).view(-1)
        scales = packed.absmax[begin:end].repeat_interleave(BLOCK)[: len(codes)]
        flat = (codes.float() - 1.5) / 1.5 * scales
        return flat[first - begin * BLOCK : last - begin * BLOCK].to(packed.dtype)


def rounded(weight: Tensor) -> Tensor:
    """What a weight is after packing: the nearest of four levels."""
    blocks = weight.double().view(-1, BLOCK, 1)
    levels = torch.tensor([-1, -1 / 3, 1 / 3, 1]).double() * blocks.abs().amax(1, keepdim=True)
    nearest = (blocks - levels).abs().argmin(-1)
    return levels.squeeze(1).gather(1, nearest).view(weight.shape).to(weight.dtype)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs, "_codecs", dict(codecs._codecs))
    register(TwoBits())


def config(**settings: Any) -> BitsAndBytesConfig:
    """Experts in two bits; Linear layers, which bitsandbytes packs, are left plain."""
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=KIND,
        llm_int8_skip_modules=["lm_head", r".*\.self_attn"],
        **settings,
    )


def plain_model() -> Any:
    return tiny_model("qwen3_moe", dtype=torch.float32)


def packed_model() -> Any:
    model = plain_model()
    quantize_experts(model, config())
    return model


def reference_model() -> Any:
    """The plain model, whose expert weights are what packing makes of them."""
    model = plain_model()
    for param in moe_qlora.detect(model).experts:
        weight = model.get_parameter(param.name)
        weight.data = rounded(weight.data)
    return model


def assert_equals_reference(model: Any) -> None:
    expected = reference_model()
    packed = {f"{owner}.{name}" for owner, _, name in parametrize.iter_packed(model)}
    assert packed == {param.name for param in moe_qlora.detect(expected).experts}
    for name in packed:
        module, leaf = parametrize.owner_of(model, name)
        torch.testing.assert_close(getattr(module, leaf), expected.get_parameter(name).data)


def lora(model: Any) -> Any:
    names = ["gate_up_proj", "down_proj"]
    adapter = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=names)
    return fill(get_peft_model(model, adapter, unpacked_ok=True))


def test_a_built_model_is_packed_and_seen_as_packed():
    model = packed_model()
    assert_equals_reference(model)
    experts = moe_qlora.detect(model).experts
    assert {param.packed for param in experts} == {KIND}
    assert model.is_loaded_in_4bit and not model.is_loaded_in_8bit
    saved = sum(param.numel for param in experts) * (4 - (1 / 4 + 4 / BLOCK))
    assert model.get_memory_footprint() == plain_model().get_memory_footprint() - saved
    with pytest.raises(ConfigError, match=f"packed as {KIND}"):
        quantize_experts(model, BitsAndBytesConfig(load_in_4bit=True))
    assert_equals_reference(moe_qlora.prepare_sharding(deepcopy(model)))


def test_folders_are_saved_reloaded_verified_and_merged(tmp_path: Path):
    plain_model().save_pretrained(tmp_path / "plain")
    model = packed_model()
    model.save_pretrained(tmp_path / "built")
    plan = moe_qlora.plan(tmp_path / "plain", config())
    assert plan.kind == KIND and plan.resident == model.get_memory_footprint()
    with moe_qlora.enabled():
        loaded = AutoModelForCausalLM.from_pretrained(
            tmp_path / "plain", quantization_config=config(), dtype=torch.float32
        )
    assert_equals_reference(loaded)
    moe_qlora.quantize_checkpoint(tmp_path / "plain", tmp_path / "packed", config())
    report = verify(tmp_path / "packed", tmp_path / "plain")
    assert report.good and report.kind == KIND and report.experts == len(report.errors) > 0
    for folder in ("built", "packed"):
        with moe_qlora.enabled():
            assert_equals_reference(AutoModelForCausalLM.from_pretrained(tmp_path / folder))
    lora(model).save_pretrained(tmp_path / "adapter")
    moe_qlora.merge_adapter(tmp_path / "packed", tmp_path / "adapter", tmp_path / "merged")
    lora(reference_model()).merge_and_unload().save_pretrained(tmp_path / "expected")
    merged, expected = (
        load_file(tmp_path / one / "model.safetensors") for one in ("merged", "expected")
    )
    torch.testing.assert_close(merged, expected, rtol=1e-4, atol=1e-5)


def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    plain_model().save_pretrained(tmp_path / "plain")
    packed_model().save_pretrained(tmp_path / "packed")
    asked = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=KIND)
    wanted = r"q_proj would be packed by bitsandbytes, which does not know .*'two_bits'"
    with moe_qlora.enabled(), pytest.raises(ConfigError, match=wanted):
        AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=asked)
    with pytest.raises(ValueError, match="registered already"):
        register(TwoBits())
    with pytest.raises(ConfigError, match=r"knows 'nf4', 'fp4' and 'two_bits'"):
        CodecSettings.from_config({"load_in_4bit": True, "bnb_4bit_quant_type": "three_bits"})
    monkeypatch.delitem(codecs._codecs, KIND)
    with moe_qlora.enabled(), pytest.raises(MoeQloraError, match="two_bits"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
