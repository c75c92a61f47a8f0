"""Decoder layers as CUDA graphs: the same losses and gradients as without them."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from graphed import COMPILED, assert_near, batch, gradients, packed
from torch import Tensor
from transformers import DynamicCache

import moe_qlora
from moe_qlora.memory import levels
from moe_qlora.speed.call_kinds import CallKinds, unflatten
from moe_qlora.speed.fitted import FittedLayer, used_arguments
from moe_qlora.speed.graphs import LayerGraphs, graph_layers
from moe_qlora.speed.segments import SegmentMask
from moe_qlora.testing import tiny_model

gpu = pytest.mark.gpu
compiles = pytest.mark.filterwarnings("ignore")  # of torch's compiler, about its own choices
keeps = pytest.mark.parametrize("keep", [False, True])
FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "olmoe")


def test_a_model_on_the_cpu_has_nothing_to_record() -> None:
    with pytest.raises(moe_qlora.ConfigError, match="no decoder layer on a CUDA device"):
        graph_layers(tiny_model("qwen3_moe"))


def test_a_number_in_a_tensor_has_a_buffer_too() -> None:
    graphs = object.__new__(LayerGraphs)
    graphs._buffers = {}
    number = torch.tensor(3)
    buffer = graphs.buffer("argument", number.shape, number)
    assert buffer.shape == number.shape and buffer.dtype == number.dtype


def test_what_only_passes_through_a_layer_tells_no_calls_apart() -> None:
    layer, ids = tiny_model("qwen3_moe").model.layers[0], torch.ones(1, 4)
    given = {
        "num_items_in_batch": 7, "output_router_logits": True, "chunk_mem_const": 8, "seq_idx": ids,
        "is_causal": False, "past_key_values": DynamicCache(), "use_cache": False, "absent": None,
    }  # fmt: skip
    assert used_arguments(layer, (), given) == (
        (), {"seq_idx": ids, "is_causal": False, "past_key_values": None, "use_cache": False},
    )  # fmt: skip


def test_numbers_on_the_host_tell_calls_apart() -> None:
    model, x = tiny_model("qwen3_moe"), torch.ones(1, 4, 64)
    kinds = CallKinds(model, model.model.layers[0])
    masks = [SegmentMask(torch.arange(3), torch.tensor([4, rows]), 0) for rows in (0, 1, 1)]
    leaves, structure, one = kinds.describe((x,), {"mask": masks[0], "pair": (x, None)})
    other, same = (kinds.describe((x,), {"mask": m, "pair": (x, None)})[2] for m in masks[1:])
    assert one != other == same
    args, kwargs = unflatten(structure, iter(leaves))
    assert args[0] is x and kwargs["mask"] == masks[0] and kwargs["pair"] == (x, None)


@gpu
@keeps
@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("length", [64, 640])  # With 1,024 tokens and more, on two streams
@pytest.mark.parametrize("model_type", FAMILIES)
def test_replays_give_the_gradients_of_the_layer(
    model_type: str, length: int, checkpointing: bool, keep: bool
) -> None:
    model = packed(model_type)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    batches = [batch(step, length) for step in range(5)]
    wanted = [gradients(model, ids) for ids in batches]
    with graph_layers(model, keep=keep) as graphs:
        for ids, want in zip(batches, wanted, strict=True):
            assert_near(gradients(model, ids), want)
        assert graphs.recorded == model.config.num_hidden_layers
    assert_near(gradients(model, batches[4]), wanted[4])
    assert graphs.recorded == 0


@gpu
@keeps
@compiles
@pytest.mark.parametrize("order", ["compiled before", "asked for"])
def test_compiled_layers_are_recorded(order: str, keep: bool) -> None:
    model = packed()
    layers = model.get_base_model().model.layers
    for layer in layers:
        layer.compile()
    wanted = [gradients(model, batch(step)) for step in range(4)]
    if order == "asked for":
        for layer in layers:
            layer._compiled_call_impl = None
    with graph_layers(model, compiled=order == "asked for", keep=keep) as graphs:
        for step in range(4):
            assert_near(gradients(model, batch(step)), wanted[step])
        assert graphs.recorded == model.config.num_hidden_layers
    assert (layers[0]._compiled_call_impl is None) is (order == "asked for")


ALL_EXPERTS = {"num_experts_per_tok": 4}
"""Routers that choose all experts: compiled in another way, they may choose other ones."""


@gpu
@compiles
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("level", levels.EVERY[1:-1])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3"])
def test_layers_that_keep_a_part_are_recorded(model_type: str, level: str, compiled: bool) -> None:
    model = packed(model_type, ALL_EXPERTS if compiled else None)
    wanted = [gradients(model, batch(step)) for step in range(4)]
    layers = model.get_base_model().model.layers
    fitted = [FittedLayer(layer, level, (1, 10_000), set()) for layer in layers]
    if not compiled:  # The same kernels run
        assert_near(gradients(model, batch(3)), wanted[3])
    with graph_layers(model, compiled=compiled) as graphs:
        for step in range(4):
            within = COMPILED if compiled else 0.02
            assert_near(gradients(model, batch(step)), wanted[step], within)
        assert graphs.recorded == len(layers)
    for each in fitted:
        each.remove()
    assert "forward" not in layers[0].__dict__


@gpu
@pytest.mark.parametrize("changed", [[0], [2], [0, 2], [3], [0, 1, 2, 3]])
def test_layers_whose_level_changes_are_recorded_anew(changed: list[int]) -> None:
    """And so are those whose graphs write where the others keep tensors now."""
    model = packed(config={"num_hidden_layers": 4})
    wanted = [gradients(model, batch(step)) for step in range(9)]
    layers = model.get_base_model().model.layers
    fitted = [FittedLayer(layer, levels.KEEP, (1, 10_000), set()) for layer in layers]
    with graph_layers(model) as graphs:
        for step in range(9):
            if step == 4:
                for place in changed:
                    fitted[place].level = levels.EXPERTS
            assert_near(gradients(model, batch(step)), wanted[step])
        assert graphs.recorded == len(layers)


@gpu
def test_what_layers_keep_is_recorded_in_one_order_with_what_they_compute_again() -> None:
    """Layers of all levels, two lengths in turns, and a layer that is recorded late."""
    model = packed(config={"num_hidden_layers": 6})
    steps = [(0, 64), (1, 64), (2, 32), (3, 32), (4, 64), (5, 32), (6, 64)]
    wanted = [gradients(model, batch(*step)) for step in steps]
    layers = model.get_base_model().model.layers
    order = [levels.KEEP, levels.RECOMPUTE, levels.EXPERTS, levels.KEEP, levels.ATTENTION]
    for layer, level in zip(layers, [*order, levels.KEEP], strict=True):
        FittedLayer(layer, level, (1, 10_000), set())
    with graph_layers(model) as graphs:
        for place, step in enumerate(steps):
            if place == 4:
                late = next(each for each in graphs._layers if each.layer is layers[4])
                late.calls.clear()
            assert_near(gradients(model, batch(*step)), wanted[place])
        for place, step in enumerate(steps):
            assert_near(gradients(model, batch(*step)), wanted[place])
        assert graphs.recorded == 12
        # A forward whose loss is given up leaves nothing that a later step waits for.
        model(input_ids=batch(0), labels=batch(0))
        before = graphs.recorded
        assert_near(gradients(model, batch(0)), wanted[0])
        assert graphs.recorded == before


@gpu
@keeps
def test_several_forwards_may_come_before_their_backwards(keep: bool) -> None:
    model = packed()
    wanted = [gradients(model, batch(step)) for step in (7, 8)]
    both = {n: wanted[0][1][n] + g for n, g in wanted[1][1].items()}
    with graph_layers(model, keep=keep):
        for step in range(3):
            gradients(model, batch(step))
        model.zero_grad()
        losses = [model(input_ids=batch(step), labels=batch(step)).loss for step in (7, 8)]
        sum(losses).backward()
        got = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        assert_near((sum(losses).item(), got), (wanted[0][0] + wanted[1][0], both))
        # Accumulated, one backward after the other.
        model.zero_grad()
        for step in (7, 8):
            model(input_ids=batch(step), labels=batch(step)).loss.backward()
        got = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        assert_near((sum(losses).item(), got), (wanted[0][0] + wanted[1][0], both))


@gpu
@keeps
def test_evaluation_is_not_recorded_and_finds_no_stale_weights(keep: bool) -> None:
    model = packed()
    ids = batch(0)
    with torch.no_grad():
        wanted = model.eval()(input_ids=ids).logits
    want = gradients(model.train(), ids)
    with graph_layers(model, keep=keep) as graphs:
        for _ in range(3):
            gradients(model, ids)
            with torch.no_grad():
                got = model.eval()(input_ids=ids).logits
            model.train()
            torch.testing.assert_close(got, wanted, rtol=0.02, atol=0.02)
        assert graphs.recorded == model.config.num_hidden_layers
        assert_near(gradients(model, ids), want)


@gpu
@keeps
def test_dropout_is_drawn_again_in_backward(keep: bool) -> None:
    """A small step along the gradient lowers the loss of the very same masks as it says."""
    model = packed(lora_dropout=0.5)
    ids = batch(0)

    def seeded() -> tuple[float, dict[str, Tensor]]:
        torch.manual_seed(11)
        return gradients(model, ids)

    wanted = seeded()
    with graph_layers(model, keep=keep) as graphs:
        for _ in range(3):
            assert_near(seeded(), wanted)
        assert graphs.recorded == model.config.num_hidden_layers
        torch.manual_seed(12)
        other = gradients(model, ids)
    assert other[0] != wanted[0]


@gpu
@keeps
def test_a_failed_recording_leaves_everything_as_before(
    caplog: pytest.LogCaptureFixture, keep: bool
) -> None:
    model = packed()
    ids = batch(0)
    want = gradients(model, ids)
    norm = next(m for m in model.modules() if type(m).__name__.endswith("RMSNorm"))
    norm.forward = lambda x, own=norm.forward: own(x) + 0 * x.sum().item()  # waits for the GPU
    stream = torch.cuda.current_stream()
    with graph_layers(model, keep=keep) as graphs, caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert_near(gradients(model, ids), want)
        assert graphs.recorded == 0
    assert "recording it failed" in caplog.text
    assert torch.cuda.current_stream() == stream
    torch.rand(3, device="cuda")
    del norm.forward
    with graph_layers(model, keep=keep) as graphs:
        for _ in range(3):
            assert_near(gradients(model, ids), want)
        assert graphs.recorded == model.config.num_hidden_layers


@gpu
@keeps
def test_a_copy_runs_as_its_class_does(keep: bool) -> None:
    model = packed()
    with graph_layers(model, keep=keep):
        for step in range(3):
            wanted = gradients(model, batch(step))
        duplicate = copy.deepcopy(model)
        assert_near(gradients(duplicate, batch(2)), wanted)


@gpu
def test_what_cannot_be_recorded_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model = packed()
    seen: list[int] = []
    experts = next(
        m
        for m in model.modules()
        if type(m).__name__.endswith("Gate") or "Router" in type(m).__name__
    )
    handle = experts.register_forward_hook(lambda *_: seen.append(1))
    want = gradients(model, batch(0))
    with graph_layers(model) as graphs, caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert_near(gradients(model, batch(0)), want)
        assert graphs.recorded == model.config.num_hidden_layers - 1
        assert len(seen) == 5  # one more for the recomputation of the first call
    assert "has a hook of" in caplog.text
    handle.remove()
    # Hidden states, which transformers gathers by hooks.
    with graph_layers(model) as graphs, caplog.at_level(logging.WARNING):
        for _ in range(3):
            out = model(input_ids=batch(0), labels=batch(0), output_hidden_states=True)
            assert len(out.hidden_states) == model.config.num_hidden_layers + 1
        assert graphs.recorded == 0
    assert "outputs of layers are gathered (hidden_states)" in caplog.text
