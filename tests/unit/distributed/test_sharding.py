"""The layout in which every tensor of a packed weight is a parameter; loads in distributed runs.

FSDP2 of a torch before 2.13: its two faults are put back here.
"""

import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.fsdp._fully_shard._fsdp_param as fsdp_param
from bitsandbytes.nn import Linear4bit, Linear8bitLt, Params4bit
from torch import distributed, nn
from torch._dynamo.testing import CompileCounter
from torch.distributed.device_mesh import init_device_mesh
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
from moe_qlora.train.layers import LayerRunner, decoder_layers
from tests.helpers import training


def packed(settings="nf4"):
    sizes = {"hidden_size": 48, "moe_intermediate_size": 40}
    return training.packed("qwen3_moe", training.SETTINGS[settings], seed=0, **sizes)


def experts(model):
    """Each packed weight: its module, its name, and what it decodes to."""
    found = parametrize.iter_packed(model)
    return [(m, n, unpack(parametrize.read_packed(m, n))) for _, m, n in found]


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(10, 21)[None]).logits


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


@pytest.mark.parametrize("settings", ["nf4", "fp4", "bf16 storage", "int8"])
def test_the_layout_changes_parameters_and_nothing_else(settings):
    model = packed(settings)
    before, weights = logits(model), experts(model)
    kinds = [param.packed for param in moe_qlora.detect(model).experts]
    assert set(kinds) == {settings.replace("bf16 storage", "nf4")}
    copies = copy.deepcopy(model)
    assert moe_qlora.prepare_sharding(copies) is copies
    assert [param.packed for param in moe_qlora.detect(copies).experts] == kinds
    for again in (copies, copy.deepcopy(copies)):
        assert torch.equal(logits(again), before)
        for (*_, weight), (module, name, decoded) in zip(weights, experts(again), strict=True):
            assert torch.equal(decoded, weight) and torch.equal(getattr(module, name), weight)
            chain = parametrize.parametrization_list(module, name)
            for parameter in chain.parameters():
                assert not parameter.is_floating_point() and not parameter.requires_grad
                assert type(parameter).__name__ != "Params4bit"
            assert not list(chain.buffers()) or "tables" in dict(chain.named_buffers()).popitem()[0]
    nn.Module.float(nn.Module.half(copies))
    module, name, decoded = experts(copies)[-1]
    assert torch.equal(decoded, weights[-1][2])
    codes = parametrize.original_of(module, name)
    assert isinstance(codes, Params4bit) is (settings != "int8")
    if settings != "int8":  # codes that are cast all the same are an error
        codes.data = codes.data.to(torch.int16)
        with pytest.raises(QuantizationError, match=r"cast from torch\.uint8 to torch\.int16"):
            parametrize.read_packed(module, name)


def test_a_weight_of_two_modules_is_laid_out_once():
    _, module, name = next(parametrize.iter_packed(packed()))
    tied, weight = nn.ModuleList([nn.Module(), nn.Module()]), parametrize.read_packed(module, name)
    weight.owner = None
    for part in tied:
        parametrize.attach(part, "w", weight)
    moe_qlora.prepare_sharding(tied)
    assert len(list(tied.parameters())) == 3


class Partitioned(dict):
    """A module's parameters as ZeRO-3 has them: whole where they are read by name, else empty."""

    def __init__(self, module, gathered):
        self.whole, self.gathered = dict(module._parameters), gathered
        shares = {name: nn.Parameter(torch.empty(0), requires_grad=False) for name in self.whole}
        for share in shares.values():
            vars(share)["ds_id"] = 0
        super().__init__(shares)

    def __getitem__(self, name):
        self.gathered.append(name)
        return self.whole[name]


def test_what_a_forward_reads_is_gathered_and_the_first_line_reads_nothing():
    """One rank alone says the line: others would wait for what it gathers."""
    model = packed()
    weights = experts(model)
    moe_qlora.prepare_sharding(model)
    gathered = []
    for module, name, _ in weights:
        for part in parametrize.parametrization_list(module, name).modules():
            if part._parameters:
                part._parameters = Partitioned(part, gathered)

    def stop(*_):
        raise InterruptedError

    model.train().register_forward_pre_hook(stop)
    with pytest.raises(InterruptedError):
        model(input_ids=torch.arange(3)[None])
    assert not gathered
    for (*_, weight), (*_, decoded) in zip(weights, experts(model), strict=True):
        assert torch.equal(decoded, weight)
    assert gathered


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
def test_linear_layers(form):
    torch.manual_seed(0)
    layer = Linear4bit(96, 80, True, *form) if form else None
    stock = nn.Sequential(layer or Linear8bitLt(96, 80, has_fp16_weights=False))
    stock.load_state_dict({"0.weight": torch.randn(80, 96), "0.bias": torch.randn(80)})
    stock.to("cpu")
    x = torch.randn(7, 96, requires_grad=True)
    expected = stock(x)
    (gradient,) = torch.autograd.grad(expected.sum(), x)
    model = moe_qlora.prepare_sharding(copy.deepcopy(stock))
    assert type(model[0]) is (ShardableLinear8bit if form is None else ShardableLinear4bit)
    for again in (model, copy.deepcopy(model)):
        out = again(x)
        assert out.dtype == expected.dtype and torch.equal(out, expected)
        assert torch.equal(torch.autograd.grad(out.sum(), x)[0], gradient)
        assert [n for n, p in again.named_parameters() if p.is_floating_point()] == ["0.bias"]


@pytest.mark.filterwarnings("ignore")  # rounding, of stock PEFT
def test_adapters_merge_as_in_a_single_process(tmp_path):
    tiny_model("qwen3_moe", hidden_size=64, moe_intermediate_size=40).save_pretrained(tmp_path)
    results = []
    for prepare in (False, True):
        model = training.adapted(training.loaded(tmp_path))
        if prepare:
            moe_qlora.prepare_sharding(model)
        results.append([logits(model)])
        model.merge_adapter()
        results[-1].append(logits(model))
        model.unmerge_adapter()
        results[-1].append(logits(model.merge_and_unload()))
    for single, shardable in zip(*results, strict=True):
        assert torch.equal(single, shardable)
    assert not torch.equal(results[0][0], results[0][1])


@pytest.fixture
def mesh():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


@pytest.fixture
def older_torch(monkeypatch):
    class Parameter(nn.Parameter):
        def __new__(cls, data=None, requires_grad=True):
            return nn.Parameter(data, requires_grad)  # gradients, of integers too

    def init_dtype_attrs(self, policy):
        self.orig_dtype, self.reduce_dtype = self.sharded_param.dtype, None
        self.param_dtype = policy.param_dtype  # integers' too

    monkeypatch.setattr(torch, "__version__", "2.12.0")
    monkeypatch.setattr(fsdp_param, "nn", SimpleNamespace(**{**vars(nn), "Parameter": Parameter}))
    monkeypatch.setattr(fsdp_param.FSDPParam, "init_dtype_attrs", init_dtype_attrs)


def logits_under_fsdp2(mesh):
    """What a packed model gives under FSDP2 in bf16."""
    model = moe_qlora.prepare_sharding(training.packed())
    sharding.shard_model(model, mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    return model(input_ids=torch.arange(24).view(2, 12)).logits.detach()


def test_codes_are_gathered_as_they_are(mesh, request):
    wanted = logits_under_fsdp2(mesh)
    request.getfixturevalue("older_torch")
    stock = fsdp_param.FSDPParam.__init__
    assert torch.equal(logits_under_fsdp2(mesh), wanted)
    assert fsdp_param.FSDPParam.__init__ is stock


def test_rank_3_does_not_load_to_the_first_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(distributed, "get_node_local_rank", lambda fallback_rank: 3)
    for is_distributed, current, devices, own in (
        (True, 0, 4, 3),
        (False, 0, 4, None),
        (True, 2, 4, None),  # the program has set one
        (True, 0, 1, None),  # each rank sees its own device alone
    ):
        monkeypatch.setattr(ranks, "runs_distributed", lambda one=is_distributed: one)
        monkeypatch.setattr(torch.cuda, "current_device", lambda one=current: one)
        monkeypatch.setattr(torch.cuda, "device_count", lambda one=devices: one)
        assert ranks.own_device() == own


def test_what_packed_experts_do_not_support_is_refused():
    RankLoad(DistributedConfig()).begin(dict)
    assert RankLoad(SimpleNamespace(fsdp_size=2)).shards  # of an older transformers
    for field in ("tp_size", "pp_size", "ep_size"):
        with pytest.raises(ConfigError, match=f"distributed_config has {field}=2, .*by FSDP2 with"):
            RankLoad(SimpleNamespace(**{field: 2})).begin(dict)


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_both_layers_share_one_compilation(tmp_path, monkeypatch):
    """A value of one layer in compiled code, such as a name, would be a compilation for each."""
    made = CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=made))
    tiny_model("qwen3_moe", hidden_size=128).save_pretrained(tmp_path)
    with moe_qlora.enabled():
        config = BitsAndBytesConfig(load_in_4bit=True)
        model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config).train()
    compiled = []
    for layer in decoder_layers(sharding.prepare_sharding(model)).values():
        runner = LayerRunner(layer, compiles=True)
        runner.level, runner.promised = "keep", (1, 64)
        model(inputs_embeds=torch.randn(1, 17, 128, requires_grad=True)).logits.sum().backward()
        compiled.append(made.frame_count)
    assert 0 < compiled[0] == compiled[1]
