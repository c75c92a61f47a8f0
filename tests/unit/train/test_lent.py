"""What graphs lend is overwritten by nobody as long as it is used."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from emulated_graphs import emulate
from graphed import assert_near, packed, recorded
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from moe_qlora.planning import levels
from moe_qlora.testing import tiny_model
from moe_qlora.train.lent import Lent, is_at

STEPS = 6
Kept = list[tuple[Tensor, Tensor]]  # Tensors, and copies that were made at once

pytestmark = pytest.mark.filterwarnings("ignore:User provided device_type of 'cuda'")


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    emulate(monkeypatch)
    made: Any = tiny_model("qwen3_moe", num_hidden_layers=3).train()
    made.config.use_cache = False
    yield made
    gc.collect()


def keep(kept: Kept, tensor: Tensor) -> None:
    kept.append((tensor, tensor.detach().clone()))


def train(model: Any, each: Callable[[int, Any], None] | None = None, rest: int = 1) -> list[Any]:
    """The gradients of each step, of `rest` batches one after the other."""
    model.zero_grad()
    found = []
    for step in range(STEPS):
        ids = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(step))
        ids = ids.to(model.device)
        loss = model(input_ids=ids, labels=ids).loss
        if step % rest == 0:
            model.zero_grad()
        loss.backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        found.append({name: grad.clone() for name, grad in grads.items()})
        if each is not None:
            each(step, grads)
    return found


def test_a_tensor_is_free_again_when_nobody_references_it() -> None:
    memory = torch.randn(2, 1, 5).to(torch.bfloat16)
    lent = Lent(memory)
    assert lent.is_free
    tensor = lent.lend()
    assert is_at(tensor, memory) and not tensor._is_view() and lent.is_lent_as(tensor)
    part = tensor.detach()[1:, :, 2:]
    del tensor
    assert not lent.is_free and not lent.is_lent_as(part)
    memory.fill_(3)
    assert (part == 3).all()
    del part
    assert lent.is_free


@pytest.mark.parametrize("rest", [1, 3])
def test_gradients_are_those_without_graphs_and_accumulate(model: Any, rest: int) -> None:
    """They are set to None between forward and backward, while the last ones are in use."""
    wanted = train(model, rest=rest)
    with recorded(model, levels.KEEP) as graphs:
        torch.testing.assert_close(train(model, rest=rest), wanted)
        assert graphs.recorded == 3


def test_nothing_is_copied_in_a_steady_state(model: Any) -> None:
    places: list[set[int]] = []

    def note(step: int, grads: Any) -> None:
        if step >= 2:  # recorded
            layers = {name: grad for name, grad in grads.items() if ".layers." in name}
            places.append({grad.data_ptr() for grad in layers.values()})
        grads.clear()
        model.zero_grad()

    with recorded(model, levels.KEEP) as graphs:
        train(model, note)
        calls = [next(iter(each.known.values())) for each in graphs._calls]
        assert len(places[0]) > 3 and all(each == places[0] for each in places)
        for before, call in pairwise(calls):
            assert is_at(call.arguments[0], before.outs[0])
            assert is_at(before.grads[0], call.grad_x)


class Shift(GradientCheckpointingLayer):
    """A layer whose two weights have one gradient: that of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (torch.nn.Parameter(torch.zeros(2, 3)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.one + self.other


def test_weights_never_share_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    layers = [Shift(), Shift()]
    x = torch.randn(2, 3, requires_grad=True)
    model = torch.nn.Sequential(*layers)
    with recorded(model, levels.KEEP) as graphs:
        for step in range(4):
            model.zero_grad()
            (model(x) * (step + 1)).sum().backward()
            for layer in layers:
                layer.one.grad.mul_(3)
                assert (layer.other.grad == step + 1).all()
                assert (layer.one.grad == 3 * (step + 1)).all()
        assert graphs.recorded == 2


def gradients(kept: Kept, model: Any) -> Any:
    return lambda _, grads: [keep(kept, grad.detach()) for grad in grads.values()]


def hidden_states(kept: Kept, model: Any) -> None:
    for layer in model.model.layers:
        layer.register_forward_hook(lambda _, inputs, out: keep(kept, out))


def gradients_of_hidden_states(kept: Kept, model: Any) -> None:
    for layer in model.model.layers:
        layer.register_forward_hook(
            lambda _, inputs, out: out.register_hook(lambda grad: keep(kept, grad)) and None
        )


@pytest.mark.parametrize("what", [gradients, hidden_states, gradients_of_hidden_states])
def test_what_is_in_use_stays_as_it_is(
    model: Any, what: Any, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = train(model)
    kept: Kept = []
    each = what(kept, model)
    with recorded(model, levels.KEEP) as graphs:
        torch.testing.assert_close(train(model, each), wanted)
        assert graphs.recorded == 3
        assert len(kept) >= 3 * STEPS
        for tensor, copied in kept:
            assert torch.equal(tensor, copied)
        told = [r.getMessage() for r in caplog.records if "in use" in r.getMessage()]
        assert len(told) == 1 and "clone what you keep" in told[0]


@pytest.mark.gpu
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(
    ("rest", "what"),
    [
        (1, None),
        (3, None),
        *((1, w) for w in (gradients, hidden_states, gradients_of_hidden_states)),
    ],
)
def test_on_a_gpu_nothing_in_use_is_overwritten(rest: int, what: Any, keep: bool) -> None:
    model = packed(config={"num_hidden_layers": 4})
    model.enable_input_require_grads()  # As where embeddings are trained
    kept: Kept = []
    each = None if what is None else what(kept, model.get_base_model())
    wanted = train(model, rest=rest)
    kept.clear()
    with recorded(model, levels.KEEP if keep else None) as graphs:
        for got, want in zip(train(model, each, rest=rest), wanted, strict=True):
            assert_near((0.0, got), (0.0, want))
        assert graphs.recorded == 4
        torch.cuda.synchronize()
        assert what is None or len(kept) >= 4 * STEPS
        for tensor, copied in kept:
            assert torch.equal(tensor, copied)


def test_layers_that_are_computed_again_lend_nothing(model: Any) -> None:
    """Two of their forwards may come before the backwards, which both run as graphs."""
    wanted = train(model, rest=3)
    with recorded(model) as graphs:
        torch.testing.assert_close(train(model, rest=3), wanted)
        calls = [next(iter(each.known.values())) for each in graphs._calls]
        assert len(calls) == 3
        assert not any(call.lent[0] or call.out or call.input for call in calls)
