"""Experts in host memory: losses, gradients and files are those of the resident model.

All runs are on a device whose copies come as late as they may (tests/helpers/delayed.py).
"""

import copy
import gc
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from graphed import emulate, hold_addresses, in_graph, recorded
from peft import LoraConfig
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from upstream import TRANSFORMERS

import moe_qlora
from moe_qlora import ConfigError
from moe_qlora.experts import projection
from moe_qlora.packing import parametrize
from moe_qlora.planning import levels
from moe_qlora.testing import tiny_inputs, tiny_model
from moe_qlora.train import offload as host_memory
from moe_qlora.train.offload import _Hosted
from tests.helpers import training
from tests.helpers.delayed import Delayed, Reads, delayed
from tests.helpers.fitting import adapted, fitted, hosted_tensors, token_ids, train, with_lora
from tests.helpers.folders import bits
from tests.helpers.small_models import fill
from tests.helpers.training import (
    NF4,
    SETTINGS,
    assert_same_training,
    trained_weights,
    whole_gradients,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:User provided device_type of 'cuda'"),
]


@pytest.fixture(autouse=True)
def devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Delayed]]:
    monkeypatch.setattr(Delayed, "records", lambda _: in_graph())
    with delayed(monkeypatch) as made:
        yield made


def packed(codec: str = "bf16 storage", seed: int = 0) -> Any:
    sizes = {"num_hidden_layers": 4, "num_experts": 2}
    return training.packed(settings=SETTINGS[codec], seed=seed, **sizes)


def lists_of(model: Any) -> list[Any]:
    return [parametrize.parametrization_list(m, n) for _, m, n in parametrize.iter_packed(model)]


@pytest.mark.parametrize(("codec", "reentrant"), [("int8", None), ("bf16 storage", True)])
def test_steps_are_those_of_the_resident_model(codec, reentrant, devices):
    model = with_lora(packed(codec))
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    ids, weights = token_ids(model), copy.deepcopy(model.state_dict())
    resident = train(model, ids, 2)
    model.load_state_dict(weights)
    with moe_qlora.offload_experts(model) as off, Reads(devices) as reads:
        assert_same_training(train(model, ids, 2), resident)
        # 2 at first; in each pass forward and backward all but the two that are there
        assert off.copies == 2 + 2 * 2 * (4 - off.slots)
        assert reads.count > 2 * 4 * 2 * 2
        assert len(devices[0].made) == off.slots
        assert devices[0].missed == 1  # The very first
    again = bits(model)
    model.load_state_dict(weights)
    assert_same_training(train(model, ids, 2), resident)
    assert bits(model) == again


def test_evaluation_generation_and_switched_adapters():
    model = with_lora(packed())
    model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"]))
    fill(model)
    ids = token_ids(model)

    def results() -> list[Tensor]:
        found: list[Any] = []
        for name in ("default", "second"):
            model.set_adapter(name)
            loss = model.train()(input_ids=ids, labels=ids).loss
            with torch.no_grad():  # Between a forward and its backward
                found.append(model(input_ids=ids).logits)
                with model.disable_adapter():
                    found.append(model(input_ids=ids).logits)
            loss.backward()
            found += [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
            model.zero_grad()
            with torch.inference_mode():
                found.append(model.eval()(input_ids=ids).logits.clone())
            found.append(model.generate(input_ids=ids, max_new_tokens=4, do_sample=False))
        return found

    resident = results()
    with moe_qlora.offload_experts(model):
        assert all(map(torch.equal, results(), resident))
    assert all(map(torch.equal, results(), resident))


@pytest.mark.parametrize("hook", ["register_forward_hook", "register_full_backward_hook"])
def test_a_failure_in_the_middle_leaves_nothing(hook, devices):
    model = with_lora(packed())
    ids = token_ids(model)
    resident = train(copy.deepcopy(model), ids, 1)
    off = moe_qlora.offload_experts(model)

    def fail(*_: Any) -> None:
        raise ArithmeticError

    handle = getattr(model.get_base_model().model.layers[2].mlp, hook)(fail)
    with pytest.raises(ArithmeticError) as held:  # With all frames
        model(input_ids=ids, labels=ids).loss.backward()
    handle.remove()
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    assert [loss.item()] == resident[0]
    model.zero_grad()
    del held
    gc.collect()
    assert not any(slot.leases for slot in off._slots)
    assert len(devices[0].made) <= 4
    off.remove()
    assert_same_training(train(model, ids, 1), resident)


def test_experts_may_move_between_a_forward_and_its_backward():
    model = with_lora(packed())
    ids = token_ids(model)
    resident, off = train(copy.deepcopy(model), ids, 1), None
    for _ in range(2):
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        off = off.remove() if off else moe_qlora.offload_experts(model)
        loss.backward()
        assert_same_training(([loss.item()], whole_gradients(model)), resident)


def test_a_lease_may_end_in_the_middle_of_a_fetch(monkeypatch):
    """The garbage collector may run anywhere: it finds the lock taken, by this same thread."""
    held: list[Any] = []
    own = Delayed.copy
    copies = lambda *args: (held.clear(), own(*args))[1]  # noqa: E731
    monkeypatch.setattr(Delayed, "copy", copies)
    off = moe_qlora.offload_experts(packed())
    for block in [off._blocks[place] for place in (0, 2, 1, 3, 0)]:
        slot, lease = off.fetch(block, True)
        assert torch.equal(slot.memory[: block.memory.nbytes], block.memory)
        held.append(lease)
        del lease
    off.remove()


def test_an_offloaded_model_is_moved_saved_and_given_back_as_it_was(tmp_path):
    model = packed()
    inputs = tiny_inputs(model)
    expected = model(**inputs).logits
    before, text = bits(model), repr(model)
    parameters = {name: id(parameter) for name, parameter in model.named_parameters()}
    nbytes, sizes = model.get_memory_footprint(), sum(t.nbytes for t in model.state_dict().values())
    weights = [parametrize.read_packed(m, n) for _, m, n in parametrize.iter_packed(model)]
    off = moe_qlora.offload_experts(model)
    assert repr(model) != text and "on host" in repr(model)
    assert model.get_memory_footprint() == nbytes
    assert off.host_nbytes >= sum(weight.nbytes for weight in weights)
    assert str(off.slots) in str(off) and off.copies == 0
    moved = model.to("cpu").cpu()
    model.model.layers.to(torch.float64).to(torch.float32)
    assert torch.equal(moved(**inputs).logits, expected) and "on host" in repr(moved)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    off.remove()
    off.remove()
    assert bits(model) == before and repr(model) == text
    assert parameters == {name: id(parameter) for name, parameter in model.named_parameters()}
    assert off.host_nbytes == off.slots == 0
    assert all("host" not in each.__dict__ for each in lists_of(model))
    assert (tmp_path / "weights.pt").stat().st_size < 1.5 * sizes
    model.load_state_dict(torch.load(tmp_path / "weights.pt"))
    assert bits(model) == before
    with moe_qlora.offload_experts(model) as off:
        with pytest.raises(ConfigError, match=r"moved to meta.*call remove"):
            model.to("meta")
        assert off.device == torch.device("cpu")


@pytest.mark.parametrize(("codec", "assign"), [("bf16 storage", True), ("int8", False)])
def test_weights_that_are_loaded_meanwhile_count(codec, assign):
    model, other = packed(codec), packed(codec, seed=5)
    inputs = tiny_inputs(model)
    before, expected = model(**inputs).logits, other(**inputs).logits
    assert not torch.equal(before, expected)
    first = copy.deepcopy(model.state_dict())
    for layers in (None, 2):  # In which the slots have all layers
        model.load_state_dict(first)
        with moe_qlora.offload_experts(model, layers=layers):
            for _ in range(2):
                assert torch.equal(model(**inputs).logits, before)
            model.load_state_dict(copy.deepcopy(other.state_dict()), assign=assign)
            for _ in range(2):
                assert torch.equal(model(**inputs).logits, expected)
    assert torch.equal(model(**inputs).logits, expected)
    assert bits(model) == bits(other)


def test_what_cannot_be_had_is_one_sentence(monkeypatch):
    with pytest.raises(ConfigError, match="no packed experts"):
        moe_qlora.offload_experts(tiny_model("qwen3_moe"))
    model = packed()
    for layers in (0, 5, True, 2.0):
        with pytest.raises(ConfigError, match=r"layers is .*from 1 to 4"):
            moe_qlora.offload_experts(model, layers=layers)
    with (
        moe_qlora.offload_experts(model, layers=2),
        pytest.raises(ConfigError, match=r"layers\.2 are in host memory already"),
    ):
        moe_qlora.offload_experts(model)
    cuda = SimpleNamespace(cudaHostRegister=lambda *_: 2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    memory = host_memory.HostMemory(4096)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    with pytest.raises(ConfigError, match=r"could not be page-locked \(CUDA error 2\)"):
        memory.lock(torch.device("cuda", 0))


@pytest.mark.parametrize(
    ("where", "at"),
    [("write", 3), ("leave", 4)],  # In the second layer; its first weight as it leaves
)
def test_a_move_that_fails_leaves_each_weight_whole(where, at, monkeypatch):
    model = with_lora(packed())
    ids = token_ids(model)
    resident = train(copy.deepcopy(model), ids, 1)
    calls, back, own = [], where == "leave", getattr(_Hosted, where)
    off = moe_qlora.offload_experts(model) if back else None

    def failing(self: _Hosted, *args: Any) -> Any:
        calls.append(self)
        if len(calls) == at:
            raise KeyboardInterrupt
        return own(self, *args)

    monkeypatch.setattr(_Hosted, where, failing)
    with pytest.raises(KeyboardInterrupt):
        off.remove() if off else moe_qlora.offload_experts(model)
    monkeypatch.setattr(_Hosted, where, own)
    hosted = [each.host is not None for each in lists_of(model)]
    assert hosted == ([False] * 2 + [True, False] + [True] * 4 if back else [False] * 8)
    assert_same_training(train(copy.deepcopy(model), ids, 1), resident)
    if off:
        assert len(off.layers) == 3
        off.remove()
    assert not hosted_tensors(model)


def test_what_fit_memory_has_brought_is_still_the_same_offload():
    model = tiny_model("qwen3_moe", num_hidden_layers=3)
    with moe_qlora.enabled(offload=True):
        moe_qlora.quantize_experts(model, NF4)
    model = with_lora(model)
    with fitted(model):
        off = moe_qlora.offload_experts(model)
        assert off.layers == ()
        with pytest.raises(ConfigError, match=r"offload_experts\(model\) returns"):
            moe_qlora.offload_experts(model, layers=2)
    assert moe_qlora.offload_experts(model) is off and len(off.layers) == 3
    off.remove()
    assert not hosted_tensors(model)
    assert moe_qlora.offload_experts(model) is not off


STEPS = 2  # The first step runs plainly, the second records, and all of the next two replay


@pytest.fixture
def graphed(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    hold_addresses(monkeypatch)


def recordable(layers: int = 4) -> Any:
    model = adapted(num_hidden_layers=layers, num_experts=2)
    model.get_base_model().config.use_cache = False
    return model


def steps(model: Any, ids: Tensor, weights: Any, count: int = STEPS) -> Any:
    model.load_state_dict(weights, strict=False)
    return train(model, ids, count)


@pytest.mark.usefixtures("graphed")
@pytest.mark.parametrize(
    ("count", "checkpointing", "level"), [(3, True, None), (4, False, levels.KEEP)]
)
def test_replays_train_as_the_resident_model(count, checkpointing, level, devices):
    if checkpointing and TRANSFORMERS < (5, 23):
        pytest.skip("its checkpoint is around `forward` of an instance: graphs give up within it")
    model = recordable(count)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids, weights = token_ids(model), trained_weights(model)
    resident = steps(model, ids, weights)
    with recorded(model, level) as graphs:
        assert_same_training(steps(model, ids, weights), resident)
        with moe_qlora.offload_experts(model) as off, Reads(devices) as reads:
            assert_same_training(
                steps(model, ids, weights), resident
            )  # Recording fetches now and then
            assert graphs.recorded == count and reads.count > STEPS * count * 2
            copies, missed = off.copies, devices[0].missed
            assert_same_training(steps(model, ids, weights), resident)
            assert off.copies - copies == STEPS * 2 * max(0, count - 2)
            assert devices[0].missed == missed and len(devices[0].made) == off.slots
    assert_same_training(steps(model, ids, weights), resident)


def test_layers_are_one_graph_each_and_fetch_within_it(devices, monkeypatch):
    torch.compiler.reset()
    counters.clear()
    model, reads, own = recordable(3), Reads(devices), projection.multiply_codes

    def reading(*args: Any) -> Any:  # Around compiled code, the mode would keep it from compiling
        with reads:
            return own(*args)

    monkeypatch.setattr(projection, "multiply_codes", reading)
    ids, weights = token_ids(model, seq=12), trained_weights(model)
    made = CompileCounterWithBackend("aot_eager")
    for layer in model.get_base_model().model.layers:
        layer.compile(backend=made, fullgraph=True)
    resident = steps(model, ids, weights)
    alone = made.frame_count
    with moe_qlora.offload_experts(model) as off:
        assert_same_training(steps(model, ids, weights), resident)
        assert off.copies == 2 + STEPS * 2 and devices[0].missed == 1
        assert reads.count > STEPS * 3 * 2
        assert not counters["graph_break"]
        assert made.frame_count == 2 * alone  # For all layers, as before
    assert_same_training(steps(model, ids, weights), resident)
    torch.compiler.reset()
