"""Experts in host memory on CUDA: copies beside kernels change nothing, however slow either is."""

import gc
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from graphed import COMPILED, batch, gradients, packed, recorded
from torch._dynamo.utils import counters
from training import NF4, assert_same_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import moe_qlora
from moe_qlora.experts import fused
from moe_qlora.packing import parametrize
from moe_qlora.planning import levels
from moe_qlora.testing import tiny_model
from moe_qlora.train.offload import Copier, Offload
from tests.helpers.fitting import fitted, least_memory

pytestmark = pytest.mark.gpu
SLOW = 5_000_000  # Cycles, some milliseconds
LAYERS = {"num_hidden_layers": 5}


def steps(model: Any) -> list[Any]:
    return [gradients(model, batch(step)) for step in range(4)]


def same(one: Any, other: Any) -> bool:
    return one[0] == other[0] and all(map(torch.equal, one[1].values(), other[1].values()))


def assert_alike(found: list[Any], resident: list[Any], again: list[Any]) -> None:
    """Equal, bit by bit, where the resident model's own steps are; else as near as these."""
    for one, other, repeated in zip(found, resident, again, strict=True):
        assert_same_training(one, other, 0.0 if same(other, repeated) else 0.02)


@pytest.fixture
def slow(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes copies, or what reads experts, take milliseconds more."""

    def late(run: Any) -> Any:
        def slowly(*args: Any) -> Any:
            torch.cuda._sleep(SLOW)
            return run(*args)

        return slowly

    def copied(self: Copier, *args: Any, own: Any = Copier.copy) -> Any:
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(SLOW)
        return own(self, *args)

    if request.param == "copies":
        monkeypatch.setattr(Copier, "copy", copied)
    if request.param == "kernels":
        for name in ("make_layer", "layer_backward"):
            monkeypatch.setattr(fused, name, late(getattr(fused, name)))


slowed = pytest.mark.parametrize("slow", ["nothing", "copies", "kernels"], indirect=True)


def pinned(model: Any) -> list[bool]:
    return [
        parametrize.read_packed(module, name).codes.is_pinned()
        for _, module, name in parametrize.iter_packed(model)
    ]


def test_memory_of_the_device_and_of_the_host():
    model = packed("qwen3_moe", {**LAYERS, "moe_intermediate_size": 512})
    ids = batch(0)
    gradients(model, ids)
    model.zero_grad()
    gc.collect()
    before = torch.cuda.memory_allocated()
    off = moe_qlora.offload_experts(model)
    gc.collect()
    held, all_bytes = torch.cuda.memory_allocated(), off.host_nbytes
    assert before - held > 0.9 * all_bytes and all(pinned(model))
    gradients(model, ids)
    model.zero_grad()
    gc.collect()
    slots = off.slots * all_bytes / len(off.layers)
    assert torch.cuda.memory_allocated() - held < 1.1 * slots + 2**20
    off.remove()
    gc.collect()
    assert abs(torch.cuda.memory_allocated() - before) < 2**20 and not any(pinned(model))
    moe_qlora.offload_experts(model)  # A model that is forgotten unlocks its memory
    gradients(model, ids)
    del model
    gc.collect()
    again = packed("qwen3_moe", LAYERS)
    with moe_qlora.offload_experts(again):
        gradients(again, batch(0))


@slowed
@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize(("count", "level"), [(1, levels.KEEP), (4, None), (5, levels.KEEP)])
def test_recorded_layers(count, level):
    model = packed("qwen3_moe", {"num_hidden_layers": count})
    with recorded(model, level):
        resident, again = steps(model), steps(model)
    with moe_qlora.offload_experts(model) as off, recorded(model, level) as graphs:
        assert_alike(steps(model), resident, again)
        assert graphs.recorded == count
        copies = off.copies
        assert_alike(steps(model), resident, again)
        assert off.copies - copies == 4 * 2 * max(0, count - 2)


@slowed
@pytest.mark.usefixtures("slow")
@pytest.mark.filterwarnings("ignore")  # of torch's compiler, about its own choices
@pytest.mark.parametrize("records", [False, True])
def test_compiled_layers(records):
    # Routers that choose all experts: compiled in another way, they may choose other ones
    model = packed("qwen3_moe", {**LAYERS, "num_experts_per_tok": 4})
    resident = steps(model)
    torch.compiler.reset()
    counters.clear()
    for layer in model.get_base_model().model.layers:
        layer.compile(fullgraph=True)
    off = moe_qlora.offload_experts(model)
    with off, recorded(model) if records else nullcontext():
        for _ in range(2):
            copies = off.copies
            for one, other in zip(steps(model), resident, strict=True):
                assert_same_training(one, other, COMPILED)
        assert off.copies - copies == 4 * 2 * 3
    assert not counters["graph_break"]
    torch.compiler.reset()


def test_loading_holds_one_weight_on_the_device(tmp_path):
    sizes = {"num_hidden_layers": 6, "hidden_size": 256, "moe_intermediate_size": 512}
    model: Any = tiny_model("qwen3_moe", dtype=torch.bfloat16, **sizes)
    model.save_pretrained(tmp_path)
    config = BitsAndBytesConfig(**NF4, bnb_4bit_compute_dtype=torch.bfloat16)

    def load(**block: bool) -> tuple[Any, int]:
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        with moe_qlora.enabled(**block):
            loaded = AutoModelForCausalLM.from_pretrained(
                tmp_path, quantization_config=config, device_map={"": 0}, dtype=torch.bfloat16
            )
        return loaded, torch.cuda.memory_allocated() - before

    resident, taken = load()
    offloaded, less = load(offload=True)
    off: Offload = moe_qlora.offload_experts(offloaded)
    assert off.device.type == "cuda" and all(pinned(offloaded)) and off.copies == 0
    assert taken - less > 0.9 * off.host_nbytes
    ids = batch(0) % 60
    assert torch.equal(offloaded(input_ids=ids).logits, resident(input_ids=ids).logits)
    off.remove()  # Page-locked memory is not freed within a later test's recording


@pytest.mark.parametrize("graphs", [False, True])
def test_fit_memory_brings_experts_to_the_device_and_back(graphs):
    sizes = {"num_hidden_layers": 8, "hidden_size": 512, "moe_intermediate_size": 512}
    model = packed("qwen3_moe", {**sizes, "num_experts": 64})
    resident, again = steps(model), steps(model)
    ids, off, hosts = batch(0, 256), moe_qlora.offload_experts(model), []
    least, host_nbytes = least_memory(model, 2, 256) + (1 << 16), off.host_nbytes
    for memory in (least, least + host_nbytes // 2, least + (8 << 30)):
        fit = fitted(model, memory, batch_size=2, seq_len=256)
        with fit, recorded(model) if graphs else nullcontext():
            hosts.append([layer.experts for layer in fit.layers].count("host"))
            assert len(off.layers) == hosts[-1]
            gradients(model, ids)
            gc.collect()
            torch.cuda.reset_peak_memory_stats()
            gradients(model, ids)
            assert graphs or torch.cuda.max_memory_allocated() <= 1.03 * fit.peak
            assert_alike(steps(model), resident, again)
        assert off.host_nbytes == host_nbytes and len(off.layers) == 8
    assert hosts == sorted(hosts, reverse=True) and hosts[0] == 8 and hosts[-1] == 0
    off.remove()
    assert_alike(steps(model), resident, again)
