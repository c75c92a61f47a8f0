"""Rows of tiles of 16, whose programs load a step ahead, in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

triton = pytest.importorskip("triton")
from fused_layer import Case, build, check_layer  # noqa: E402

from moe_qlora.kernels import moe_layer, row_kernels, table  # noqa: E402
from moe_qlora.kernels.gate_kernels import Gate  # noqa: E402

if not triton.knobs.runtime.interpret:
    pytest.skip("a GPU is there, and with it the compiled kernels", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("interpreted")

OSS = Gate("silu", interleaved=True, limit=0.7, alpha=1.7, shift=1.0)
WIDE = Case(tokens=5, experts=5, hidden=96, inner=80, ranks=(3, 20))
CASES = {
    "plain": WIDE,
    "transposed": replace(WIDE, transposed=True, ranks=(16, 16)),
    "biased": replace(WIDE, biased=True, gate=OSS, hidden=72),
    "no-lora": replace(WIDE, ranks=(0, 0), gate=Gate("relu", gated=False), hidden=80, inner=88),
    "one-lora": replace(WIDE, ranks=(0, 7)),
}


@pytest.fixture
def narrow_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 32 columns, 16 at rank 32, so that small rows have several; and all are copied."""
    monkeypatch.setattr(row_kernels, "FACTOR_PART", 512)
    monkeypatch.setattr(table, "KERNELS", [replace(k, gathers=False) for k in table.KERNELS])


def outputs(case):
    made, _, x, weights, index, biases, loras = build(case)
    operands = moe_layer.Operands(x, weights, biases, loras)
    with torch.no_grad():
        state = moe_layer.gate_up_forward(made, index, operands)
        moe_layer.down_forward(made, state)
    live = int(state.routing.expert_offsets[case.experts])
    return state.saved.pre[:live], state.inner[:live], state.routing.tile


@pytest.mark.usefixtures("narrow_steps")
@pytest.mark.parametrize("name", CASES)
def test_steps_ahead_change_no_bit(name, monkeypatch):
    check_layer(CASES[name])
    steps = []
    real = row_kernels.unrolled
    monkeypatch.setattr(row_kernels, "unrolled", lambda *a: steps.append(real(*a)) or steps[-1])
    *ahead, tile = outputs(CASES[name])
    assert tile == 16 and len(steps) == 2 and min(steps) > 1
    monkeypatch.setattr(row_kernels, "unrolled", lambda *args: 1)
    *plain, _ = outputs(CASES[name])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(ahead, plain, strict=True))


def test_only_short_rows_of_small_tiles_are_unrolled():
    assert row_kernels.unrolled(2048, 512, 16) == 4
    assert row_kernels.unrolled(4096, 512, 16) == 8
    assert row_kernels.unrolled(4104, 512, 16) == 1
    assert row_kernels.unrolled(2048, 512, 64) == 1


@pytest.mark.parametrize(("biased", "steps"), [(False, 2), (True, 1)])
def test_rows_beside_a_bias_are_not_unrolled(biased, steps):
    sizes = 1024, 1088, 16, False, 2, 16, 4, biased
    assert row_kernels.launch_permute.geometry(*sizes)[1]["STEPS"] == steps
