"""The layout in which every tensor of a packed weight is a parameter; loads in distributed runs.

FSDP2 of a torch before 2.13: its two faults are put back here.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.fsdp._fully_shard._fsdp_param as fsdp_param
from bitsandbytes.nn import Linear4bit, Linear8bitLt, Params4bit
from peft import LoraConfig
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from transformers.distributed import DistributedConfig

import moe_qlora
from moe_qlora.distributed import ranks, sharding
from moe_qlora.distributed.load_sharded import RankLoad
from moe_qlora.distributed.sharding import ShardableLinear4bit, ShardableLinear8bit
from moe_qlora.errors import ConfigError, QuantizationError
from moe_qlora.packing import parametrize
from moe_qlora.packing.codec import unpack
from moe_qlora.testing import tiny_model
from tests.helpers.training import NF4, loaded

SETTINGS: dict[str, dict[str, Any]] = {
    "nf4 double": NF4,
    "fp4 stored as bf16": {"load_in_4bit": True, "bnb_4bit_quant_storage": torch.bfloat16},
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


def test_evaluation_leaves_linear_layers_as_they_were(tmp_path):
    """Also on CPUs with AVX512-BF16, for which bitsandbytes turns codes around in evaluation."""
    tiny_model("qwen3_moe", hidden_size=128).save_pretrained(tmp_path)
    config = BitsAndBytesConfig(load_in_4bit=True)
    untouched, model = (
        # Packs Linear layers only, and leaves them to bitsandbytes
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config).eval()
        for _ in range(2)
    )
    for each in (untouched, model):
        moe_qlora.quantize_experts(each)
    logits(model)
    layers = [layer for layer in model.modules() if isinstance(layer, Linear4bit)]
    others = [layer for layer in untouched.modules() if isinstance(layer, Linear4bit)]
    for layer, other in zip(layers, others, strict=True):
        assert torch.equal(layer.weight.data, other.weight.data)
    embedded = torch.randn(1, 3, 128, requires_grad=True)
    model.train()(inputs_embeds=embedded).logits.sum().backward()
    assert embedded.grad is not None and bool(embedded.grad.any())


class Partitioned(dict[str, Any]):
    """A module's parameters as ZeRO-3 has them: whole where they are read by name, else empty."""

    def __init__(self, module: nn.Module, gathered: list[str]) -> None:
        self.whole, self.gathered = dict(module._parameters), gathered
        shares = {name: nn.Parameter(torch.empty(0), requires_grad=False) for name in self.whole}
        for share in shares.values():
            vars(share)["ds_id"] = 0
        super().__init__(shares)

    def __getitem__(self, name: str) -> Any:
        self.gathered.append(name)
        return self.whole[name]


@pytest.mark.parametrize("settings", SETTINGS)
def test_what_a_forward_reads_is_gathered_and_the_first_line_reads_nothing(settings: str) -> None:
    """One rank alone says the line: others would wait for what it gathers."""
    model = packed(settings)
    weights = [unpack(parametrize.read_packed(m, n)) for _, m, n in parametrize.iter_packed(model)]
    moe_qlora.prepare_sharding(model)
    gathered: list[str] = []
    for _, module, name in parametrize.iter_packed(model):
        for part in parametrize.parametrization_list(module, name).modules():
            if part._parameters:
                part._parameters = Partitioned(part, gathered)

    def stop(*_: Any) -> None:
        raise InterruptedError

    model.train().register_forward_pre_hook(stop)
    with pytest.raises(InterruptedError):
        model(input_ids=torch.arange(3)[None])
    assert not gathered
    for weight, (_, module, name) in zip(weights, parametrize.iter_packed(model), strict=True):
        assert torch.equal(unpack(parametrize.read_packed(module, name)), weight)
    assert gathered


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_layout_changes_parameters_and_nothing_else(settings: str) -> None:
    model = packed(settings)
    before = logits(model)
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
    assert [param.packed for param in moe_qlora.detect(copies).experts] == kinds
    for again in (copies, copy.deepcopy(copies)):
        assert torch.equal(logits(again), before)
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


# compute dtype, double quantization, kind, storage dtype; int8
@pytest.mark.parametrize(
    "form",
    [
        (torch.float32, False, "nf4", torch.uint8),
        (torch.bfloat16, True, "nf4", torch.bfloat16),
        None,
    ],
    ids=str,
)
def test_linear_layers(form: Any) -> None:
    torch.manual_seed(0)
    layer = Linear4bit(96, 80, True, *form) if form else None
    stock: Any = nn.Sequential(layer or Linear8bitLt(96, 80, has_fp16_weights=False))
    stock.load_state_dict({"0.weight": torch.randn(80, 96), "0.bias": torch.randn(80)})
    stock.to("cpu")
    x = torch.randn(7, 96, requires_grad=True)
    expected = stock(x)
    (gradient,) = torch.autograd.grad(expected.sum(), x)
    model: Any = moe_qlora.prepare_sharding(copy.deepcopy(stock))
    assert type(model[0]) is (ShardableLinear8bit if form is None else ShardableLinear4bit)
    for again in (model, copy.deepcopy(model)):
        out = again(x)
        assert out.dtype == expected.dtype and torch.equal(out, expected)
        assert torch.equal(torch.autograd.grad(out.sum(), x)[0], gradient)
        assert [n for n, p in again.named_parameters() if p.is_floating_point()] == ["0.bias"]


@pytest.mark.parametrize("settings", ["nf4 double", "int8"])
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


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


@pytest.fixture
def older_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    class Parameter(nn.Parameter):
        def __new__(cls, data: Any = None, requires_grad: bool = True) -> Any:
            return nn.Parameter(data, requires_grad)  # gradients, of integers too

    def init_dtype_attrs(self: Any, policy: MixedPrecisionPolicy) -> None:
        self.orig_dtype, self.reduce_dtype = self.sharded_param.dtype, None
        self.param_dtype = policy.param_dtype  # integers' too

    monkeypatch.setattr(sharding, "_takes_integers", lambda: False)
    monkeypatch.setattr(fsdp_param, "nn", SimpleNamespace(**{**vars(nn), "Parameter": Parameter}))
    monkeypatch.setattr(fsdp_param.FSDPParam, "init_dtype_attrs", init_dtype_attrs)


def logits_under_fsdp2(mesh: DeviceMesh) -> Tensor:
    """What a packed model gives under FSDP2 in bf16."""
    model = tiny_model("qwen3_moe")
    moe_qlora.quantize_experts(model, BitsAndBytesConfig(load_in_4bit=True))
    moe_qlora.prepare_sharding(model)
    sharding.shard_model(model, mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    result: Tensor = model(input_ids=torch.arange(24).view(2, 12)).logits
    return result.detach()


def test_codes_are_gathered_as_they_are(mesh: DeviceMesh, request: pytest.FixtureRequest) -> None:
    wanted = logits_under_fsdp2(mesh)
    request.getfixturevalue("older_torch")
    stock = fsdp_param.FSDPParam.__init__
    assert torch.equal(logits_under_fsdp2(mesh), wanted)
    assert fsdp_param.FSDPParam.__init__ is stock


@pytest.mark.parametrize(
    ("distributed_run", "current", "local_rank", "devices", "own"),
    [
        (False, 0, 3, 4, None),
        (True, 0, 3, 4, 3),
        (True, 0, 0, 4, None),
        (True, 2, 3, 4, None),  # the program has set one
        (True, 0, 3, 1, None),  # each rank sees its own device alone
    ],
)
def test_ranks_do_not_all_load_to_the_first_device(
    monkeypatch, distributed_run, current, local_rank, devices, own
):
    monkeypatch.setattr(ranks, "runs_distributed", lambda: distributed_run)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(distributed, "get_node_local_rank", lambda fallback_rank: local_rank)
    assert ranks.own_device() == own


@pytest.mark.parametrize("field", ["tp_size", "pp_size", "ep_size"])
def test_what_packed_experts_do_not_support_is_refused(field):
    RankLoad(DistributedConfig()).begin(dict)
    assert RankLoad(SimpleNamespace(fsdp_size=2)).shards  # of an older transformers
    asked = SimpleNamespace(**{field: 2})
    with pytest.raises(ConfigError, match=f"distributed_config has {field}=2, .*by FSDP2 with"):
        RankLoad(asked).begin(dict)
