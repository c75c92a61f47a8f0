"""Router logits of recorded layers, and the loss that balances experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from emulated_graphs import emulate, emulated
from graphed import assert_near, batch, gradients, packed
from torch import Tensor
from transformers.utils import output_capturing
from upstream import TRANSFORMERS

from moe_qlora.memory import levels
from moe_qlora.speed import gathered
from moe_qlora.speed.fitted import FittedLayer
from moe_qlora.speed.graphs import graph_layers
from moe_qlora.speed.recording import ObstacleError
from moe_qlora.testing import tiny_model

COEFFICIENT = 0.5  # Such that the loss is most of the routers' gradient
EACH = pytest.mark.parametrize(
    ("model_type", "keep", "checkpointing"),
    [
        *(("qwen3_moe", both, both) for both in (False, True)),
        *(("mixtral", True, False), ("gpt_oss", False, True)),
    ],
)
keeps = pytest.mark.parametrize("keep", [False, True])


def balanced(model: Any, ids: Tensor, asked: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The loss and router logits of one batch, and each trained weight's gradient."""
    model.zero_grad()
    out = model(input_ids=ids, labels=ids, output_router_logits=asked)
    out.loss.backward()
    named = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return [out.loss.detach(), *(each.detach() for each in out.router_logits or ())], named


@pytest.mark.filterwarnings("ignore:User provided device_type of 'cuda'")
@EACH
def test_router_logits_of_replays_have_gradients(
    monkeypatch: pytest.MonkeyPatch, model_type: str, keep: bool, checkpointing: bool
) -> None:
    if checkpointing and TRANSFORMERS < (5, 23):
        pytest.skip("its checkpoint is around `forward` of an instance: graphs give up within it")
    emulate(monkeypatch)
    model: Any = tiny_model(model_type).train()
    model.config.use_cache = False
    model.router_aux_loss_coef = COEFFICIENT
    count = model.config.num_hidden_layers
    batches = [
        torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(step))
        for step in range(4)
    ]
    steps = [(ids, asked) for asked in (True, False, True) for ids in batches]
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    wanted = [balanced(model, *step) for step in steps]
    (_, with_loss), (_, without) = wanted[0], wanted[4]
    router = next(name for name in without if name.endswith(("gate.weight", "router.weight")))
    assert not torch.allclose(with_loss[router], without[router], rtol=0.1)
    with emulated(model, keep=keep) as graphs:
        for step, want in zip(steps, wanted, strict=True):
            got = balanced(model, *step)
            assert len(got[0]) == 1 + count * step[1]
            torch.testing.assert_close(got, want)
        assert graphs.recorded == 2 * count


@pytest.mark.filterwarnings("ignore:User provided device_type of 'cuda'")
@keeps
def test_logits_that_nothing_is_trained_for_are_returned(
    monkeypatch: pytest.MonkeyPatch, keep: bool
) -> None:
    """The first layer's, where neither attention nor embeddings are trained."""
    emulate(monkeypatch)
    model: Any = tiny_model("qwen3_moe").train().requires_grad_(False)
    model.config.use_cache = False
    for layer in model.model.layers:
        layer.mlp.experts.requires_grad_(True)
    ids = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(0))
    want = balanced(model, ids, True)
    with emulated(model, keep=keep) as graphs:
        for _ in range(4):
            torch.testing.assert_close(balanced(model, ids, True), want)
        assert graphs.recorded == model.config.num_hidden_layers


@pytest.mark.filterwarnings("ignore:User provided device_type of 'cuda'")
def test_logits_may_be_asked_for_by_the_configuration_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Then no argument of a layer says so."""
    emulate(monkeypatch)
    model: Any = tiny_model("qwen3_moe").train()
    model.config.use_cache = False
    ids = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(0))
    with emulated(model) as graphs:
        for _ in range(2):
            for asked in (False, False, True, True, True):
                model.config.output_router_logits = asked
                found = model.model(input_ids=ids).get("router_logits") or ()
                assert len(found) == asked * model.config.num_hidden_layers
        assert graphs.recorded == 2 * model.config.num_hidden_layers


def test_other_outputs_are_not_gathered_from_graphs() -> None:
    collector = output_capturing._active_collector
    assert not gathered.asked()
    for keys, asked in (((), False), (("router_logits",), True)):
        token = collector.set({key: [] for key in keys})
        assert gathered.asked() is asked
        collector.reset(token)
    token = collector.set({"router_logits": [], "attentions": []})
    with pytest.raises(ObstacleError, match=r"gathered \(attentions\), of which router logits"):
        gathered.asked()
    collector.reset(token)


@pytest.mark.gpu
@EACH
def test_the_loss_that_balances_experts_is_trained_through_graphs(
    model_type: str, keep: bool, checkpointing: bool
) -> None:
    model = packed(model_type)
    model.get_base_model().router_aux_loss_coef = COEFFICIENT
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    asked = {"output_router_logits": True}
    plain = gradients(model, batch(0))
    wanted = [gradients(model, batch(step), **asked) for step in range(5)]
    assert wanted[0][0] > plain[0] + 0.1
    with graph_layers(model, keep=keep) as graphs:
        for step in range(5):
            assert_near(gradients(model, batch(step), **asked), wanted[step])
        assert graphs.recorded == model.config.num_hidden_layers
        out = model(input_ids=batch(0), labels=batch(0), **asked)
        assert len(out.router_logits) == model.config.num_hidden_layers
        out.loss.backward()
        for _ in range(3):
            assert_near(gradients(model, batch(0)), plain)


@pytest.mark.gpu
@pytest.mark.parametrize("level", levels.EVERY[1:-1])
def test_router_logits_of_layers_that_keep_a_part(level: str) -> None:
    model = packed()
    model.get_base_model().router_aux_loss_coef = COEFFICIENT
    asked = {"output_router_logits": True}
    wanted = [gradients(model, batch(step), **asked) for step in range(4)]
    layers = model.get_base_model().model.layers
    for layer in layers:
        FittedLayer(layer, level, (1, 10_000), set())
    with graph_layers(model) as graphs:
        for step in range(4):
            assert_near(gradients(model, batch(step), **asked), wanted[step])
        assert graphs.recorded == len(layers)
