"""Stand-ins for loops over a sequence against the loops themselves, on the meta device."""

from __future__ import annotations

import sys
from collections import namedtuple
from contextlib import nullcontext

import pytest
import torch

from moe_qlora.memory import meta_step, tracker
from moe_qlora.memory.budget import Settings
from moe_qlora.memory.meta_model import source_of
from moe_qlora.memory.planner import Planner
from moe_qlora.testing import tiny_model

MODELING = "transformers.models.qwen3_next.modeling_qwen3_next"


def steps_of(seq, checkpointing):
    model = tiny_model("qwen3_next", device="meta", dtype=torch.bfloat16)
    source = source_of(model, None, None, False)
    made = Planner(source, Settings(seq=seq, checkpointing=checkpointing))
    return made._run_step(1, seq, meta_step.NO_CAP)


@pytest.mark.parametrize(
    ("seq", "checkpointing"), [(1280, True), (1344, False), (1399, True), (1399, False)]
)
def test_a_stand_in_takes_the_bytes_of_the_loop(seq, checkpointing, monkeypatch):
    turns = []
    apply = tracker._Scan.apply
    monkeypatch.setattr(tracker._Scan, "apply", lambda *args: turns.append(1) or apply(*args))
    short = steps_of(seq, checkpointing)
    assert turns
    monkeypatch.setattr(meta_step, "scans_by_size", lambda model: nullcontext())
    assert steps_of(seq, checkpointing) == short


def test_the_loops_are_back_afterwards_and_run_on_other_devices():
    model = tiny_model("qwen3_next", device="meta")
    modeling = sys.modules[MODELING]
    own = modeling.torch_chunk_gated_delta_rule
    inputs = [torch.randn(1, 80, 2, 8) for _ in range(3)]
    gates = [-torch.rand(1, 80, 2), torch.rand(1, 80, 2)]
    expected, _ = own(*inputs, *gates)
    with tracker.scans_by_size(model), tracker.scans_by_size(model):
        assert modeling.torch_chunk_gated_delta_rule is not own
        given, _ = modeling.torch_chunk_gated_delta_rule(*inputs, *gates)
    assert torch.equal(given, expected)
    assert modeling.torch_chunk_gated_delta_rule is own
    assert not tracker._patched


def test_what_an_operator_made_before_is_what_it_makes(monkeypatch):
    """Of each layout and type; what is a view of its input stays one, and is not counted."""
    monkeypatch.setattr(tracker, "_made", {})
    x = torch.empty(4, 6, 8, device="meta")
    other = torch.empty(4, 8, 6, device="meta").transpose(1, 2)  # of the same shape
    inputs = [x, other, x[:, :3], x.bfloat16(), x.int()]
    functions = [lambda t: t * 2, lambda t: t * 2.0, lambda t: t + x.sum(), torch.empty_like]
    functions += [lambda t: t.sum(1), lambda t: torch.cat([t, t], 1), lambda t: t.view(t.dtype)]
    functions.append(lambda t: torch.ops.aten._unsafe_view(t, t.shape))

    def kinds():
        made = [(t.untyped_storage(), function(t)) for t in inputs for function in functions]
        views = [own._cdata == out.untyped_storage()._cdata for own, out in made]
        return views, [(out.shape, out.stride(), out.dtype) for _, out in made]

    plain = kinds()
    for mode in (tracker.MemoryTracker(inputs), tracker.MemoryTracker(inputs)):
        with mode:
            assert kinds() == plain
    assert len(tracker._made) > 4 * len(inputs)


def test_tensors_in_nested_containers_are_found_in_order():
    a, b, c, d, e = torch.ones(5).unbind()
    pair = namedtuple("pair", "first second")
    tree = [a, (1, [b, None], "text"), {"key": c, "other": (2.0, d)}, pair(torch.int8, e)]
    found = tracker.tensors_of(tree)
    assert [id(tensor) for tensor in found] == [id(tensor) for tensor in (a, b, c, d, e)]
    assert tracker.tensors_of(a) == [a] and tracker.tensors_of(None) == []
    assert len(tracker.tensors_of(torch.ones(2).sort())) == 2
