"""Compiled and recorded layers whose experts lie in host memory: the same losses and gradients.

Graphs are emulated, on a device whose copies come as late as they may: within a recording or a
replay nothing is copied or waited for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from emulated_graphs import emulate, hold_addresses, in_graph
from graphed import recorded
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from upstream import TRANSFORMERS

import moe_qlora
from moe_qlora.experts import projection
from moe_qlora.planning import levels
from tests.helpers import training
from tests.helpers.delayed import Delayed, Reads, delayed
from tests.helpers.fitting import equal, token_ids, train, with_lora

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:User provided device_type of 'cuda'"),
]
STEPS = 2  # The first step runs plainly, the second records, and all of the next two replay


@pytest.fixture(autouse=True)
def devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Delayed]]:
    monkeypatch.setattr(Delayed, "records", lambda _: in_graph())
    with delayed(monkeypatch) as made:
        yield made


@pytest.fixture
def graphed(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    hold_addresses(monkeypatch)


def packed(layers: int = 4) -> Any:
    model = training.packed(num_hidden_layers=layers, num_experts=2)
    model.config.use_cache = False
    return with_lora(model)


def trained(model: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def steps(model: Any, ids: Tensor, weights: Any, count: int = STEPS) -> Any:
    model.load_state_dict(weights, strict=False)
    return train(model, ids, count)


@pytest.mark.usefixtures("graphed")
@pytest.mark.parametrize(
    ("count", "checkpointing", "level"),
    [(1, False, None), (3, True, None), (4, False, levels.KEEP)],
)
def test_replays_train_as_the_resident_model(
    count: int, checkpointing: bool, level: str | None, devices: list[Delayed]
) -> None:
    if checkpointing and TRANSFORMERS < (5, 23):
        pytest.skip("its checkpoint is around `forward` of an instance: graphs give up within it")
    model = packed(count)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids, weights = token_ids(model), trained(model)
    resident = steps(model, ids, weights)
    with recorded(model, level) as graphs:
        assert equal(steps(model, ids, weights), resident)
        with moe_qlora.offload_experts(model) as off, Reads(devices) as reads:
            assert equal(steps(model, ids, weights), resident)  # Recording fetches now and then
            assert graphs.recorded == count and reads.count > STEPS * count * 2
            copies, missed = off.copies, devices[0].missed
            assert equal(steps(model, ids, weights), resident)
            assert off.copies - copies == STEPS * 2 * max(0, count - 2)
            assert devices[0].missed == missed and len(devices[0].made) == off.slots
    assert equal(steps(model, ids, weights), resident)


@pytest.mark.usefixtures("graphed")
@pytest.mark.parametrize(
    ("moved", "keep"),
    [("back", True), ("there and back", True), ("to other slots", False)],
)
def test_experts_that_move_between_a_forward_and_its_backward(moved: str, keep: bool) -> None:
    model = packed()
    ids, weights = token_ids(model), trained(model)
    resident = steps(model, ids, weights, 1)
    model.load_state_dict(weights, strict=False)
    with recorded(model, levels.KEEP if keep else None) as graphs:
        off = None if moved.startswith("there") else moe_qlora.offload_experts(model)
        for _ in range(3):
            assert equal(steps(model, ids, weights, 1), resident)
        model.load_state_dict(weights, strict=False)
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        if off is not None:
            off.remove() if moved == "back" else off._drop_slots()
        if moved.startswith("there"):
            off = moe_qlora.offload_experts(model)
        if moved == "there and back":
            off.remove()  # type: ignore[union-attr]
        loss.backward()
        assert [loss.item()] == resident[0]
        assert graphs.recorded == 4
        for name, parameter in model.named_parameters():
            assert parameter.grad is None or torch.equal(parameter.grad, resident[1][name]), name
        for _ in range(3):
            assert equal(steps(model, ids, weights, 1), resident)
        assert graphs.recorded == 4
        off.remove()  # type: ignore[union-attr]


@pytest.fixture
def compiler() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def gradients(model: Any, ids: Tensor, between: Any) -> list[Tensor]:
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    between()
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.usefixtures("compiler")
def test_layers_are_one_graph_each_and_fetch_within_it(
    devices: list[Delayed], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, reads, own = packed(), Reads(devices), projection.multiply_codes

    def reading(*args: Any) -> Any:  # Around compiled code, the mode would keep it from compiling
        with reads:
            return own(*args)

    monkeypatch.setattr(projection, "multiply_codes", reading)
    ids, weights = token_ids(model, seq=12), trained(model)
    made = CompileCounterWithBackend("aot_eager")
    for layer in model.get_base_model().model.layers:
        layer.compile(backend=made, fullgraph=True)
    resident = steps(model, ids, weights)
    alone = made.frame_count
    with moe_qlora.offload_experts(model) as off:
        assert equal(steps(model, ids, weights), resident)
        assert off.copies == 2 + STEPS * 2 * 2 and devices[0].missed == 1
        assert reads.count > STEPS * 4 * 2
        assert not counters["graph_break"]
        assert made.frame_count == 2 * alone  # For all layers, as before
    assert equal(steps(model, ids, weights), resident)
    # Moved between a forward and its backward
    wanted = gradients(model, ids, lambda: None)
    off = moe_qlora.offload_experts(model)
    assert all(map(torch.equal, gradients(model, ids, off.remove), wanted))
    offs: list[Any] = []
    found = gradients(model, ids, lambda: offs.append(moe_qlora.offload_experts(model)))
    assert all(map(torch.equal, found, wanted))
