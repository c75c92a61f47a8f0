"""`prepare_training`: what it sets, in which order, and that nothing of it is left behind.

Without a GPU, tests take the model for one on CUDA; graphs then record nothing, and run no kernel.
"""

from __future__ import annotations

import importlib
import logging
import sys
from contextlib import contextmanager, nullcontext, suppress
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from peft import LoraConfig
from torch import nn
from transformers import BitsAndBytesConfig

import moe_qlora
from moe_qlora.errors import ConfigError
from moe_qlora.integrations import ExpertsHost
from moe_qlora.integrations.settings import PLUGIN
from moe_qlora.testing import requires_gpu, tiny_inputs, tiny_model
from moe_qlora.train import fit as speed_fit
from moe_qlora.train import graphs as speed_graphs
from moe_qlora.train import prepare
from moe_qlora.train.flat_rows import has_flat_rows
from moe_qlora.train.liger import apply_liger

BNB = BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
)
SIZES: dict[str, Any] = {"batch_size": 2, "seq_len": 12}


def adapted(model_type: str = "qwen3_moe", **options: Any) -> Any:
    model = tiny_model(model_type, **options)
    moe_qlora.quantize_experts(model, BNB)
    torch.manual_seed(1)
    config = LoraConfig(r=3, target_modules=["q_proj", "v_proj"])
    return moe_qlora.get_peft_model(model, config, experts=True).train()


def modeling_of(model: Any) -> Any:
    return importlib.import_module(type(model.get_base_model()).__module__)


def state(model: Any) -> Any:
    """Every attribute of every module, and of the module that defines the model's classes."""
    ours = {name: dict(vars(module)) for name, module in model.named_modules()}
    for held in ours.values():
        if held.get("_compiled_call_impl", 0) is None:  # as the class has it
            del held["_compiled_call_impl"]
    return ours, dict(vars(modeling_of(model)))


def layers_of(model: Any) -> list[Any]:
    return list(model.get_base_model().model.layers)


def is_ligers(method: Any) -> bool:
    return getattr(method, "__module__", "").startswith("liger_kernel.")


@pytest.fixture
def events(monkeypatch) -> list[str]:
    """What was called, with a stand-in of `fit_memory` that counts."""
    happened: list[str] = []

    class Fit:
        def __str__(self) -> str:
            return "2 of 2 layers keep their activations"

        def remove(self) -> None:
            happened.append("fit removed")

    def fit_memory(model: nn.Module, **sizes: Any) -> Fit:
        loss = "Liger's" if is_ligers(base_forward(model)) else "stock"
        happened.append(f"fit of {sizes} with {loss} loss")
        if sizes["memory"] == "1KiB":
            raise ConfigError("fit_memory: 7 bytes are missing.")
        return Fit()

    monkeypatch.setattr(speed_fit, "fit_memory", fit_memory)
    return happened


def base_forward(model: Any) -> Any:
    return model.get_base_model().forward


@pytest.fixture
def cuda(monkeypatch, events) -> list[str]:
    """Models are taken for models on CUDA; graphs replace forwards and record nothing."""
    make = speed_graphs.LayerGraphs

    def made(model: nn.Module, *, compiled: bool) -> Any:
        events.append(f"graphs, compiled={compiled}")
        graphs = make(model, compiled=compiled)
        remove = graphs.remove
        graphs.remove = lambda: (events.append("graphs removed"), remove())[1]
        return graphs

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr("torch._inductor.async_compile.maybe_warm_pool", lambda: None)
    monkeypatch.setattr(speed_graphs, "LayerGraphs", made)
    monkeypatch.setattr(prepare, "_is_on_cuda", lambda module: True)
    return events


@pytest.mark.parametrize("kind", ["Qwen3NextModel", "DiffusionGemmaEncoderTextModel"])
def test_rows_that_stay_apart_are_said(kind):
    model = tiny_model("qwen3_next" if "Qwen" in kind else "diffusion_gemma")
    with moe_qlora.prepare_training(model, **SIZES) as prepared:
        assert f"\nRows: each in its own shape; {kind}: it" in str(prepared)
    assert "flat rows" not in str(prepared)


def test_on_a_cpu_rows_are_flat_without_memory(events, caplog):
    model = adapted()
    before = state(model)
    with caplog.at_level(logging.INFO, "moe_qlora"):
        prepared = moe_qlora.prepare_training(model, **SIZES)
    assert "flat rows" in str(prepared) and "\n" not in str(prepared)
    assert [r.getMessage() for r in caplog.records if "prepare" in r.name] == [str(prepared)]
    assert has_flat_rows(model) and not events
    prepared.remove()
    assert state(model) == before


def test_on_a_cpu_memory_is_fitted():
    def attributes() -> set[tuple[str, str]]:
        modules = state(model)[0]
        return {(name, each) for name, held in modules.items() for each in held}

    model = adapted()
    model(**tiny_inputs(model.get_base_model()))  # which sets some
    before = attributes()
    with moe_qlora.prepare_training(model, **SIZES, memory="1GiB") as prepared:
        assert prepared.fit is not None and prepared.fit.memory == 1 << 30
        assert str(prepared).splitlines()[1:] == [f"Memory: {prepared.fit}."]
        assert [layer.activations for layer in prepared.fit.layers] == ["keep", "keep"]
        assert attributes() != before
    assert attributes() == before
    with pytest.raises(ConfigError, match="bytes are missing"):
        moe_qlora.prepare_training(model, **SIZES, memory="1KiB")
    assert attributes() == before


def test_the_order_is_liger_lora_graphs_fit_and_back(cuda, monkeypatch):
    pytest.importorskip("liger_kernel")
    model = adapted()
    before = state(model)
    prepared = moe_qlora.prepare_training(model, **SIZES)
    fit = "fit of {'batch_size': 2, 'seq_len': 12, 'memory': None} with Liger's loss"
    assert cuda == ["graphs, compiled=True", fit]
    assert str(prepared).splitlines() == [
        "Prepared for batches of 2 x 12 tokens.",
        "Liger: loss.",
        "LoRA: 4 layers with the same inputs in 2 products.",
        "torch.compile: 2 layers.",
        "CUDA graphs: 2 layers, recorded in the second step.",
        "Memory: 2 of 2 layers keep their activations.",
        prepare._YOURS,
    ]
    assert not any(is_ligers(m.forward) for layer in layers_of(model) for m in layer.modules())
    prepared.remove()
    assert cuda[2:] == ["fit removed", "graphs removed"] and state(model) == before
    prepared.remove()
    assert len(cuda) == 4


def test_a_second_call_replaces_the_first(cuda):
    model = adapted()
    before = state(model)
    first = moe_qlora.prepare_training(model, **SIZES)
    second = moe_qlora.prepare_training(model, batch_size=1, seq_len=64)
    assert cuda[2:4] == ["fit removed", "graphs removed"]
    first.remove()
    assert len(cuda) == 6
    second.remove()
    assert state(model) == before


def test_memory_that_is_too_small_leaves_the_model_as_it_was(cuda):
    model = adapted()
    before = state(model)
    with pytest.raises(ConfigError, match="7 bytes are missing"):
        moe_qlora.prepare_training(model, **SIZES, memory="1KiB")
    assert state(model) == before


def test_without_triton_liger_has_the_norms(cuda, monkeypatch):
    pytest.importorskip("liger_kernel")
    monkeypatch.setattr(prepare, "has_triton", lambda: False)
    model = adapted()
    before = state(model)
    with moe_qlora.prepare_training(model, **SIZES) as prepared:
        assert "Liger: loss, norms, rotary embedding." in str(prepared)
        assert "torch.compile: not used; Triton is not installed." in str(prepared)
        assert cuda[0] == "graphs, compiled=False"
        assert is_ligers(layers_of(model)[0].input_layernorm.forward)
    assert state(model) == before


def test_layers_that_will_be_sharded_are_compiled_alone(cuda, monkeypatch):
    model = adapted()
    before = state(model)
    monkeypatch.setattr(prepare, "_sharding", lambda model: "FSDP will shard the weights")
    with moe_qlora.prepare_training(model, **SIZES) as prepared:
        assert prepared.graphs is None and len(cuda) == 1
        assert "torch.compile: 2 layers.\nCUDA graphs: not used; FSDP will" in str(prepared)
        assert all(layer._compiled_call_impl is not None for layer in layers_of(model))
    assert all(layer._compiled_call_impl is None for layer in layers_of(model))
    assert state(model) == before


def test_sharding_is_seen(monkeypatch):
    model = nn.Linear(2, 2)
    assert prepare._sharding(model) is None
    model.weight.device_mesh = SimpleNamespace()
    assert prepare._sharding(model) == "weights are sharded over ranks"


def test_lora_is_joined_where_there_is_something_to_join(cuda, monkeypatch):
    model = adapted()
    inner = model.get_base_model()
    one = LoraConfig(r=3, target_modules=["q_proj", "o_proj"])
    alone = moe_qlora.get_peft_model(tiny_model("qwen3_moe"), one, unpacked_ok=True)
    before = state(alone)
    with moe_qlora.prepare_training(alone, **SIZES) as prepared:
        assert "LoRA" not in str(prepared)
        assert "forward" not in vars(layers_of(alone)[0].self_attn.q_proj)
    assert state(alone) == before

    def fails(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise ValueError("give pixels.\nand more")

    monkeypatch.setattr(type(inner.model), "forward", fails)
    before = state(model)
    with moe_qlora.prepare_training(model, **SIZES) as prepared:
        assert "LoRA: each layer by itself; ValueError: give pixels." in str(prepared)
        assert "forward" not in vars(layers_of(model)[0].self_attn.q_proj)
    assert state(model) == before


def test_layers_with_a_forward_of_other_code_stay(cuda):
    model = adapted()
    for layer in layers_of(model):
        add_hook_to_module(layer, ModelHook())
    before = state(model)
    with moe_qlora.prepare_training(model, **SIZES) as prepared:
        assert "not used; other code has replaced the layers' forward" in str(prepared)
        assert len(str(prepared).splitlines()) == 5 and len(cuda) == 1
    assert state(model) == before


def test_graphs_that_fail_are_a_line(cuda, monkeypatch):
    def fails(model: nn.Module, *, compiled: bool) -> Any:
        raise RuntimeError("CUDA driver is too old.\nand more")

    monkeypatch.setattr(speed_graphs, "LayerGraphs", fails)
    with moe_qlora.prepare_training(adapted(), **SIZES) as prepared:
        assert "CUDA graphs: not used; RuntimeError: CUDA driver is too old." in str(prepared)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_liger_leaves_nothing_behind(model_type):
    pytest.importorskip("liger_kernel")
    model = tiny_model(model_type)
    moe_qlora.quantize_experts(model, BNB)
    modeling = importlib.import_module(type(model).__module__)

    def everything() -> Any:
        return {name: dict(vars(m)) for name, m in model.named_modules()}, dict(vars(modeling))

    before = everything()
    torch.manual_seed(0)
    with apply_liger(model, in_layers=True):
        assert is_ligers(model.forward)
        norms = [m for n, m in model.named_modules() if n.endswith(("layernorm", "model.norm"))]
        assert len(norms) > 4 and all(is_ligers(norm.forward) for norm in norms)
        classes = {n: v for n, v in before[1].items() if isinstance(v, type)}
        assert classes == {n: v for n, v in vars(modeling).items() if isinstance(v, type)}
        changed = [n for n, v in vars(modeling).items() if v is not before[1].get(n)]
        assert changed == [] if model_type == "deepseek_v3" else ["apply_rotary_pos_emb"]
    assert everything() == before


def test_liger_on_types_that_it_does_not_have():
    pytest.importorskip("liger_kernel")
    with pytest.raises(ConfigError, match="Liger has no kernels for glm4_moe"):
        apply_liger(tiny_model("glm4_moe"), in_layers=True)


def test_liger_that_fails_half_way(monkeypatch):
    monkey_patch = pytest.importorskip("liger_kernel.transformers.monkey_patch")
    model = adapted()
    before = state(model)

    def fails(model: Any, **_: Any) -> None:
        model.forward = model.model.forward
        modeling_of(taken).apply_rotary_pos_emb = None
        raise ImportError("cannot import name 'Gone'")

    taken = model
    monkeypatch.setitem(monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN, "qwen3_moe", fails)
    with pytest.raises(ConfigError, match="Liger fails on qwen3_moe"):
        apply_liger(model.get_base_model(), in_layers=True)
    assert state(model) == before


def bind_trls_loss(base: nn.Module) -> None:
    sft = pytest.importorskip("trl.trainer.sft_trainer")
    of_1_14 = getattr(sft, "_patch_chunked_ce_lm_head", None)
    of_1_14(base, 256) if of_1_14 else sft.add_fused_lm_head(base)


@pytest.mark.parametrize("first", ["trl", "prepare"])
def test_the_loss_of_trl_stays(first, cuda):
    """TRL's trainers bind a forward when they are made, before or after this call."""
    pytest.importorskip("liger_kernel")
    model = adapted()
    base = model.get_base_model()
    if first == "trl":
        bind_trls_loss(base)
    prepared = moe_qlora.prepare_training(model, **SIZES)
    assert ("\nLoss: TRL's, in chunks.\n" in str(prepared)) == (first == "trl")
    if first == "prepare":
        bind_trls_loss(base)
    bound = base.forward
    assert bound.__func__.__globals__["__name__"].startswith("trl.")
    again = moe_qlora.prepare_training(model, **SIZES)
    assert "\nLoss: TRL's, in chunks.\n" in str(again) and "not used" not in str(again)
    assert base.forward == bound
    again.remove()
    assert base.forward == bound


def test_memory_is_measured_with_trls_loss():
    """Else the logits of all tokens would be planned, which its trainers never have."""
    model = adapted()
    calls: list[nn.Module] = []
    model.get_base_model().lm_head.register_forward_hook(lambda head, *_: calls.append(head))
    sizes = {**SIZES, "memory": "1GiB"}
    moe_qlora.prepare_training(model, **sizes).remove()
    before, calls[:] = len(calls), []
    bind_trls_loss(model.get_base_model())
    moe_qlora.prepare_training(model, **sizes).remove()
    assert before and not calls


def test_a_step_on_a_gpu_suggests_it(monkeypatch, caplog):
    """The first step in training does; not where it was called, nor on a CPU."""
    models = [adapted() for _ in range(3)]
    inputs = tiny_inputs(models[0].get_base_model())
    moe_qlora.prepare_training(models[0], **SIZES)
    models[1](**inputs)
    monkeypatch.setattr(nn.Parameter, "is_cuda", True)
    for model in (models[0], models[2], models[2]):
        with suppress(Exception):  # There is no GPU
            model(**inputs)
    said = [record.message for record in caplog.records if "are packed" in record.message]
    assert [("prepare_training(" in text) for text in said] == [False, False, True]


@pytest.mark.parametrize(("asked", "memory"), [(None, None), (True, None), ("40GiB", "40GiB")])
def test_hosts_prepare_unless_told_not_to(asked, memory, cuda, monkeypatch, caplog, capsys):
    model, off, host = adapted(), *(ExpertsHost({"prepare_training": x}) for x in (False, asked))
    assert off.before_training(model, **SIZES) is None and not cuda
    prepared = host.before_training(model, **SIZES)
    assert prepared is not None and f"'memory': {memory!r}" in cuda[1]
    prepared.remove()
    assert capsys.readouterr().err.startswith(prepare._MEASURES)  # No terminal, which has a bar
    refused = Mock(side_effect=ConfigError("7 bytes are missing"))
    monkeypatch.setattr(speed_fit, "fit_memory", refused)
    with pytest.raises(ConfigError, match="7 bytes") if asked else nullcontext():
        assert host.before_training(model, **SIZES) is None
    assert ("not used: 7 bytes" in caplog.text) == (asked is None)


@pytest.mark.parametrize(
    ("step", "sizes"),
    [
        ({}, {"batch_size": 1, "seq_len": 64}),
        ({"batch_size": 3}, {"batch_size": 3, "seq_len": 64}),
        ({"objective": "rm"}, {"batch_size": 2, "seq_len": 64}),
    ],
)
def test_hosts_say_how_rows_come(step, sizes, events):
    host = ExpertsHost({"prepare_training": "1GiB"})
    prepared = host.before_training(adapted(), **{"batch_size": 1, "seq_len": 64, **step})
    assert events == [f"fit of {in_order(sizes)} with stock loss"]
    prepared.remove()


def in_order(sizes: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `fit_memory` as `prepare_training` hands them on."""
    given = {"memory": "1GiB"} | sizes
    return {n: given[n] for n in ("batch_size", "seq_len", "memory") if n in given}


@pytest.mark.parametrize(
    ("more", "sizes"),
    [
        ({}, {"batch_size": 3, "seq_len": 64}),
        ({"rl": "dpo"}, {"batch_size": 6, "seq_len": 64}),
        ({"rl": "kto"}, {"batch_size": 3, "seq_len": 64}),
        ({"sample_packing": True}, {"batch_size": 3, "seq_len": 64}),
        ({"torch_compile": True}, None),
        ({"context_parallel_size": 2}, None),
    ],
)
def test_axolotls_plugin_prepares_the_trainers_model(more, sizes, events, monkeypatch):
    """The hook alone, on stand-ins of the two names that its file takes from axolotl."""
    base, log = ModuleType("axolotl.integrations.base"), ModuleType("axolotl.utils.logging")
    base.BasePlugin, log.get_logger = object, logging.getLogger  # type: ignore[attr-defined]
    for module in (base, log):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("axolotl", "axolotl.integrations", "axolotl.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.delitem(sys.modules, "moe_qlora.integrations.axolotl", raising=False)
    ours = importlib.import_module("moe_qlora.integrations.axolotl")
    monkeypatch.delitem(sys.modules, ours.__name__)
    model, plugin = adapted(), ours.MoeQloraPlugin()
    plugin.host = ExpertsHost({"prepare_training": "1GiB"})
    cfg = {"plugins": [PLUGIN], "micro_batch_size": 3, "sequence_len": 64, **more}
    plugin.post_trainer_create(cfg, SimpleNamespace(model=model))
    if sizes is None:
        assert not events
        return
    said = repr(in_order(sizes))
    if "rl" in more:
        said = f"{said[:-1]}, 'loss': functools.partial(<function _of_probabilities"
    assert len(events) == 1 and events[0].startswith(f"fit of {said}")
    plugin.post_train_unload(cfg)
    assert events[1:] == ["fit removed"]


@contextmanager
def nothing(model: Any) -> Any:
    yield


@requires_gpu()
@pytest.mark.filterwarnings("ignore")  # of torch's compiler, about its own choices
@pytest.mark.parametrize("length", [12, 600])  # With 1,024 tokens and more, on two streams
def test_trains_alike_on_a_gpu(length: int):
    def losses(prepares: Any) -> list[float]:
        model = adapted(dtype=torch.bfloat16, device="cuda")
        ids = torch.randint(64, (2, length), generator=torch.Generator().manual_seed(0)).cuda()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        found = []
        with prepares(model):
            for _ in range(6):
                loss = model(input_ids=ids, labels=ids).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.item())
        return found

    plain = losses(nothing)
    sizes = {"batch_size": 2, "seq_len": length}
    fast = losses(lambda model: moe_qlora.prepare_training(model, **sizes))
    torch.testing.assert_close(fast, plain, rtol=0.02, atol=0.02)
    assert plain[-1] < plain[0]
