"""Code of torch.compile whose experts lie in host memory, on a device whose copies come late."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from emulated_graphs import emulate, hold_addresses, in_graph
from graphed import recorded
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from transformers import BitsAndBytesConfig

import moe_qlora
from moe_qlora.experts import projection
from moe_qlora.planning import levels
from moe_qlora.testing import tiny_model
from tests.helpers.delayed import Delayed, Reads, delayed
from tests.helpers.fitting import equal, token_ids, train, with_lora

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:User provided device_type of 'cuda'"),
]


@pytest.fixture(autouse=True)
def devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Delayed]]:
    monkeypatch.setattr(Delayed, "records", lambda _: in_graph())
    torch.compiler.reset()
    counters.clear()
    with delayed(monkeypatch) as made:
        yield made
    torch.compiler.reset()


@pytest.fixture(autouse=True)
def reads(devices: list[Delayed], monkeypatch: pytest.MonkeyPatch) -> Reads:
    """What operators read of slots; around compiled code, the mode would keep it from compiling."""
    noted = Reads(devices)

    def within(own: Any) -> Any:
        def run(*args: Any) -> Any:
            with noted:
                return own(*args)

        return run

    monkeypatch.setattr(projection, "multiply_codes", within(projection.multiply_codes))
    return noted


def packed(layers: int) -> Any:
    model: Any = tiny_model("qwen3_moe", num_hidden_layers=layers)
    model.config.use_cache = False
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True)
    moe_qlora.quantize_experts(model, settings)
    return with_lora(model)


def layers_of(model: Any) -> Any:
    return model.get_base_model().model.layers


def test_layers_are_one_graph_each_and_fetch_within_it(
    devices: list[Delayed], reads: Reads
) -> None:
    model = packed(4)
    ids = token_ids(model, seq=12)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    made = CompileCounterWithBackend("aot_eager")
    for layer in layers_of(model):
        layer.compile(backend=made, fullgraph=True)
    resident = train(model, ids)
    model.load_state_dict(weights)
    alone = made.frame_count
    with moe_qlora.offload_experts(model) as off:
        assert equal(train(model, ids), resident)
        assert off.copies == 2 + 3 * 2 * 2 and devices[0].missed == 1
        assert reads.count > 3 * 4 * 2
        assert not counters["graph_break"]
        assert made.frame_count == 2 * alone  # For all layers, as before
    model.load_state_dict(weights)
    assert equal(train(model, ids), resident)
    moved_between_a_forward_and_its_backward(model, ids)


def moved_between_a_forward_and_its_backward(model: Any, ids: Tensor) -> None:
    wanted = gradients(model, ids, lambda: None)
    off = moe_qlora.offload_experts(model)
    assert all(map(torch.equal, gradients(model, ids, off.remove), wanted))
    offs: list[Any] = []
    found = gradients(model, ids, lambda: offs.append(moe_qlora.offload_experts(model)))
    assert all(map(torch.equal, found, wanted))
    offs[0].remove()
    off = moe_qlora.offload_experts(model)

    def again() -> None:
        off.remove()
        moe_qlora.offload_experts(model)

    assert all(map(torch.equal, gradients(model, ids, again), wanted))


def gradients(model: Any, ids: Tensor, between: Any) -> list[Tensor]:
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    between()
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def test_compiled_layers_are_recorded(
    devices: list[Delayed], monkeypatch: pytest.MonkeyPatch
) -> None:
    emulate(monkeypatch)
    hold_addresses(monkeypatch)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    model = packed(3)
    trained = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    ids = token_ids(model, seq=12)
    resident = train(model, ids)
    for layer in layers_of(model):
        layer.compile(backend="eager")
    with (
        moe_qlora.offload_experts(model) as off,
        recorded(model.get_base_model(), levels.KEEP) as graphs,
    ):
        for _ in range(2):
            model.load_state_dict(trained, strict=False)
            copies = off.copies
            found = train(model, ids)
            assert found[0] == pytest.approx(resident[0], rel=1e-5)
        assert graphs.recorded == 3 and off.copies - copies == 3 * 2
