"""Nothing that does not wait for the second stream needs its results, or writes what it reads."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")
from fused_layer import CASES, check_layer
from late_streams import assert_joined, run_late

from moe_qlora.kernels import grouped_mm, quantized_mm, table, workspace

KERNELS = {"codes": quantized_mm.KERNEL, "dequantized": grouped_mm.KERNEL}
# Both LoRAs; one, with biases; the other one, transposed; none.
EVERY = ["few", "gelu", "few-transposed", "no-lora"]


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("name", "kernel", "cap"),
    [
        *((name, way, (None, 1)[i // 2]) for i, name in enumerate(EVERY) for way in KERNELS),
        *(
            pytest.param(name, [*KERNELS][i % 2], (None, 1)[i // 2 % 2], marks=pytest.mark.nightly)
            for i, name in enumerate(sorted(CASES.keys() - EVERY))
        ),
    ],
)
def test_a_layer_waits_for_what_it_needs(
    name: str, kernel: str, cap: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_late(monkeypatch)
    monkeypatch.setattr(table, "KERNELS", [KERNELS[kernel], grouped_mm.KERNEL])
    workspace.set_workspace_cap(cap)
    try:
        check_layer(CASES[name])
    finally:
        workspace.set_workspace_cap(None)
    assert_joined()
