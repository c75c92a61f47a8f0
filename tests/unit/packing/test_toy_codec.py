"""A codec from outside the package: two bits a weight, registered by one call, in every use."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from folders import tensors
from peft import LoraConfig
from small_models import fill
from torch import Tensor
from training import loaded, lora, packed

import moe_qlora
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


PACKED = {"load_in_4bit": True, "bnb_4bit_quant_type": KIND}
# Linear layers, which bitsandbytes packs, are left plain.
CONFIG = {**PACKED, "llm_int8_skip_modules": ["lm_head", r".*\.self_attn"]}


def reference_model() -> Any:
    """The plain model, whose expert weights are what packing makes of them."""
    model = tiny_model("qwen3_moe")
    for param in moe_qlora.detect(model).experts:
        weight = model.get_parameter(param.name)
        weight.data = rounded(weight.data)
    return model


def assert_equals_reference(model: Any) -> None:
    expected = reference_model()
    names = {f"{owner}.{name}" for owner, _, name in parametrize.iter_packed(model)}
    assert names == {param.name for param in moe_qlora.detect(expected).experts}
    for name in names:
        module, leaf = parametrize.owner_of(model, name)
        torch.testing.assert_close(getattr(module, leaf), expected.get_parameter(name).data)


def test_a_built_model_is_packed_and_seen_as_packed():
    model, footprint = packed(settings=CONFIG), tiny_model("qwen3_moe").get_memory_footprint()
    assert_equals_reference(model)
    experts = moe_qlora.detect(model).experts
    assert {param.packed for param in experts} == {KIND}
    assert model.is_loaded_in_4bit and not model.is_loaded_in_8bit
    saved = sum(param.numel for param in experts) * (4 - (1 / 4 + 4 / BLOCK))
    assert model.get_memory_footprint() == footprint - saved
    with pytest.raises(ConfigError, match=f"packed as {KIND}"):
        moe_qlora.quantize_experts(model, {"load_in_4bit": True})
    assert_equals_reference(moe_qlora.prepare_sharding(deepcopy(model)))


@pytest.mark.filterwarnings("ignore:.*experts of this model are not packed")
def test_folders_are_saved_reloaded_verified_and_merged(tmp_path: Path):
    tiny_model("qwen3_moe").save_pretrained(tmp_path / "plain")
    model = packed(settings=CONFIG)
    model.save_pretrained(tmp_path / "built")
    plan = moe_qlora.plan(tmp_path / "plain", CONFIG)
    assert plan.kind == KIND and plan.resident == model.get_memory_footprint()
    moe_qlora.quantize_checkpoint(tmp_path / "plain", tmp_path / "packed", CONFIG)
    report = verify(tmp_path / "packed", tmp_path / "plain")
    assert report.good and report.kind == KIND and report.experts == len(report.errors) > 0
    for folder, settings in (("plain", CONFIG), ("built", None), ("packed", None)):
        assert_equals_reference(loaded(tmp_path / folder, settings))
    fill(lora(model, "q_proj")).save_pretrained(tmp_path / "adapter")
    moe_qlora.merge_adapter(tmp_path / "packed", tmp_path / "adapter", tmp_path / "merged")
    names = [param.name for param in moe_qlora.detect(reference_model())]
    config = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=names)
    adapted = fill(moe_qlora.get_peft_model(reference_model(), config, unpacked_ok=True))
    adapted.merge_and_unload().save_pretrained(tmp_path / "expected")
    merged, expected = (tensors(tmp_path / name) for name in ("merged", "expected"))
    torch.testing.assert_close(merged, expected, rtol=1e-4, atol=1e-5)


def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tiny_model("qwen3_moe").save_pretrained(tmp_path / "plain")
    packed(settings=CONFIG).save_pretrained(tmp_path / "packed")
    wanted = r"q_proj would be packed by bitsandbytes, which does not know .*'two_bits'"
    with pytest.raises(ConfigError, match=wanted):
        loaded(tmp_path / "plain", PACKED)
    with pytest.raises(ValueError, match="registered already"):
        register(TwoBits())
    with pytest.raises(ConfigError, match=r"knows 'nf4', 'fp4' and 'two_bits'"):
        CodecSettings.from_config(PACKED | {"bnb_4bit_quant_type": "three_bits"})
    monkeypatch.delitem(codecs._codecs, KIND)
    with pytest.raises(MoeQloraError, match="two_bits"):
        loaded(tmp_path / "packed", None)
