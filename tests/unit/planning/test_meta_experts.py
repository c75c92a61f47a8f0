"""An experts module on meta allocates what it allocates where it computes."""

import copy
import sys

import pytest
import torch

from moe_qlora.experts import backend, operands
from moe_qlora.kernels import cards, table, workspace
from moe_qlora.kernels.cards import PORTABLE, of_capability
from moe_qlora.packing import parametrize
from moe_qlora.planning import model as models
from moe_qlora.planning.step import MemoryTracker
from tests.helpers.lora_layer import NAMES, E, H, K, add_lora, packed_host

host = pytest.fixture(packed_host)


def activated(host, device):
    """The experts module of a copy, with LoRA, and its inputs of some tokens."""
    model = models.copy_to_meta(host) if device == "meta" else copy.deepcopy(host)
    add_lora(model, device)
    return model.experts


def allocations(module, tokens, device):
    """Bytes saved for backward, and the most of forward and of backward, output included."""
    x = torch.randn(tokens, H, device=device).half().requires_grad_()
    weights = torch.rand(tokens, K, device=device).half().requires_grad_()
    index = torch.arange(K, device=device).repeat(tokens, 1)  # the most that an expert can have
    grad = torch.ones(tokens, H, dtype=torch.float16, device=device)
    packed = [parametrize.read_packed(module, name) for name in NAMES]
    known = [*module.parameters(), *module.buffers(), x, weights, index, grad]
    known += [tensor for weight in packed for tensor in weight.statistics]
    lora = [each for name in NAMES for each in operands.known_record(module).lora.active_lora(name)]
    known += [factor for each in lora for factor in (each.a, each.b)]
    tracker = MemoryTracker(known, E)
    with tracker:
        out = module(x, index, weights)
        saved, most = tracker.live, tracker.mark()
        out.backward(grad)
        return saved, most, tracker.mark()


def on_meta(host, tokens, card, cap=1 << 40):
    """The same, with the workspace counted too."""
    allocate = lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, device="meta")  # noqa: E731
    planned = workspace.PlannedWorkspace(cap, allocate)
    with cards.planned_for(card), workspace.planned(planned):
        return allocations(activated(host, "meta"), tokens, "meta")


@pytest.mark.parametrize(("tokens", "cap"), [(40, None), (420, None), (420, 3 * 64 * 128 * 2)])
def test_a_fused_layer_allocates_on_meta_what_it_allocates_elsewhere(
    host, tokens, cap, monkeypatch
):
    """On the codes, dequantized, and in pieces and slices under a cap of the workspace."""
    planned = on_meta(host, tokens, PORTABLE, cap or 1 << 40)
    table.kernels()  # Imports all
    for name, module in list(sys.modules.items()):
        if name.startswith("moe_qlora.kernels.") and hasattr(module, "launcher"):
            monkeypatch.setattr(module, "launcher", lambda *_: lambda *args, **options: None)
    monkeypatch.setattr(backend, "kernels_run", lambda device: True)
    workspace.set_workspace_cap(cap)  # which releases the workspace
    try:
        with cards.acting_as(PORTABLE):
            assert allocations(activated(host, "cpu"), tokens, "cpu") == planned
    finally:
        workspace.set_workspace_cap(None)
    assert planned[0] < planned[1] < planned[2]


@pytest.mark.parametrize("card", [of_capability((7, 5)), of_capability((9, 0))])
def test_projections_allocate_on_meta_what_they_allocate_elsewhere(host, card, monkeypatch):
    """Expert by expert on a card without kernels, else by grouped matmuls."""
    grouped = card.capability >= (8, 0)
    monkeypatch.setattr(backend, "fused_obstacle", lambda module, call: "by projection")
    planned = on_meta(host, 40, card)
    for name in ("runs_grouped", "has_grouped"):
        monkeypatch.setattr(f"moe_qlora.experts.projection.{name}", lambda *args: grouped)
    real = allocations(activated(host, "cpu"), 40, "cpu")
    assert planned[0] == real[0]
    assert planned == pytest.approx(real, rel=0.02)
