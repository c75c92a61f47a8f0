"""`prepare_training`: what it sets, in which order, and that nothing of it is left behind.

Without a GPU, tests take the model for one on CUDA; graphs then record nothing, and run no kernel.
"""

import logging
from contextlib import nullcontext
from unittest.mock import MagicMock, Mock

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module

import moe_qlora
from moe_qlora.errors import ConfigError
from moe_qlora.integrations import ExpertsHost
from moe_qlora.testing import requires_gpu, tiny_inputs
from moe_qlora.train import fit, graphs, prepare
from moe_qlora.train.flat_rows import has_flat_rows
from tests.helpers import training

SIZES = {"batch_size": 2, "seq_len": 12}


def adapted(**options):
    return training.adapted(training.packed("qwen3_moe", **options)).train()


def state(model):
    """Every attribute of every module."""
    ours = {name: dict(vars(module)) for name, module in model.named_modules()}
    for held in ours.values():
        if held.get("_compiled_call_impl", 0) is None:  # as the class has it
            del held["_compiled_call_impl"]
    return ours


def is_ligers(module):
    return getattr(module.forward, "__module__", "").startswith("liger_kernel.")


@pytest.fixture
def events(monkeypatch):
    """What was called, with a stand-in of `fit_memory`."""
    happened = []

    def fit_memory(model, *, loss, **sizes):
        sizes |= {"loss": loss} if loss else {}
        own = "Liger's" if is_ligers(model.get_base_model()) else "stock"
        happened.append(f"fit of {sizes} with {own} loss")
        remove = lambda: happened.append("fit removed")  # noqa: E731
        made = MagicMock(remove=remove, graphs_fit=sizes["memory"] != "1KiB")
        made.__str__.return_value = "2 of 2 layers keep their activations"
        return made

    monkeypatch.setattr(fit, "fit_memory", fit_memory)
    return happened


@pytest.fixture
def cuda(monkeypatch, events):
    """Models are taken for models on CUDA; graphs replace forwards and record nothing."""
    make = graphs.LayerGraphs

    def made(model, *, compiled):
        events.append(f"graphs, compiled={compiled}")
        recorded = make(model, compiled=compiled)
        remove = recorded.remove
        recorded.remove = lambda: (events.append("graphs removed"), remove())[1]
        return recorded

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr("torch._inductor.async_compile.maybe_warm_pool", lambda: None)
    monkeypatch.setattr(graphs, "LayerGraphs", made)
    monkeypatch.setattr(prepare, "_is_on_cuda", lambda module: True)
    return events


def test_on_a_cpu_rows_are_flat_and_memory_is_fitted_if_it_is_given(caplog):
    model = adapted()
    model(**tiny_inputs(model.get_base_model()))  # which sets some attributes
    before = state(model)
    with caplog.at_level(logging.INFO, "moe_qlora"):
        prepared = moe_qlora.prepare_training(model, **SIZES)
    assert "flat rows" in str(prepared) and "\n" not in str(prepared)
    assert [r.getMessage() for r in caplog.records if "prepare" in r.name] == [str(prepared)]
    assert has_flat_rows(model) and prepared.fit is None
    prepared.remove()
    assert state(model) == before
    with moe_qlora.prepare_training(model, **SIZES, memory="1GiB") as prepared:
        assert prepared.fit is not None and prepared.fit.memory == 1 << 30
        assert str(prepared).splitlines()[1:] == [f"Memory: {prepared.fit}."]
        assert [layer.activations for layer in prepared.fit.layers] == ["keep", "keep"]
        assert state(model) != before
    assert state(model) == before
    with pytest.raises(ConfigError, match="bytes are missing"):
        moe_qlora.prepare_training(model, **SIZES, memory="1KiB")
    assert state(model) == before


def test_the_order_is_liger_lora_graphs_fit_and_back(cuda):
    pytest.importorskip("liger_kernel")
    model = adapted()
    before = state(model)
    prepared = moe_qlora.prepare_training(model, **SIZES)
    asked = "fit of {'batch_size': 2, 'seq_len': 12, 'memory': None} with Liger's loss"
    assert cuda == ["graphs, compiled=True", asked]
    assert str(prepared).splitlines() == [
        "Prepared for batches of 2 x 12 tokens.",
        "Liger: loss.",
        "torch.compile: 2 layers.",
        "CUDA graphs: 2 layers, recorded in the second step.",
        "Memory: 2 of 2 layers keep their activations.",
        prepare._YOURS,
    ]
    assert not any(map(is_ligers, model.get_base_model().model.layers.modules()))
    prepared.remove()
    assert cuda[2:] == ["fit removed", "graphs removed"] and state(model) == before
    prepared.remove()
    assert len(cuda) == 4
    with moe_qlora.prepare_training(model, **SIZES, memory="1KiB") as prepared:
        assert prepared.graphs is None and "CUDA graphs: not used; a step with" in str(prepared)
    assert state(model) == before


def test_layers_whose_forward_other_code_has_replaced_stay(cuda):
    model = adapted()
    layers = model.get_base_model().model.layers
    for layer in layers:
        add_hook_to_module(layer, ModelHook())
    before = state(model)
    with moe_qlora.prepare_training(model, **SIZES) as prepared:
        assert "not used; other code has replaced the layers' forward" in str(prepared)
        assert len(str(prepared).splitlines()) == 5
    assert state(model) == before


@pytest.mark.parametrize("first", ["trl", "prepare"])
def test_the_loss_of_trl_stays(first, cuda):
    """TRL's trainers bind a forward when they are made, before or after this call."""
    pytest.importorskip("liger_kernel")
    sft = pytest.importorskip("trl.trainer.sft_trainer")
    model = adapted()
    base = model.get_base_model()

    def bind():
        of_1_14 = getattr(sft, "_patch_chunked_ce_lm_head", None)
        of_1_14(base, 256) if of_1_14 else sft.add_fused_lm_head(base)

    if first == "trl":
        bind()
    prepared = moe_qlora.prepare_training(model, **SIZES)
    assert ("\nLoss: TRL's, in chunks.\n" in str(prepared)) == (first == "trl")
    if first == "prepare":
        bind()
    bound = base.forward
    assert bound.__func__.__globals__["__name__"].startswith("trl.")
    again = moe_qlora.prepare_training(model, **SIZES)
    assert "\nLoss: TRL's, in chunks.\n" in str(again) and "not used" not in str(again)
    assert base.forward == bound
    again.remove()
    assert base.forward == bound


@pytest.mark.parametrize("asked", [None, "40GiB"])
def test_hosts_prepare_unless_told_not_to(asked, cuda, monkeypatch, caplog, capsys):
    model, off, host = adapted(), *(ExpertsHost({"prepare_training": x}) for x in (False, asked))
    assert off.before_training(model, **SIZES) is None and not cuda
    prepared = host.before_training(model, **SIZES)
    assert prepared is not None and f"'memory': {asked!r}" in cuda[1]
    prepared.remove()
    assert capsys.readouterr().err.startswith(prepare._MEASURES)  # No terminal, which has a bar
    refused = Mock(side_effect=ConfigError("7 bytes are missing"))
    monkeypatch.setattr(fit, "fit_memory", refused)
    with pytest.raises(ConfigError, match="7 bytes") if asked else nullcontext():
        assert host.before_training(model, **SIZES) is None
    assert ("not used: 7 bytes" in caplog.text) == (asked is None)


@pytest.mark.parametrize(("objective", "size"), [("sft", 3), ("rm", 6), ("dpo", 6), ("kto", 3)])
def test_pairs_are_two_sequences(objective, size, events):
    host = ExpertsHost({"prepare_training": "1GiB"})
    host.before_training(adapted(), batch_size=3, seq_len=64, objective=objective).remove()
    said = f"fit of {{'batch_size': {size}, 'seq_len': 64, 'memory': '1GiB'"
    assert events[0].startswith(said) and ("'loss': " in events[0]) == (objective in ("dpo", "kto"))


@requires_gpu()
@pytest.mark.filterwarnings("ignore")  # of torch's compiler, about its own choices
@pytest.mark.parametrize("length", [12, 600])  # With 1,024 tokens and more, on two streams
def test_trains_alike_on_a_gpu(length):
    ids = torch.randint(64, (2, length), generator=torch.Generator().manual_seed(0)).cuda()
    plain, fast = (adapted(dtype=torch.bfloat16, device="cuda") for _ in range(2))
    losses = training.train(plain, [ids] * 6)
    with moe_qlora.prepare_training(fast, batch_size=2, seq_len=length):
        assert training.train(fast, [ids] * 6) == pytest.approx(losses, rel=0.02, abs=0.02)
    assert losses[-1] < losses[0]
