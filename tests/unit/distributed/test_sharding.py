"""The layout in which every tensor of a packed weight is a parameter."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.nn import Linear4bit, Linear8bitLt, Params4bit
from peft import LoraConfig
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import moe_qlora
from moe_qlora.distributed.sharding import ShardableLinear4bit, ShardableLinear8bit
from moe_qlora.errors import QuantizationError
from moe_qlora.packing import parametrize
from moe_qlora.packing.codec import unpack
from moe_qlora.packing.decoders import read_linear
from moe_qlora.testing import tiny_model
from tests.helpers.training import NF4, loaded

SETTINGS: dict[str, dict[str, Any]] = {
    "nf4 double": NF4,
    "fp4 stored as bf16": {"load_in_4bit": True, "bnb_4bit_quant_storage": torch.bfloat16},
    "nf4 double stored as fp32": {**NF4, "bnb_4bit_quant_storage": torch.float32},
    "int8": {"load_in_8bit": True},
}


def packed(settings: str) -> Any:
    config = BitsAndBytesConfig(**SETTINGS[settings])
    model = tiny_model("qwen3_moe", seed=0, hidden_size=48, moe_intermediate_size=40)
    moe_qlora.quantize_experts(model, config)
    return model


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        output: Tensor = model.eval()(input_ids=torch.arange(10, 21)[None]).logits
    return output


def zeroed(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        parameter.data.zero_()
    return model


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("first", ["packing", "evaluation"])
def test_evaluation_leaves_linear_layers_as_they_were(
    tmp_path: Path, double: bool, first: str
) -> None:
    """Also on CPUs with AVX512-BF16, for which bitsandbytes turns codes around in evaluation."""
    tiny_model("qwen3_moe", hidden_size=128).save_pretrained(tmp_path)
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=double)

    def load() -> Any:
        # This one packs Linear layers only, and leaves them to bitsandbytes
        return AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config).eval()

    untouched, model = load(), load()
    if first == "evaluation":
        logits(model)
    for each in (untouched, model):
        moe_qlora.quantize_experts(each)
    logits(model)
    layers = [layer for layer in model.modules() if isinstance(layer, Linear4bit)]
    others = [layer for layer in untouched.modules() if isinstance(layer, Linear4bit)]
    for layer, other in zip(layers, others, strict=True):
        assert torch.equal(layer.weight.data, other.weight.data)
        weights = [unpack(read_linear(each)) for each in (layer, other)]
        # bitsandbytes keeps no more of absmax than bf16 where it was before us
        tolerance = 0.0 if first == "packing" else 0.02
        torch.testing.assert_close(*weights, rtol=tolerance, atol=tolerance / 10)
    embedded = torch.randn(1, 3, 128, requires_grad=True)
    model.train()(inputs_embeds=embedded).logits.sum().backward()
    assert embedded.grad is not None and bool(embedded.grad.any())


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_layout_changes_parameters_and_nothing_else(settings: str) -> None:
    model = packed(settings)
    before, count = logits(model), model.num_parameters()
    kinds = [param.packed for param in moe_qlora.detect(model).experts]
    assert set(kinds) == {settings.split(maxsplit=1)[0]}
    weights = [unpack(parametrize.read_packed(m, n)) for _, m, n in parametrize.iter_packed(model)]
    _, module, name = next(parametrize.iter_packed(copy.deepcopy(model)))
    tied, weight = nn.ModuleList([nn.Module(), nn.Module()]), parametrize.read_packed(module, name)
    weight.owner = None
    for part in tied:
        parametrize.attach(part, "w", weight)
    moe_qlora.prepare_sharding(tied)
    assert len(list(tied.parameters())) == (3 if "double" in settings else 2)
    copies = copy.deepcopy(model)
    assert moe_qlora.prepare_sharding(copies) is copies
    names = [name for name, _ in copies.named_parameters()]
    moe_qlora.prepare_sharding(copies)
    assert [name for name, _ in copies.named_parameters()] == names
    assert [param.packed for param in moe_qlora.detect(copies).experts] == kinds
    for again in (copies, copy.deepcopy(copies)):
        assert torch.equal(logits(again), before)
        assert again.num_parameters() == count
        for weight, (_, module, name) in zip(weights, parametrize.iter_packed(again), strict=True):
            assert torch.equal(unpack(parametrize.read_packed(module, name)), weight)
            assert torch.equal(getattr(module, name), weight)
            chain = parametrize.parametrization_list(module, name)
            for parameter in chain.parameters():
                assert not parameter.is_floating_point()
                assert not parameter.requires_grad
                assert type(parameter).__name__ != "Params4bit"
            assert not list(chain.buffers()) or "tables" in dict(chain.named_buffers()).popitem()[0]
    nn.Module.float(nn.Module.half(copies))
    for weight, (_, module, name) in zip(weights, parametrize.iter_packed(copies), strict=True):
        assert torch.equal(getattr(module, name), weight)
    codes = parametrize.original_of(module, name)
    assert isinstance(codes, Params4bit) is (settings != "int8")
    if settings != "int8":  # codes that are cast all the same are an error
        codes.data = codes.data.to(torch.int16)
        with pytest.raises(QuantizationError, match=r"cast from torch\.uint8 to torch\.int16"):
            parametrize.read_packed(module, name)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("assign", [False, True])
def test_either_layout_loads_the_state_dict_of_the_other(settings: str, assign: bool) -> None:
    model = packed(settings)
    before, compact = logits(model), model.state_dict()
    shardable = moe_qlora.prepare_sharding(copy.deepcopy(model)).state_dict()
    assert compact.keys() != shardable.keys()
    for state_dict in (compact, shardable):
        for prepare in (False, True):
            target = packed(settings)
            target = moe_qlora.prepare_sharding(target) if prepare else target
            result = zeroed(target).load_state_dict(dict(state_dict), assign=assign)
            assert not result.missing_keys
            assert not result.unexpected_keys
            assert torch.equal(logits(target), before)


# compute dtype, double quantization, kind, storage dtype
LINEARS = {
    "uint8": (torch.float32, False, "nf4", torch.uint8),
    "bf16": (torch.float32, False, "nf4", torch.bfloat16),
    "double, uint8": (torch.float32, True, "nf4", torch.uint8),
    "double, bf16": (torch.bfloat16, True, "nf4", torch.bfloat16),
    "int8": None,
}


@pytest.mark.parametrize("kind", LINEARS)
def test_linear_layers(kind: str) -> None:
    torch.manual_seed(0)
    form: Any = LINEARS[kind]
    layer = Linear4bit(96, 80, True, *form) if form else None
    stock: Any = nn.Sequential(layer or Linear8bitLt(96, 80, has_fp16_weights=False))
    stock.load_state_dict({"0.weight": torch.randn(80, 96), "0.bias": torch.randn(80)})
    stock.to("cpu")
    x = torch.randn(7, 96, requires_grad=True)
    expected = stock(x)
    (gradient,) = torch.autograd.grad(expected.sum(), x)
    compact, is_int8 = stock.state_dict(), form is None
    model: Any = moe_qlora.prepare_sharding(copy.deepcopy(stock))
    assert type(model[0]) is (ShardableLinear8bit if is_int8 else ShardableLinear4bit)
    for again in (model, copy.deepcopy(model)):
        out = again(x)
        assert out.dtype == expected.dtype and torch.equal(out, expected)
        assert torch.equal(torch.autograd.grad(out.sum(), x)[0], gradient)
        assert [n for n, p in again.named_parameters() if p.is_floating_point()] == ["0.bias"]
    for state_dict in () if is_int8 else (compact, model.state_dict()):
        for target in (copy.deepcopy(stock), copy.deepcopy(model)):
            errors: list[str] = []
            entries = {key: value.clone() for key, value in state_dict.items()}
            zeroed(target)
            parametrize.load_linears(target, entries, "", False, errors)
            target.load_state_dict(entries)
            assert not errors
            assert torch.equal(target(x), expected)


@pytest.mark.parametrize("settings", SETTINGS)
def test_adapters_merge_as_in_a_single_process(tmp_path: Path, settings: str) -> None:
    tiny_model("qwen3_moe", hidden_size=64, moe_intermediate_size=40).save_pretrained(tmp_path)
    results = []
    for prepare in (False, True):
        model = loaded(tmp_path, SETTINGS[settings])
        torch.manual_seed(1)
        adapters = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        model = moe_qlora.get_peft_model(model, adapters, experts=True)
        if prepare:
            moe_qlora.prepare_sharding(model)
        before = logits(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # rounding, of stock PEFT
            model.merge_adapter()
            merged = logits(model)
            model.unmerge_adapter()
            whole = model.merge_and_unload()
        results.append((before, merged, logits(whole)))
    for single, shardable in zip(*results, strict=True):
        assert torch.equal(single, shardable)
    assert not torch.equal(results[0][0], results[0][1])
