"""The tracker of bytes on meta, and loops over a sequence, which take fewer turns there."""

from __future__ import annotations

import pytest
import torch

from moe_qlora.planning import step
from moe_qlora.planning.budget import Settings
from moe_qlora.planning.model import source_of
from moe_qlora.planning.planner import Planner
from moe_qlora.testing import tiny_model


@pytest.mark.parametrize(("seq", "checkpointing"), [(2048, True), (2399, False)])
def test_shorter_sequences_take_the_bytes_of_a_long_one(seq, checkpointing, monkeypatch):
    def peak():
        model = tiny_model("qwen3_next", device="meta", dtype=torch.bfloat16)
        settings = Settings(seq=seq, checkpointing=checkpointing)
        return Planner(source_of(model, None), settings).report(()).peak.nbytes

    short = peak()
    monkeypatch.setattr(step, "_TURNS", seq)
    assert short == pytest.approx(peak(), rel=0.01)


def test_what_an_operator_made_before_is_what_it_makes(monkeypatch):
    """Of each layout and type; what is a view of its input stays one, and is not counted."""
    monkeypatch.setattr(step, "_made", {})
    x = torch.empty(4, 6, 8, device="meta")
    inputs = [x, torch.empty(4, 8, 6, device="meta").transpose(1, 2), x[:, :3], x.bfloat16()]
    functions = [lambda t: t * 2, lambda t: t + x.sum(), torch.empty_like, lambda t: t.sum(1)]
    functions += [lambda t: t.view(t.dtype), lambda t: torch.ops.aten._unsafe_view(t, t.shape)]

    def kinds():
        made = [(t.untyped_storage(), function(t)) for t in inputs for function in functions]
        views = [own._cdata == out.untyped_storage()._cdata for own, out in made]
        return views, [(out.shape, out.stride(), out.dtype) for _, out in made]

    plain = kinds()
    for _ in range(2):
        with step.MemoryTracker(inputs):
            assert kinds() == plain
    assert len(step._made) > 3 * len(inputs)
